"""What the routers share: the orchestrator, the settings, and how ids in paths are read."""

from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from fastapi import Depends, Path, Request

from aenv.accounts.credentials import Credentials
from aenv.accounts.secrets import Secrets
from aenv.accounts.volumes import Volumes
from aenv.api.errors import Error
from aenv.config import Settings
from aenv.errors import SandboxNotFoundError
from aenv.observability.host import Host
from aenv.observability.logs import LogStore
from aenv.observability.recorder import Recorder
from aenv.observability.sampler import Sampler
from aenv.orchestrator.interface import Orchestrator
from aenv.proxy.routing import sandbox_id as parse_sandbox_id
from aenv.vmm.verdict import Candidate, Verdict


class Hypervisors(Protocol):
    """What could run sandboxes on this node (``aenv.vmm.choice``)."""

    used: Candidate | None

    @property
    def gaps(self) -> list[str]: ...

    async def verdicts(self) -> list[Verdict]: ...


@dataclass(frozen=True, slots=True)
class Services:
    """What the API serves beside the lifecycle of sandboxes."""

    credentials: Credentials
    secrets: Secrets
    volumes: Volumes
    sampler: Sampler
    logs: LogStore
    recorder: Recorder
    host: Host
    hypervisors: Hypervisors


@dataclass(frozen=True, slots=True)
class Context:
    orchestrator: Orchestrator
    settings: Settings
    services: Services


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


def _sandbox_id(sandbox_id: Annotated[str, Path(alias="sandboxID")]) -> str:
    """Text that cannot be an id names no sandbox; the ``-clientID`` of old SDKs is cut off."""
    parsed = parse_sandbox_id(sandbox_id.encode("utf-8", "replace"))
    if parsed is None:
        raise SandboxNotFoundError(sandbox_id[:64])
    return parsed


Ctx = Annotated[Context, Depends(_context)]
SandboxId = Annotated[str, Depends(_sandbox_id)]

_DESCRIPTIONS = {
    400: "Bad request",
    401: "Authentication error",
    404: "Not found",
    409: "Conflict",
    422: "The Idempotency-Key belongs to another request",
    500: "Server error",
    501: "A part of E2B's API that this server does not have",
    503: "No capacity; may be repeated after Retry-After seconds",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI entries for the errors of a route; 401 and 500 are always among them."""
    documented = sorted({401, 500, *statuses})
    entries: dict[int | str, dict[str, Any]] = {
        status: {"model": Error, "description": _DESCRIPTIONS[status]} for status in documented
    }
    # Keeps FastAPI from documenting its own 422, which is never sent.
    return entries | {"default": {"model": Error, "description": "Error"}}
