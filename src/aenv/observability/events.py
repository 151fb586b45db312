"""What a change of a sandbox's record says in the sandbox's log. Pure.

Events are read off the records themselves, which every path through the lifecycle writes (calls, expiry, recovery
after a crash, a VM's death), rather than told by each of them.
"""

from dataclasses import dataclass
from datetime import datetime
from enum import IntEnum
from typing import Protocol


class Level(IntEnum):
    DEBUG = 0
    INFO = 1
    WARN = 2
    ERROR = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Event:
    sandbox_id: str
    level: Level
    message: str


class SandboxRecord(Protocol):
    """The part of ``aenv.orchestrator.model.Sandbox`` that events depend on; states are its values."""

    @property
    def id(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def parent_id(self) -> str | None: ...
    @property
    def template_id(self) -> str: ...
    @property
    def template_alias(self) -> str | None: ...
    @property
    def auto_pause(self) -> bool: ...
    @property
    def end_at(self) -> datetime: ...
    @property
    def vm_id(self) -> str | None: ...


# (before, after) -> level and words; None before: the record is new.
_STATIC: dict[tuple[str | None, str], tuple[Level, str]] = {
    ("running", "pausing"): (Level.DEBUG, "pausing"),
    ("pausing", "running"): (Level.WARN, "the pause failed; the sandbox runs on"),
    ("paused", "resuming"): (Level.DEBUG, "resuming"),
    ("resuming", "running"): (Level.INFO, "resumed"),
    ("resuming", "paused"): (Level.WARN, "the resume failed; the sandbox stays paused"),
    ("running", "paused"): (Level.ERROR, "the virtual machine was lost; back to the last pause"),
}


def events(before: SandboxRecord | None, after: SandboxRecord | None, now: datetime) -> list[Event]:
    """The events that a change of one record amounts to, oldest first; of the parent as well for a fork."""
    if after is None:
        return []
    old = None if before is None else str(before.state)
    new = str(after.state)
    if old == new:
        return []
    if old is None and new == "starting" and after.parent_id is not None:
        return [Event(after.parent_id, Level.INFO, f"forked into {after.id}")]
    if (old, new) == ("starting", "running"):
        return [Event(after.id, Level.INFO, _origin(after))]
    if (old, new) == ("pausing", "paused"):
        expired = after.auto_pause and after.end_at <= now
        return [Event(after.id, Level.INFO, "paused at the end of its time to live" if expired else "paused")]
    if new == "deleting":
        return [_ending(before, after, now)]
    found = _STATIC.get((old, new))
    return [] if found is None else [Event(after.id, *found)]


def _origin(sandbox: SandboxRecord) -> str:
    if sandbox.parent_id is not None:
        return f"forked from {sandbox.parent_id}"
    return f"created from template {sandbox.template_alias or sandbox.template_id}"


def _ending(before: SandboxRecord | None, after: SandboxRecord, now: datetime) -> Event:
    if before is not None and before.state == "starting":
        return Event(after.id, Level.ERROR, "the sandbox did not start")
    running = before is not None and before.state == "running"
    expired = running and not after.auto_pause and after.end_at <= now
    return Event(after.id, Level.INFO, "killed at the end of its time to live" if expired else "killed")
