"""Templates as the API sees them: builds are requested, started, watched and cancelled; tags are moved; names go.

A build's record follows its life (``aenv.orchestrator.builds``); its work is a task here and ``Engine``'s business.
A template exists from its first finished build on; until then its builds alone hold its name and id.
"""

import asyncio
import os
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import structlog

from aenv.config import Settings
from aenv.errors import AenvError, ConflictError, InvalidRequestError, NotFoundError, TemplateNotFoundError
from aenv.orchestrator import catalog
from aenv.orchestrator.builds import Build, BuildStatus, Failure
from aenv.orchestrator.capacity import Capacity, free_disk_mib
from aenv.orchestrator.imports import Imports
from aenv.orchestrator.model import TagTarget, Template
from aenv.orchestrator.records import Origin
from aenv.orchestrator.store import Store
from aenv.template import publishing
from aenv.template.archives import Archives
from aenv.template.cache import LayerCache
from aenv.template.engine import BuildFailedError, Engine
from aenv.template.growth import MAX_DISK
from aenv.template.journal import JournalStore, LogEntry
from aenv.template.machine import Pins, Workshop
from aenv.template.origin import BASE, is_base
from aenv.template.plan import Plan, RegistryLogin
from aenv.template.steps import RawStep, check_hash, parse
from aenv.vmm.protocol import MachineShape

log = structlog.get_logger()

ABANDONED = timedelta(days=1)  # after which a build whose steps never came is forgotten
INTERRUPTED = "The server stopped while this build ran. Build again: finished steps are cached."


@dataclass(frozen=True, slots=True)
class BuildStart:
    """The body of a build's start. Without ``image`` and ``template`` it is the base image."""

    steps: Sequence[RawStep]
    image: str | None = None
    login: RegistryLogin | None = None
    template: str | None = None
    start_cmd: str = ""
    ready_cmd: str = ""
    force: bool = False
    dockerfile: bool = False
    image_command: str | None = None


class TemplateService:
    def __init__(
        self,
        settings: Settings,
        workshop: Workshop,
        engine: Engine,
        cache: LayerCache,
        capacity: Capacity,
        journals: JournalStore,
        archives: Archives,
        imports: Imports,
    ) -> None:
        self._settings = settings
        self._workshop = self.workshop = workshop
        self._store: Store = workshop.store
        self._imports = imports
        self._engine = engine
        self._capacity = capacity
        self._cache = cache
        self._journals = journals
        self.archives = archives
        self._turns = asyncio.Semaphore(settings.max_builds or os.cpu_count() or 1)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def envd_version(self) -> str:
        """Of guests that are booted now."""
        return self._workshop.envd_version

    # -- start and stop ---------------------------------------------------------------------------------

    def open(self) -> None:
        """Mark what the last server left unfinished as failed, and forget what nobody will finish."""
        self.archives.open()
        self._journals.prepare()
        now = datetime.now(UTC)
        with self._store.transaction():
            for build in list(self._store.builds.rows.values()):
                if build.status.final:
                    continue
                if build.started:
                    self._store.builds.put(publishing.failed(build, Failure(INTERRUPTED), now))
                elif now - build.created_at > ABANDONED:
                    self._store.builds.delete(build.id)
        self._journals.retain(set(self._store.builds.rows))

    async def close(self) -> None:
        """Cancel running builds; they are marked as failed."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- builds -----------------------------------------------------------------------------------------

    def request(
        self,
        name: str,
        tags: Sequence[str],
        vcpus: int | None = None,
        memory_mib: int | None = None,
        min_free_mib: int = 0,
    ) -> Build:
        """Record a build that waits for its steps. Raises InvalidRequestError, ConflictError."""
        reference = catalog.parse(name)
        if reference.name == BASE:
            raise InvalidRequestError(f"The name {BASE!r} is the node's own.", "Choose another name.")
        if any(saved.name == reference.name for saved in self._store.saved.rows.values()):
            raise ConflictError(f"{reference.name!r} is the name of a snapshot.", "Choose another name.")
        wanted = [*([reference.tag] if reference.tag else []), *map(catalog.check_tag, tags)]
        shape = self._workshop.default_shape
        vcpus = shape.vcpus if vcpus is None else vcpus
        memory_mib = shape.memory_mib if memory_mib is None else memory_mib
        if not 1 <= vcpus <= 32 or not 128 <= memory_mib <= 65536:
            raise InvalidRequestError(
                f"{vcpus} CPUs and {memory_mib} MiB of memory are out of range.",
                "Use cpuCount from 1 to 32 and memoryMB from 128 to 65536.",
            )
        if not 0 <= min_free_mib <= MAX_DISK:
            raise InvalidRequestError(f"minFreeDiskMb: must be from 0 to {MAX_DISK} MiB, not {min_free_mib}.")
        now = datetime.now(UTC)
        build = Build(
            id=str(uuid.uuid4()),
            template_id=self._template_id(reference.name) or secrets.token_hex(10),
            name=reference.name,
            tags=tuple(dict.fromkeys(wanted)) or (catalog.DEFAULT_TAG,),
            status=BuildStatus.WAITING,
            vcpus=vcpus,
            memory_mib=memory_mib,
            created_at=now,
            updated_at=now,
            min_free_mib=min_free_mib,
        )
        with self._store.transaction():
            self._store.builds.put(build)
        return build

    def _template_id(self, name: str) -> str | None:
        """The id that the name has, also while its first build is under way."""
        if (template := self._find(name)) is not None:
            return template.id
        return next((b.template_id for b in self._store.builds.rows.values() if b.name == name), None)

    async def start(self, template_id: str, build_id: str, body: BuildStart) -> None:
        """Begin a requested build in the background. Raises NotFoundError, InvalidRequestError."""
        build = self.build(template_id, build_id)
        if build.status is not BuildStatus.WAITING or build.started:
            raise InvalidRequestError(f"Build {build_id} has been started already.", "Request a new build.")
        plan = self._plan(build, body, await self._imports.origin(body.template) if body.template else None)
        started = replace(build, started=True, updated_at=datetime.now(UTC))
        with self._store.transaction():
            self._store.builds.put(started)
        task = asyncio.create_task(self._run(started, plan), name=f"build-{build_id}")
        self._tasks[build_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(build_id, None))

    def _plan(self, build: Build, body: BuildStart, template: Origin | None) -> Plan:
        if body.image and body.template:
            raise InvalidRequestError("Give either fromImage or fromTemplate, not both.")
        steps = parse(body.steps)
        if template is None and (body.image is None or is_base(body.image)):
            template = self._find(BASE)
        return Plan(
            shape=MachineShape(build.vcpus, build.memory_mib),
            steps=steps,
            image=None if template is not None else body.image,
            login=body.login,
            template=template,
            start_cmd=body.start_cmd.strip(),
            ready_cmd=body.ready_cmd.strip(),
            min_free_mib=build.min_free_mib,
            force=body.force,
            dockerfile=body.dockerfile,
            image_command=body.image_command,
        )

    async def _run(self, build: Build, plan: Plan) -> None:
        journal = self._journals.start(build.id)
        pins = Pins(self._workshop.checkpoints)
        began = asyncio.get_running_loop().time()
        try:
            async with self._turns, asyncio.timeout(self._settings.build_timeout):
                self._make_room()
                self._capacity.take(1)
                try:
                    self._put(replace(build, status=BuildStatus.BUILDING, updated_at=datetime.now(UTC)))
                    image = await self._engine.run(plan, journal, pins)
                finally:
                    self._capacity.give_back()
            took = asyncio.get_running_loop().time() - began
            journal.write(f"build finished in {took:.1f} s", step="finalize")
            if build.id in self._store.builds.rows:
                with self._store.transaction():
                    publishing.publish(self._store, self._store.builds[build.id], image, datetime.now(UTC))
        except BuildFailedError as error:
            self._fail(build, error.failure)
        except TimeoutError:
            self._fail(build, Failure(f"The build took longer than {self._settings.build_timeout:.0f} seconds."))
        except AenvError as error:
            self._fail(build, Failure(str(error)))
        except asyncio.CancelledError:
            self._fail(build, Failure("The build was cancelled."))
            raise
        except Exception as error:
            log.exception("build failed unexpectedly", build=build.id)
            self._fail(build, Failure(f"Internal error; the server's log has the details ({type(error).__name__})."))
        finally:
            self._journals.finish(build.id)
            pins.release()
            self._forget_old(build.template_id)

    def _make_room(self) -> None:
        """On a disk that is nearly full, cached layers go before builds are refused."""
        if free_disk_mib(self._settings.home) < 2 * self._settings.reserve_disk:
            self._cache.shrink()
            self._workshop.checkpoints.collect_garbage()

    def _fail(self, build: Build, failure: Failure) -> None:
        if build.id not in self._store.builds.rows:
            return  # deleted meanwhile, and its log with it
        if (journal := self._journals.running(build.id)) is not None:
            journal.write(failure.message, level="error", step=failure.step)
        self._put(publishing.failed(self._store.builds[build.id], failure, datetime.now(UTC)))

    def _put(self, build: Build) -> None:
        if build.id in self._store.builds.rows:
            with self._store.transaction():
                self._store.builds.put(build)

    def _forget_old(self, template_id: str) -> None:
        for build in publishing.forgettable(self._store.builds.rows.values(), template_id):
            with self._store.transaction():
                self._store.builds.delete(build.id)
            self._journals.remove(build.id)

    def build(self, template_id: str, build_id: str) -> Build:
        """Raises NotFoundError."""
        build = self._store.builds.get(build_id)
        if build is None or template_id.lower() not in (build.template_id, build.name):
            raise NotFoundError(f"Build {build_id!r} of template {template_id!r} not found.")
        return build

    async def cancel(self, template_id: str, build_id: str) -> None:
        """End a build and forget it; its template stays as it is. Raises NotFoundError, ConflictError."""
        build = self.build(template_id, build_id)
        if build.status.final:
            raise ConflictError(f"Build {build_id} has ended.", "Its template can be deleted, or its tags removed.")
        with self._store.transaction():
            self._store.builds.delete(build.id)  # a task that ends just now publishes nothing
        await self._cancel([build])

    async def _cancel(self, builds: Sequence[Build]) -> None:
        """End the tasks of builds whose records are gone, and what they left."""
        tasks = [task for build in builds if (task := self._tasks.get(build.id)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for build in builds:
            self._journals.remove(build.id)
        self._workshop.checkpoints.collect_garbage()

    def builds_of(self, template_id: str) -> Sequence[Build]:
        """Newest first."""
        found = [b for b in self._store.builds.rows.values() if b.template_id == template_id]
        return sorted(found, key=lambda b: b.created_at, reverse=True)

    def pending(self) -> Sequence[Build]:
        """The latest build of each template that has none finished yet."""
        latest = {}
        for build in sorted(self._store.builds.rows.values(), key=lambda b: b.created_at):
            if build.template_id not in self._store.templates.rows:
                latest[build.template_id] = build
        return list(latest.values())

    def logs(self, build: Build) -> Sequence[LogEntry]:
        return self._journals.entries(build.id)

    def archive_present(self, template_id: str, digest: str) -> bool:
        """Raises NotFoundError, InvalidRequestError."""
        if self._find(template_id) is None and not self.builds_of(template_id):
            raise TemplateNotFoundError(template_id)
        return self.archives.present(check_hash(digest))

    # -- templates --------------------------------------------------------------------------------------

    def _find(self, name: str) -> Template | None:
        return catalog.find(self._store.templates.rows.values(), name)

    def template(self, name: str) -> Template:
        """By id or name; a tag is ignored. Raises TemplateNotFoundError, InvalidRequestError."""
        template = self._find(catalog.parse(name).name)
        if template is None:
            raise TemplateNotFoundError(name)
        return template

    def has_name(self, name: str) -> bool:
        """Whether it is a template's name or id, without a tag; also before its first build has finished."""
        return self._template_id(name.lower()) is not None or bool(self.builds_of(name))

    def template_id(self, name: str) -> str:
        """The id of a template, also of one whose first build has not finished. Raises TemplateNotFoundError."""
        reference = catalog.parse(name)
        found = self._template_id(reference.name)
        if found is None and self.builds_of(reference.name):
            found = reference.name
        if found is None:
            raise TemplateNotFoundError(name)
        template = self._store.templates.get(found)
        if reference.tag is not None and (template is None or not _has_tag(template, reference.tag)):
            raise TemplateNotFoundError(name)
        return found

    def update(self, name: str, *, public: bool | None) -> Template:
        template = self.template(name)
        if public is not None:
            template = replace(template, public=public, updated_at=datetime.now(UTC))
            with self._store.transaction():
                self._store.templates.put(template)
        return template

    async def delete(self, name: str) -> None:
        """Cancel its builds and forget it; sandboxes made from it live on. Raises TemplateNotFoundError."""
        if ":" in name:
            raise InvalidRequestError(
                f"{name[:200]!r} is one tag of a template.",
                "Remove tags with DELETE /templates/tags, or leave it out.",
            )
        template_id = self.template_id(name)
        template = self._store.templates.get(template_id)
        if template is not None and BASE in template.aliases:
            raise InvalidRequestError(f"The template {BASE!r} is the node's own and cannot be deleted.")
        builds = self.builds_of(template_id)
        with self._store.transaction():
            if template is not None:
                self._store.templates.delete(template_id)
            for build in builds:
                self._store.builds.delete(build.id)
        await self._cancel(builds)

    # -- tags -------------------------------------------------------------------------------------------

    def tags(self, name: str) -> dict[str, TagTarget]:
        template = self.template(name)
        if template.tags:
            return dict(template.tags)
        return {catalog.DEFAULT_TAG: TagTarget(template.build_id, template.created_at)}

    def assign_tags(self, target: str, tags: Sequence[str]) -> str:
        """Point ``tags`` at the build that ``target`` (``name:tag``) names; that build's id."""
        wanted = [catalog.check_tag(tag) for tag in tags]
        if not wanted:
            raise InvalidRequestError("tags: at least one is needed.")
        template = catalog.resolve(self._store.templates.rows.values(), self._store.builds.rows, target)
        build = self._store.builds.get(template.build_id)
        if build is None:
            raise InvalidRequestError(f"The template {target!r} is the node's own and has no builds to tag.")
        with self._store.transaction():
            publishing.point(self._store, build, wanted, datetime.now(UTC))
        self._workshop.checkpoints.collect_garbage()
        return build.id

    def remove_tags(self, name: str, tags: Sequence[str]) -> None:
        """Raises TemplateNotFoundError when the template or one of the tags does not exist."""
        template = self.template(name)
        for tag in tags:
            if tag not in template.tags:
                raise TemplateNotFoundError(f"{name}:{tag}")
        if not set(template.tags) - set(tags):
            raise InvalidRequestError(
                f"These are all tags of {name!r}.", "Keep one, or delete the template: DELETE /templates/{id}."
            )
        with self._store.transaction():
            publishing.untag(self._store, template, tags, datetime.now(UTC))
        self._workshop.checkpoints.collect_garbage()


def _has_tag(template: Template, tag: str) -> bool:
    return tag in template.tags or (not template.tags and tag == catalog.DEFAULT_TAG)
