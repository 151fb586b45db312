"""Between E2B's bodies of templates and the records. Pure."""

from collections.abc import Iterable, Sequence

from aenv.api import template_schemas as schemas
from aenv.api.errors import UnsupportedError
from aenv.errors import InvalidRequestError
from aenv.orchestrator.builds import Build
from aenv.orchestrator.model import Template
from aenv.template.journal import LogEntry
from aenv.template.plan import RegistryLogin
from aenv.template.service import BuildStart
from aenv.template.steps import RawStep

REASON_ENTRIES = 10  # last log entries of the failed step that its reason repeats


def template(value: Template, builds: Sequence[Build] = ()) -> schemas.Template:
    """``builds`` are the template's, newest first; the node's own templates have none on record."""
    return schemas.Template(
        template_id=value.id,
        build_id=value.build_id,
        cpu_count=value.vcpus,
        memory_mb=value.memory_mib,
        disk_size_mb=value.disk_mib,
        public=value.public,
        aliases=list(value.aliases),
        names=list(value.aliases),
        created_at=value.created_at,
        updated_at=value.updated_at,
        created_by=None,
        last_spawned_at=value.last_spawned_at,
        spawn_count=value.spawn_count,
        build_count=max(1, len(builds)),
        envd_version=value.envd_version,
        build_status="ready" if not builds else builds[0].status.value,
    )


def pending(value: Build, count: int, envd_version: str) -> schemas.Template:
    """A template whose first build is not ready."""
    return schemas.Template(
        template_id=value.template_id,
        build_id=value.id,
        cpu_count=value.vcpus,
        memory_mb=value.memory_mib,
        disk_size_mb=0,
        public=True,
        aliases=[value.name],
        names=[value.name],
        created_at=value.created_at,
        updated_at=value.updated_at,
        created_by=None,
        last_spawned_at=None,
        spawn_count=0,
        build_count=count,
        envd_version=envd_version,
        build_status=value.status.value,
    )


def with_builds(value: Template | None, builds: Sequence[Build]) -> schemas.TemplateWithBuilds:
    """``value`` is None while no build of the template is ready; ``builds`` has at least one then."""
    listed = [_build(build) for build in builds]
    if value is None:
        oldest, newest = builds[-1], builds[0]
        return schemas.TemplateWithBuilds(
            template_id=newest.template_id,
            public=True,
            aliases=[newest.name],
            names=[newest.name],
            created_at=oldest.created_at,
            updated_at=newest.updated_at,
            last_spawned_at=None,
            spawn_count=0,
            builds=listed,
        )
    if not any(build.build_id == value.build_id for build in listed):
        own = schemas.TemplateBuild(
            build_id=value.build_id,
            status="ready",
            created_at=value.created_at,
            updated_at=value.updated_at,
            finished_at=value.updated_at,
            cpu_count=value.vcpus,
            memory_mb=value.memory_mib,
            disk_size_mb=value.disk_mib,
            envd_version=value.envd_version,
        )
        listed.append(own)
    return schemas.TemplateWithBuilds(
        template_id=value.id,
        public=value.public,
        aliases=list(value.aliases),
        names=list(value.aliases),
        created_at=value.created_at,
        updated_at=value.updated_at,
        last_spawned_at=value.last_spawned_at,
        spawn_count=value.spawn_count,
        builds=listed,
    )


def _build(value: Build) -> schemas.TemplateBuild:
    image = value.image
    return schemas.TemplateBuild(
        build_id=value.id,
        status=value.status.value,
        created_at=value.created_at,
        updated_at=value.updated_at,
        finished_at=value.finished_at,
        cpu_count=value.vcpus,
        memory_mb=value.memory_mib,
        disk_size_mb=None if image is None else image.disk_mib,
        envd_version=None if image is None else image.envd_version,
    )


def log_entries(entries: Iterable[LogEntry]) -> list[schemas.BuildLogEntry]:
    return [
        schemas.BuildLogEntry(
            timestamp=entry.timestamp,
            level=entry.level,  # type: ignore[arg-type]  # the journal writes these four
            message=entry.message,
            step=entry.step,
        )
        for entry in entries
    ]


def build_info(value: Build, all_entries: Sequence[LogEntry], shown: Sequence[LogEntry]) -> schemas.BuildInfo:
    reason = None
    if value.failure is not None:
        step = value.failure.step
        related = [entry for entry in all_entries if entry.step == step][-REASON_ENTRIES:]
        reason = schemas.BuildReason(message=value.failure.message, step=step, log_entries=log_entries(related))
    return schemas.BuildInfo(
        template_id=value.template_id,
        build_id=value.id,
        status=value.status.value,
        logs=[],
        log_entries=log_entries(shown),
        reason=reason,
    )


def build_start(body: schemas.BuildStart) -> BuildStart:
    """Raises InvalidRequestError, UnsupportedError."""
    return BuildStart(
        steps=[RawStep(step.type, step.args, step.files_hash, step.force) for step in body.steps],
        image=body.from_image or None,
        login=_login(body.from_image_registry) if body.from_image_registry else None,
        template=body.from_template or None,
        start_cmd=body.start_cmd or "",
        ready_cmd=body.ready_cmd or "",
        force=body.force,
        dockerfile=body.dockerfile,
        image_command=body.image_command,
    )


def _login(registry: dict[str, object]) -> RegistryLogin:
    match registry:
        case {"type": "registry", "username": str(username), "password": str(password)}:
            return RegistryLogin(username, password)
        case {"type": "gcp", "serviceAccountJson": str(key)}:
            # Google's registries take a service account's key as the password of this user.
            # https://cloud.google.com/artifact-registry/docs/docker/authentication#json-key
            return RegistryLogin("_json_key", key)
        case {"type": "aws"}:
            raise UnsupportedError(
                "fromImageRegistry: signing in to AWS is not supported by this server.",
                "Use type registry with username AWS and the output of `aws ecr get-login-password`.",
            )
    raise InvalidRequestError("fromImageRegistry: expected type registry (username, password) or gcp.")
