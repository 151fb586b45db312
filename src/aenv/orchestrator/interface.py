"""What the API and the proxy may ask of the sandbox lifecycle."""

from collections.abc import Sequence
from typing import Protocol

from aenv.orchestrator.model import (
    ColdMachine,
    Egress,
    ForkOutcome,
    Sandbox,
    SandboxFilter,
    SandboxPage,
    SandboxSpec,
    SavedSnapshot,
    SavedSnapshotPage,
    Template,
    Upstream,
)


class Orchestrator(Protocol):
    """All methods raise subclasses of ``aenv.errors.AenvError``; ids that do not exist raise ``NotFoundError``."""

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """Start a sandbox from a template or a saved snapshot.

        With ``idempotency_key`` in the specification, a repetition returns the sandbox that was made.

        Raises TemplateNotFoundError, CapacityError, SandboxStartError, ReusedKeyError.
        """

    async def create_cold(self, spec: SandboxSpec, machine: ColdMachine) -> Sandbox:
        """Boot the container image ``spec.template``. Pulling it may take minutes, the first time.

        Raises ImageError and its kinds, InvalidRequestError, CapacityError, SandboxStartError.
        """

    async def get(self, sandbox_id: str) -> Sandbox: ...

    async def list(self, where: SandboxFilter, limit: int, token: str | None) -> SandboxPage:
        """In the filter's order, stable under concurrent change. ``InvalidRequestError`` for a token not ours."""

    async def kill(self, sandbox_id: str) -> None: ...

    async def pause(self, sandbox_id: str, *, memory: bool = True, strict: bool = False) -> Sandbox:
        """Raises ConflictError when it is not running.

        Without ``memory`` only the disk is kept, and the sandbox boots when it is resumed. Raises
        GuestUnresponsiveError, changing nothing, when the guest does not answer and ``strict`` is set or its disk
        has to be settled. Otherwise that is recorded, and such a sandbox is resumed with ``reboot`` only.
        """

    async def resume(
        self, sandbox_id: str, timeout: int, auto_pause: bool | None, *, reboot: bool = False
    ) -> Sandbox:
        """Raises ConflictError when it is already running. ``reboot``: from its disk alone.

        Without it raises UnresponsiveSnapshotError when the guest agent did not answer as it was paused.
        """

    async def connect(self, sandbox_id: str, timeout: int, *, reboot: bool = False) -> tuple[Sandbox, bool]:
        """Resume if paused, extend the timeout if running; the flag says whether it was resumed.

        A running sandbox's end of life is never shortened by this call. Raises UnresponsiveSnapshotError as
        ``resume`` does.
        """

    async def set_timeout(self, sandbox_id: str, timeout: int) -> Sandbox:
        """Expire ``timeout`` seconds from now, sooner or later than before. ConflictError when paused."""

    async def refresh(self, sandbox_id: str, duration: int) -> Sandbox:
        """Expire at least ``duration`` seconds from now; never sooner than before."""

    async def fork(self, sandbox_id: str, count: int, timeout: int | None) -> Sequence[ForkOutcome]:
        """Fork a running or paused sandbox into ``count`` running children."""

    async def update_network(self, sandbox_id: str, egress: Egress) -> Sandbox:
        """Replace where it may send traffic, at once. Raises ConflictError unless it runs, InvalidRequestError."""

    async def create_snapshot(self, sandbox_id: str, name: str | None, memory: bool | None) -> SavedSnapshot:
        """Save the sandbox as it is now; it runs on, or stays paused. ``memory`` None: as much as there is.

        Raises InvalidRequestError or ConflictError for a name that cannot be had, ConflictError when the sandbox is
        paused and does not have what is asked for, GuestUnresponsiveError.
        """

    async def snapshots(
        self, sandbox_id: str | None, name: str | None, limit: int, token: str | None
    ) -> SavedSnapshotPage:
        """Newest first. ``InvalidRequestError`` for a token not ours."""

    async def snapshot(self, name: str) -> SavedSnapshot:
        """By id or name, with or without a tag. Raises SnapshotNotFoundError."""

    async def delete_snapshot(self, name: str) -> None:
        """Sandboxes made from it stay. Raises SnapshotNotFoundError."""

    async def templates(self) -> Sequence[Template]: ...

    async def upstream(self, sandbox_id: str) -> Upstream:
        """Where to send traffic for the sandbox, resuming it first if it is paused and resumes on traffic.

        Waits for a transition under way. Raises SandboxNotFoundError, or ConflictError when it is paused
        and does not resume on traffic.
        """
