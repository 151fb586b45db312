"""Turning a running VM into a snapshot: for good (a pause), or in place while it runs on (a fork, a saved snapshot).

With memory, the guest is stopped at any moment and finds itself there again. Without, what it holds in memory is
lost, so its file system is written out and frozen first: the disk is then as after an unmount, not as after a power
cut.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import structlog

from aenv.errors import AenvError, CapacityError, GuestUnresponsiveError
from aenv.orchestrator.files import SnapshotFiles
from aenv.orchestrator.machines import Machine, Machines
from aenv.orchestrator.model import Sandbox
from aenv.orchestrator.records import new_layer
from aenv.orchestrator.store import Store
from aenv.snapshot.model import MemoryBase, Snapshot
from aenv.storage.layout import Layout, allocated_bytes, remove
from aenv.storage.lsmt import compose, disk_errors
from aenv.vmm.protocol import CaptureStats, Fingerprint, MachineShape

log = structlog.get_logger()

THAW_RETRY = 2.0  # seconds until a guest that did not answer is asked again


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A snapshot whose files are complete and in place. Nothing names it before ``record``."""

    snapshot: Snapshot
    base: MemoryBase | None = None  # a new one that it came with

    def record(self, store: Store) -> None:
        """Inside a transaction, together with what names the snapshot."""
        if self.base is not None:
            store.memory.put(self.base)
        store.snapshots.put(self.snapshot)


class Checkpoints:
    def __init__(self, layout: Layout, store: Store, machines: Machines, fingerprint: Fingerprint) -> None:
        self.layout = layout
        self._store = store
        self._machines = machines
        self._fingerprint = fingerprint
        self.files = SnapshotFiles(layout, store, machines)

    def collect_garbage(self) -> None:
        self.files.collect_garbage()

    async def pause_point(
        self,
        sandbox: Sandbox,
        machine: Machine,
        *,
        memory: bool,
        commit: Callable[[Checkpoint], None] = lambda _: None,
    ) -> Checkpoint:
        """Stop the VM, capture it and ``commit`` that to the records; it stays stopped. On failure it runs on.

        Raises GuestUnresponsiveError when ``memory`` is not kept and the guest cannot be asked to settle its disk.
        """
        snapshot_id = secrets.token_hex(10)
        async with self._stopped(sandbox, machine, snapshot_id, settle=not memory):
            stats = await self._capture(machine, snapshot_id) if memory else None
            point = await self._finished(snapshot_id, sandbox, stats, owner=sandbox.id)
            try:
                commit(point)
            except BaseException:
                if point.base is not None:
                    self.layout.memory(point.base.id).unlink(missing_ok=True)
                raise
            return point

    async def fork_point(self, sandbox: Sandbox, machine: Machine, *, memory: bool = True) -> Checkpoint:
        """Capture a running sandbox in place: its disk is frozen, and it runs on upon a new layer.

        That layer is recorded when this returns. If the server dies before it is, recovery asks the VM which layer
        it writes to.
        """
        assert sandbox.disk is not None
        layer = new_layer(sandbox.disk)
        snapshot_id = secrets.token_hex(10)
        started = time.monotonic()
        async with self._stopped(sandbox, machine, snapshot_id, settle=not memory):
            stats = await self._capture(machine, snapshot_id) if memory else None
            await machine.vm.rebase_disk(self.layout.layer(layer))
        # Whatever happens from here on, the VM writes to the new layer.
        current = self._store.sandboxes[sandbox.id]
        try:
            with self._store.transaction():
                self._store.layers.put(layer)
                self._store.sandboxes.put(replace(current, disk=layer.id))
        except CapacityError:
            self._store.layers.remember(layer)
            self._store.sandboxes.remember(replace(current, disk=layer.id))
        try:
            await machine.vm.cont()
            if not memory:
                await self._thaw(sandbox, machine)
            log.debug("fork point", sandbox=sandbox.id, stall_s=time.monotonic() - started)
            # The guest's clock stood still meanwhile.
            self.files.background.spawn(
                self._machines.introduce(sandbox, machine.lease, [sandbox.envd_access_token], 10.0)
            )
            return await self._finished(snapshot_id, sandbox, stats, owner=None)
        except BaseException:
            remove(self.layout.snapshot(snapshot_id))
            raise

    @asynccontextmanager
    async def _stopped(
        self, sandbox: Sandbox, machine: Machine, snapshot_id: str, *, settle: bool
    ) -> AsyncIterator[None]:
        """The VM stopped, with ``settle`` its disk in order. It runs on if anything fails, and no file is left."""
        with disk_errors(self.layout.snapshot(snapshot_id)):
            self.layout.snapshot(snapshot_id).mkdir(mode=0o700)
        try:
            if settle:
                await self._machines.freeze(sandbox, machine)
            await machine.vm.stop()
            yield
        except BaseException:
            await asyncio.shield(self._undo(sandbox, machine, snapshot_id, thaw=settle))
            raise

    async def _undo(self, sandbox: Sandbox, machine: Machine, snapshot_id: str, *, thaw: bool) -> None:
        try:
            await machine.vm.cont()
            if thaw:
                await self._thaw(sandbox, machine)
        except AenvError as error:
            log.error("VM could not run on after a failed capture", vm=machine.vm.id, error=str(error))
        remove(self.layout.snapshot(snapshot_id))

    async def _thaw(self, sandbox: Sandbox, machine: Machine) -> None:
        """Let the guest write again; if it does not answer now, as soon as it does. Raises GuestUnresponsiveError."""
        try:
            await self._machines.thaw(sandbox, machine)
        except GuestUnresponsiveError:
            self.files.background.spawn(self._thaw_later(sandbox, machine))
            raise

    async def _thaw_later(self, sandbox: Sandbox, machine: Machine) -> None:
        while self._machines.get(sandbox.id) is machine:
            await asyncio.sleep(THAW_RETRY)
            with suppress(GuestUnresponsiveError):
                await self._machines.thaw(sandbox, machine)
                return

    async def _capture(self, machine: Machine, snapshot_id: str) -> CaptureStats:
        """Device state and memory of a stopped VM."""
        stats = await machine.vm.capture(self.layout.state(snapshot_id), self.layout.delta(snapshot_id))
        log.debug(
            "captured",
            sandbox=machine.sandbox_id,
            memory=stats.memory_bytes,
            zero=stats.zero_bytes,
            stall_s=stats.stall,
        )
        return stats

    async def _finished(
        self, snapshot_id: str, sandbox: Sandbox, stats: CaptureStats | None, *, owner: str | None
    ) -> Checkpoint:
        """The snapshot of what was captured; None: only the disk was."""
        snapshot = self._snapshot(snapshot_id, sandbox, owner)
        if stats is None:
            return Checkpoint(snapshot)
        snapshot = replace(snapshot, hot=stats.hot)
        if sandbox.memory_base is not None:
            delta_bytes = max(1, stats.memory_bytes)  # 0 would say that there is no delta
            return Checkpoint(replace(snapshot, memory_base=sandbox.memory_base, delta_bytes=delta_bytes))
        # This VM booted: what it captured is relative to nothing, and is all of its memory.
        base = secrets.token_hex(10)
        path, delta = self.layout.memory(base), self.layout.delta(snapshot_id)
        try:
            await asyncio.to_thread(compose, None, delta, path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        delta.unlink()
        return Checkpoint(replace(snapshot, memory_base=base), MemoryBase(base, allocated_bytes(path)))

    def _snapshot(self, snapshot_id: str, sandbox: Sandbox, owner: str | None) -> Snapshot:
        """Of the disk alone."""
        assert sandbox.disk is not None
        return Snapshot(
            id=snapshot_id,
            owner=owner,
            memory_base=None,
            delta_bytes=0,
            disk=sandbox.disk,
            shape=MachineShape(sandbox.vcpus, sandbox.memory_mib),
            disk_mib=sandbox.disk_mib,
            fingerprint=self._fingerprint,
            guest_token=sandbox.envd_access_token,
            created_at=datetime.now(UTC),
            parent=sandbox.captured_id or sandbox.snapshot_id,
        )
