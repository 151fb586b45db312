"""The sandbox state machine as pure decisions: what is allowed, when things expire, what a restart does."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from enum import Enum, auto

from aenv.errors import ConflictError, InvalidRequestError, UnresponsiveSnapshotError
from aenv.orchestrator.model import Sandbox, SandboxState

_ALLOWED: Mapping[SandboxState, frozenset[SandboxState]] = {
    SandboxState.STARTING: frozenset({SandboxState.RUNNING, SandboxState.DELETING}),
    SandboxState.RUNNING: frozenset({SandboxState.PAUSING, SandboxState.PAUSED, SandboxState.DELETING}),
    SandboxState.PAUSING: frozenset({SandboxState.PAUSED, SandboxState.RUNNING, SandboxState.DELETING}),
    SandboxState.PAUSED: frozenset({SandboxState.RESUMING, SandboxState.DELETING}),
    SandboxState.RESUMING: frozenset({SandboxState.RUNNING, SandboxState.PAUSED, SandboxState.DELETING}),
    SandboxState.DELETING: frozenset(),
}


def move(sandbox: Sandbox, to: SandboxState) -> Sandbox:
    """The sandbox in its next state. RuntimeError for a transition that the machine does not have."""
    if to not in _ALLOWED[sandbox.state]:
        raise RuntimeError(f"sandbox {sandbox.id}: no transition from {sandbox.state} to {to}")
    return replace(sandbox, state=to)


def require(sandbox: Sandbox, wanted: SandboxState, action: str) -> None:
    """Raise ConflictError unless the sandbox is in the state that ``action`` needs."""
    if sandbox.state is wanted:
        return
    hints = {
        SandboxState.PAUSED: "Connect to it to resume it first.",
        SandboxState.RUNNING: "Pause it first, or use connect, which works in both states.",
    }
    raise ConflictError(
        f"Sandbox {sandbox.id!r} cannot be {action}: it is {sandbox.state.public}.",
        hints.get(sandbox.state, "Another operation on it is under way; try again."),
    )


def require_wakeable(sandbox: Sandbox) -> None:
    """Raise ConflictError unless traffic may resume the paused sandbox.

    One without memory would boot: that is no answer to a request, and is not done because a stranger sent one.
    """
    if not sandbox.memory_kept:
        raise ConflictError(
            f"Sandbox {sandbox.id!r} is paused without memory, so traffic does not resume it.",
            "Connect to it; it boots from its disk then.",
        )
    require_answering(sandbox)
    if not sandbox.auto_resume:
        raise ConflictError(
            f"Sandbox {sandbox.id!r} is paused.",
            "Connect to it to resume it, or create it with autoResume enabled.",
        )


def require_answering(sandbox: Sandbox, *, reboot: bool = False) -> None:
    """Raise UnresponsiveSnapshotError when the paused sandbox's memory would bring back an agent that hangs."""
    if sandbox.agent_silent and sandbox.memory_kept and not reboot:
        raise UnresponsiveSnapshotError(
            f"Sandbox {sandbox.id!r} was paused while its guest agent did not answer.",
            "Resume it without its memory, so that it boots: memory: false.",
        )


def require_kept(sandbox: Sandbox, memory: bool | None) -> None:
    """Raise ConflictError unless a paused sandbox kept what a snapshot of it is to hold; None takes what there is.

    A disk without its memory is not offered where there is memory: what the guest had not written yet is there.
    """
    if memory is True and not sandbox.memory_kept:
        raise ConflictError(
            f"Sandbox {sandbox.id!r} is paused without memory, so no snapshot of it can have any.",
            "Leave the memory out, or connect to the sandbox first.",
        )
    if memory is False and sandbox.memory_kept:
        raise ConflictError(
            f"Sandbox {sandbox.id!r} is paused with its memory, part of which is not on its disk yet.",
            "Take a full snapshot, or connect to the sandbox first.",
        )


def check_timeout(timeout: int, longest: int) -> None:
    """Raise InvalidRequestError unless 0 <= timeout <= longest (seconds)."""
    if not 0 <= timeout <= longest:
        raise InvalidRequestError(
            f"Timeout of {timeout} seconds is out of range.", f"Use 0 to {longest} seconds (max_timeout)."
        )


def expiring(sandbox: Sandbox, timeout: int, now: datetime) -> Sandbox:
    """The sandbox with its end of life ``timeout`` seconds from now."""
    return replace(sandbox, timeout=timeout, end_at=now + timedelta(seconds=timeout))


def expiring_at_least(sandbox: Sandbox, timeout: int, now: datetime) -> Sandbox:
    """Like ``expiring``, but never sooner than before."""
    if now + timedelta(seconds=timeout) <= sandbox.end_at:
        return sandbox
    return expiring(sandbox, timeout, now)


class Recovery(Enum):
    """What a starting server does with a sandbox it finds recorded."""

    ADOPT = auto()  # its VM runs: take it over
    ROLL_BACK = auto()  # back to the snapshot it was last paused in
    KEEP = auto()  # paused, nothing to do
    DELETE = auto()  # half made, being deleted, or its VM is gone and it never was paused


def recover(sandbox: Sandbox, *, vm_alive: bool, has_own_snapshot: bool) -> Recovery:
    """What to do with ``sandbox`` after the server died at any moment.

    STARTING and RESUMING are undone even when the VM already runs: the caller never got an answer, and the
    snapshot the VM came from is untouched. PAUSING is undone by letting the VM run on: its capture may be torn.
    """
    match sandbox.state:
        case SandboxState.STARTING | SandboxState.DELETING:
            return Recovery.DELETE
        case SandboxState.PAUSED:
            return Recovery.KEEP
        case SandboxState.RESUMING:
            return Recovery.ROLL_BACK
        case SandboxState.RUNNING | SandboxState.PAUSING:
            if vm_alive:
                return Recovery.ADOPT
            return Recovery.ROLL_BACK if has_own_snapshot else Recovery.DELETE


def should_compose(delta_bytes: int, base_bytes: int, children: int) -> bool:
    """Whether to merge a memory delta with its base into one file before ``children`` VMs restore it.

    A delta is copied into each VM's private memory; a composed file is written once and shared by all of them.
    So compose when copying the delta into every child moves more bytes than writing base and delta once.
    """
    return delta_bytes * children > 2 * (base_bytes + delta_bytes)
