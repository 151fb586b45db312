"""Writes sandboxes' logs: follows the records for lifecycle events, and the consoles of running VMs."""

import asyncio
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path

import structlog

from aenv.observability.console import Tail
from aenv.observability.events import SandboxRecord, events
from aenv.observability.logs import Line, LogStore

log = structlog.get_logger()

POLL_INTERVAL = 2.0  # seconds; one look at the size of a file for each running sandbox


class Recorder:
    """``on_change`` is to be called with every committed change of a sandbox's record, in order."""

    def __init__(
        self, logs: LogStore, console_path: Callable[[str], Path], on_gone: Callable[[str], None] = lambda _: None
    ) -> None:
        self._logs = logs
        self._console_path = console_path
        self._on_gone = on_gone
        self._tails: dict[str, Tail] = {}
        self._task: asyncio.Task[None] | None = None
        self._starting: set[str] = set()
        self.started = 0  # sandboxes that came to run since the server started, and those that did not
        self.failed = 0

    def start(self, sandboxes: Iterable[SandboxRecord]) -> None:
        """Go on with the sandboxes on record, after recovery, and begin to poll their consoles."""
        present = set()
        for sandbox in sandboxes:
            present.add(sandbox.id)
            if sandbox.vm_id is not None and sandbox.id not in self._tails:
                self._follow(sandbox.id, sandbox.vm_id)
        for name in self._logs.unfinished() - present:
            self._logs.ended(name)  # deleted when nobody was looking
        self._task = asyncio.create_task(self._poll(), name="console-logs")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for name in list(self._tails):
            self.collect(name)

    def on_change(self, before: SandboxRecord | None, after: SandboxRecord | None) -> None:
        """Never raises: a log that cannot be written must not stop a sandbox from being paused."""
        try:
            self._change(before, after)
        except Exception as error:
            log.error("the sandbox's log could not be written", error=repr(error))

    def collect(self, sandbox_id: str) -> None:
        """Take in what the sandbox's console has said until now."""
        tail = self._tails.get(sandbox_id)
        if tail is None:
            return
        if lines := tail.read():
            self._logs.add_console(sandbox_id, lines, tail.vm_id, tail.offset)

    def _change(self, before: SandboxRecord | None, after: SandboxRecord | None) -> None:
        old_vm = before.vm_id if before else None
        new_vm = after.vm_id if after else None
        if after is not None and new_vm is not None and old_vm != new_vm:
            self._follow(after.id, new_vm)
        # The VM is taken down after this commit, and its console with it.
        if before is not None and (new_vm is None or (after is not None and str(after.state) == "deleting")):
            self._finish(before.id)
        self._count(before, after)
        for event in events(before, after, datetime.now(UTC)):
            self._logs.add(event.sandbox_id, [Line(event.level, "sandbox", event.message)])
        if after is None and before is not None:
            self._logs.ended(before.id)
            self._on_gone(before.id)

    @property
    def starting(self) -> int:
        """Sandboxes that are on record and have neither come to run nor failed."""
        return len(self._starting)

    def _count(self, before: SandboxRecord | None, after: SandboxRecord | None) -> None:
        old, new = (None if record is None else str(record.state) for record in (before, after))
        if after is not None and new == "starting":
            self._starting.add(after.id)
        elif before is not None and old == "starting":
            self._starting.discard(before.id)
            self.started += new == "running"
            self.failed += new == "deleting"

    def _follow(self, sandbox_id: str, vm_id: str) -> None:
        offset = self._logs.console_offset(sandbox_id, vm_id)
        self._tails[sandbox_id] = Tail(self._console_path(vm_id), vm_id, offset)

    def _finish(self, sandbox_id: str) -> None:
        tail = self._tails.pop(sandbox_id, None)
        if tail is not None and (lines := tail.read(final=True)):
            self._logs.add_console(sandbox_id, lines, tail.vm_id, tail.offset)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_INTERVAL)
            for name in list(self._tails):
                try:
                    self.collect(name)
                except Exception as error:
                    log.error("a console could not be logged", sandbox=name, error=repr(error))
