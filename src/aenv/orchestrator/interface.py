"""What the API and the proxy may ask of the sandbox lifecycle."""

from collections.abc import Sequence
from typing import Protocol

from aenv.orchestrator.model import (
    ForkOutcome,
    Sandbox,
    SandboxFilter,
    SandboxPage,
    SandboxSpec,
    Template,
    Upstream,
)


class Orchestrator(Protocol):
    """All methods raise subclasses of ``aenv.errors.AenvError``; ids that do not exist raise ``NotFoundError``."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox from a template. Raises TemplateNotFoundError, CapacityError, SandboxStartError."""

    async def get(self, sandbox_id: str) -> Sandbox: ...

    async def list(self, where: SandboxFilter, limit: int, token: str | None) -> SandboxPage:
        """Newest first, stable under concurrent change. ``InvalidRequestError`` for a token not ours."""

    async def kill(self, sandbox_id: str) -> None: ...

    async def pause(self, sandbox_id: str) -> Sandbox:
        """Raises ConflictError when it is not running."""

    async def resume(self, sandbox_id: str, timeout: int, auto_pause: bool | None) -> Sandbox:
        """Raises ConflictError when it is already running."""

    async def connect(self, sandbox_id: str, timeout: int) -> tuple[Sandbox, bool]:
        """Resume if paused, extend the timeout if running; the flag says whether it was resumed.

        A running sandbox's end of life is never shortened by this call.
        """

    async def set_timeout(self, sandbox_id: str, timeout: int) -> Sandbox:
        """Expire ``timeout`` seconds from now, sooner or later than before. ConflictError when paused."""

    async def refresh(self, sandbox_id: str, duration: int) -> Sandbox:
        """Expire at least ``duration`` seconds from now; never sooner than before."""

    async def fork(self, sandbox_id: str, count: int, timeout: int | None) -> Sequence[ForkOutcome]:
        """Fork a running or paused sandbox into ``count`` running children."""

    async def templates(self) -> Sequence[Template]: ...

    async def upstream(self, sandbox_id: str) -> Upstream:
        """Where to send traffic for the sandbox, resuming it first if it is paused and resumes on traffic.

        Waits for a transition under way. Raises SandboxNotFoundError, or ConflictError when it is paused
        and does not resume on traffic.
        """
