"""Between E2B's bodies and the orchestrator's values. Pure."""

import re
from ipaddress import ip_network
from typing import Any

from aenv.api import schemas
from aenv.api.errors import MissingFeatureError, UnsupportedError
from aenv.config import Settings
from aenv.errors import InvalidRequestError
from aenv.orchestrator import catalog
from aenv.orchestrator.model import Egress, Sandbox, SandboxSpec, SandboxState, SavedSnapshot
from aenv.proxy.masking import PORT

_MAX_ENV = 128 << 10  # bytes of NAME=VALUE with its NUL: MAX_ARG_STRLEN of execve(2)
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}(:[0-9]{1,5})?|\[[0-9a-fA-F:.]{2,45}\](:[0-9]{1,5})?")
CLIENT_ID = "aenv"  # deprecated by E2B; old SDKs append it to the sandbox id
MAX_REFRESH = 3600  # seconds, from E2B's specification


def seconds(value: int, settings: Settings, *, field: str = "timeout", limit: int | None = None) -> int:
    """A time to live within the node's bounds. Raises InvalidRequestError."""
    most = min(settings.max_timeout, limit or settings.max_timeout)
    if not 0 <= value <= most:
        raise InvalidRequestError(f"{field}: must be from 0 to {most} seconds, not {value}.")
    return value


def spec(
    body: schemas.SandboxRequest,
    template: str,
    settings: Settings,
    *,
    default_timeout: int,
    always_secure: bool,
    idempotency_key: str | None = None,
) -> SandboxSpec:
    """What to create, from ``template``. Raises InvalidRequestError, UnsupportedError."""
    for name, value in (
        ("mcp", body.mcp),
        ("iam", body.iam),
        ("customExtensionParams", body.custom_extension_params),
    ):
        if value:
            raise UnsupportedError(f"{name} is not supported by this server.", "Leave it out.")
    if body.volume_mounts:
        raise MissingFeatureError(
            "volumeMounts: volumes cannot be mounted by this server.", "Write files into the sandbox instead."
        )
    # AgentENV's rule, where E2B's default is to delete: a sandbox that ends is paused unless told otherwise. The SDK
    # sends autoPause only when its caller chose.
    auto_pause = body.auto_pause is not False
    auto_resume = body.auto_resume is not None and body.auto_resume.enabled
    if auto_resume and not auto_pause:
        raise InvalidRequestError("autoResume: needs autoPause, for a deleted sandbox cannot be resumed.")
    if auto_resume and body.auto_pause_memory is False:
        raise InvalidRequestError(
            "autoResume: cannot be combined with autoPauseMemory: false, for traffic resumes memory only.",
            "Resume such a sandbox with connect.",
        )
    network = body.network or schemas.NetworkRequest.model_validate({})
    _refuse_others(network.model_extra, "network.")
    default = min(default_timeout, settings.max_timeout)
    _check_env(body.env_vars)
    return SandboxSpec(
        template=template,
        timeout=seconds(default if body.timeout is None else body.timeout, settings),
        auto_pause=auto_pause,
        auto_pause_memory=body.auto_pause_memory is not False,
        auto_resume=auto_resume,
        metadata=body.metadata,
        env_vars=body.env_vars,
        secure=always_secure or bool(body.secure),
        egress=Egress(
            allow_internet=body.allow_internet_access,
            allow_out=_destinations(network.allow_out, "network.allowOut"),
            deny_out=_destinations(network.deny_out, "network.denyOut"),
        ),
        allow_public_traffic=network.allow_public_traffic is not False,
        host_mask=_host_mask(network.mask_request_host),
        idempotency_key=idempotency_key,
    )


def egress(body: schemas.NetworkUpdate) -> Egress:
    """A new policy. Raises InvalidRequestError, UnsupportedError."""
    _refuse_others(body.model_extra, "")
    return Egress(
        allow_internet=body.allow_internet_access,
        allow_out=_destinations(body.allow_out, "allowOut"),
        deny_out=_destinations(body.deny_out, "denyOut"),
    )


def _refuse_others(extra: dict[str, Any] | None, prefix: str) -> None:
    for name, value in (extra or {}).items():
        if value not in (None, [], {}):
            raise UnsupportedError(f"{prefix}{name} is not supported by this server.", "Leave it out.")


def _host_mask(text: str | None) -> str | None:
    if text and not _HOST.fullmatch(text.replace(PORT, "0")):
        raise InvalidRequestError(
            f"network.maskRequestHost: {text[:200]!r} cannot be a Host header.", f"Use one such as localhost:{PORT}."
        )
    return text or None


def _check_env(variables: dict[str, str]) -> None:
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InvalidRequestError(f"envVars: {name[:200]!r} cannot be an environment variable.")
        if len(f"{name}={value}".encode()) >= _MAX_ENV:
            raise InvalidRequestError(
                f"envVars: {name[:200]!r} has more than {_MAX_ENV >> 10} KiB, with which no command could start.",
                "Write it to a file of the sandbox.",
            )


def _destinations(entries: list[str] | None, field: str) -> tuple[str, ...]:
    for entry in entries or ():
        try:
            ip_network(entry, strict=False)
        except ValueError:
            if field.endswith("allowOut") and any(letter.isalpha() for letter in entry.rpartition(".")[2]):
                raise UnsupportedError(
                    f"{field}: {entry!r} is a domain name; this server filters by address.", "Use CIDR blocks."
                ) from None
            raise InvalidRequestError(f"{field}: {entry!r} is not an IP address or CIDR block.") from None
    return tuple(entries or ())


def sandbox(value: Sandbox, settings: Settings) -> schemas.Sandbox:
    return schemas.Sandbox(
        template_id=value.template_id,
        sandbox_id=value.id,
        client_id=CLIENT_ID,
        alias=value.template_alias,
        envd_version=value.envd_version,
        envd_access_token=value.envd_access_token,
        traffic_access_token=value.traffic_access_token,
        domain=settings.domain,
    )


def listed(value: Sandbox) -> schemas.ListedSandbox:
    return schemas.ListedSandbox(
        template_id=value.template_id,
        sandbox_id=value.id,
        client_id=CLIENT_ID,
        alias=value.template_alias,
        started_at=value.started_at,
        end_at=value.end_at,
        cpu_count=value.vcpus,
        memory_mb=value.memory_mib,
        disk_size_mb=value.disk_mib,
        metadata=dict(value.metadata),
        state=_state(value),
        envd_version=value.envd_version,
        parent_id=value.parent_id,
        envd_unresponsive_at_pause=True if _pause_mode(value) == "full" and value.agent_silent else None,
    )


def detail(value: Sandbox, settings: Settings) -> schemas.SandboxDetail:
    return schemas.SandboxDetail(
        **listed(value).model_dump(by_alias=False),
        envd_access_token=value.envd_access_token,
        allow_internet_access=value.egress.allow_internet,
        domain=settings.domain,
        network=schemas.Network(
            allow_public_traffic=value.traffic_access_token is None,
            allow_out=list(value.egress.allow_out) or None,
            deny_out=list(value.egress.deny_out) or None,
            mask_request_host=value.host_mask,
        ),
        lifecycle=schemas.Lifecycle(
            auto_resume=value.auto_resume, on_timeout="pause" if value.auto_pause else "kill"
        ),
        pause_mode=_pause_mode(value),
    )


def _state(value: Sandbox) -> schemas.State:
    return "paused" if value.state.public == "paused" else "running"


def _pause_mode(value: Sandbox) -> schemas.PauseMode | None:
    if value.state not in (SandboxState.PAUSED, SandboxState.RESUMING):
        return None
    return "full" if value.memory_kept else "filesystem"


def snapshot(value: SavedSnapshot) -> schemas.Snapshot:
    return schemas.Snapshot(
        snapshot_id=value.id,
        names=[] if value.name is None else [catalog.written(value.name, value.tag)],
        cpu_count=value.vcpus,
        memory_mb=value.memory_mib,
        disk_size_mb=value.disk_mib,
        created_at=value.created_at,
        updated_at=value.updated_at,
    )
