"""What happens to one sandbox, step by step: start, pause, resume, delete, expire, lose its VM.

Every operation follows the same order: record the transition, act, record the outcome. ``recovery`` reads the
records after a crash at any point in between. Callers hold the sandbox's lock, except where a method takes it.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from aenv.background import Background
from aenv.errors import AenvError, CapacityError, ConflictError, GuestUnresponsiveError, SandboxNotFoundError
from aenv.orchestrator import lifecycle, records
from aenv.orchestrator.capacity import Capacity
from aenv.orchestrator.checkpoint import Checkpoint, Checkpoints
from aenv.orchestrator.compaction import Compaction
from aenv.orchestrator.expiry import Expiry
from aenv.orchestrator.machines import Machine, Machines
from aenv.orchestrator.model import ForkOutcome, Sandbox, SandboxState
from aenv.orchestrator.records import Child
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer, Snapshot

log = structlog.get_logger()

SILENT_AFTER = 15.0  # seconds; an emulated guest beside many busy ones may well take some to answer


class Transitions:
    def __init__(self, store: Store, machines: Machines, checkpoints: Checkpoints, capacity: Capacity) -> None:
        self._store = store
        self._machines = machines
        self._checkpoints = checkpoints
        self._capacity = capacity
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.background = Background()
        self.expiry = Expiry(self._expire)
        self.compaction = Compaction(store, machines, checkpoints, self.locked)

    # -- records ----------------------------------------------------------------------------------------

    def visible(self, sandbox_id: str) -> Sandbox:
        """The record of a sandbox that its user has been told of. Raises SandboxNotFoundError."""
        sandbox = self._store.sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.state in (SandboxState.STARTING, SandboxState.DELETING):
            raise SandboxNotFoundError(sandbox_id)
        return sandbox

    @asynccontextmanager
    async def locked(self, sandbox_id: str) -> AsyncIterator[None]:
        lock = self._locks[sandbox_id]
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and sandbox_id not in self._store.sandboxes.rows:
                self._locks.pop(sandbox_id, None)

    def save(self, sandbox: Sandbox) -> Sandbox:
        with self._store.transaction():
            self._store.sandboxes.put(sandbox)
        if sandbox.state is SandboxState.RUNNING:
            self.expiry.watch(sandbox)
        return sandbox

    def machine(self, sandbox: Sandbox) -> Machine:
        """Raises ConflictError when the sandbox's VM has just died."""
        machine = self._machines.get(sandbox.id)
        if machine is None:
            raise ConflictError(f"Sandbox {sandbox.id!r} has just lost its VM.", "Try again in a moment.")
        return machine

    # -- starting ---------------------------------------------------------------------------------------

    async def start(self, child: Child, snapshot: Snapshot, *, wait: bool) -> Sandbox:
        """Launch a recorded child (state STARTING, capacity taken); on failure nothing of it is left.

        ``wait`` for its guest, which one that boots is worth in any case.
        """
        sandbox_id = child.sandbox.id
        try:
            machine = await self._machines.launch(child.sandbox, snapshot, child.layer)
            if wait or not snapshot.has_memory:
                await self._machines.wait_ready(machine)
            started = self._store.sandboxes[sandbox_id]
            return self.save(lifecycle.move(started, SandboxState.RUNNING))
        except BaseException:
            sandbox = self._store.sandboxes.get(sandbox_id)
            if sandbox is not None and sandbox.state is not SandboxState.DELETING:
                self.delete(sandbox)
            raise

    async def start_child(self, child: Child, snapshot: Snapshot) -> ForkOutcome:
        """``start`` under the child's own lock; a failure is the child's outcome."""
        try:
            async with self.locked(child.sandbox.id):
                return ForkOutcome(sandbox=await self.start(child, snapshot, wait=False))
        except Exception as error:
            if not isinstance(error, AenvError):
                log.exception("fork child failed", sandbox=child.sandbox.id)
            return ForkOutcome(error=error)

    # -- pausing and resuming ---------------------------------------------------------------------------

    async def pause(self, sandbox: Sandbox, *, memory: bool, strict: bool = False) -> Sandbox:
        """Raises ConflictError unless it runs, GuestUnresponsiveError when the guest must answer and does not."""
        lifecycle.require(sandbox, SandboxState.RUNNING, "paused")
        machine = self.machine(sandbox)
        await self._machines.wait_ready(machine)
        silent = False
        if strict or not memory:
            await self._machines.check_health(machine)
        else:
            silent = await self._is_silent(machine)
        self.save(replace(lifecycle.move(sandbox, SandboxState.PAUSING), agent_silent=silent))
        self.expiry.forget(sandbox.id)
        try:
            checkpoint = await self._checkpoints.pause_point(sandbox, machine, memory=memory, commit=self._paused)
        except BaseException:
            self._take_back(sandbox)
            raise
        paused = self._store.sandboxes[sandbox.id]
        self._machines.retire(sandbox.id)
        self._capacity.give_back()
        self._checkpoints.files.tidy(checkpoint.snapshot)
        self.compaction.consider(paused)
        return paused

    async def _is_silent(self, machine: Machine) -> bool:
        """Whether the guest agent hangs. It is recorded with the pause, and what is restored would hang as well."""
        try:
            await self._machines.check_health(machine, SILENT_AFTER)
        except GuestUnresponsiveError:
            log.warning("guest agent does not answer; pausing with its memory", sandbox=machine.sandbox_id)
            return True
        return False

    def _paused(self, checkpoint: Checkpoint) -> None:
        """Record that the owner of a pause's snapshot is paused in it."""
        snapshot = checkpoint.snapshot
        assert snapshot.owner is not None
        sandbox = replace(self._store.sandboxes[snapshot.owner], snapshot_id=snapshot.id)
        with self._store.transaction():
            checkpoint.record(self._store)
            self._store.sandboxes.put(records.rolled_back(sandbox, snapshot))

    def _take_back(self, sandbox: Sandbox) -> None:
        """The record before a transition that was undone. Should it not be written, a restart undoes the same."""
        try:
            self.save(sandbox)
        except CapacityError:
            self._store.sandboxes.remember(sandbox)
            self.expiry.watch(sandbox)

    async def resume(self, sandbox: Sandbox, timeout: int, *, reboot: bool = False) -> Sandbox:
        """Run a paused sandbox again; ``reboot`` ignores the memory that its pause kept."""
        assert sandbox.snapshot_id is not None
        self._capacity.take(1)
        try:
            snapshot = self._store.snapshots[sandbox.snapshot_id]
            resuming, layer = self._resuming(sandbox, snapshot)
            try:
                machine = await self._machines.launch(resuming, snapshot, layer, reboot=reboot)
                if reboot or not snapshot.has_memory:
                    await self._machines.wait_ready(machine)
            except BaseException:
                self._machines.retire(sandbox.id)
                self.roll_back(self._store.sandboxes[sandbox.id])
                self._checkpoints.files.collect_garbage()
                raise
        except BaseException:
            self._capacity.give_back()
            raise
        running = lifecycle.move(self._store.sandboxes[sandbox.id], SandboxState.RUNNING)
        return self.save(lifecycle.expiring(running, timeout, datetime.now(UTC)))

    def _resuming(self, sandbox: Sandbox, snapshot: Snapshot) -> tuple[Sandbox, DiskLayer]:
        child = records.on_new_layer(lifecycle.move(sandbox, SandboxState.RESUMING), snapshot)
        with self._store.transaction():
            self._store.layers.put(child.layer)
            self._store.sandboxes.put(child.sandbox)
        return child.sandbox, child.layer

    def roll_back(self, sandbox: Sandbox) -> Sandbox:
        """Back to the snapshot it was paused in."""
        assert sandbox.snapshot_id is not None
        back = records.rolled_back(sandbox, self._store.snapshots[sandbox.snapshot_id])
        with self._store.transaction():
            self._store.sandboxes.put(back)
        return back

    async def checkpoint(self, sandbox: Sandbox, action: str, *, memory: bool = True) -> Checkpoint:
        """A snapshot of a running sandbox, which runs on. Raises as ``pause`` does."""
        lifecycle.require(sandbox, SandboxState.RUNNING, action)
        machine = self.machine(sandbox)
        await self._machines.wait_ready(machine)
        if not memory:
            await self._machines.check_health(machine)
        checkpoint = await self._checkpoints.fork_point(sandbox, machine, memory=memory)
        self.compaction.consider(self._store.sandboxes[sandbox.id])
        return checkpoint

    # -- ending -----------------------------------------------------------------------------------------

    def delete(self, sandbox: Sandbox) -> None:
        """Mark as being deleted, and take down VM and records behind the answer."""
        with self._store.transaction():
            self._store.sandboxes.put(replace(sandbox, state=SandboxState.DELETING))
        self.expiry.forget(sandbox.id)
        teardown = self._machines.retire(sandbox.id)
        held = sandbox.state not in (SandboxState.PAUSED,)
        self.background.spawn(self._finish_delete(sandbox.id, teardown, held))

    async def _finish_delete(self, sandbox_id: str, teardown: asyncio.Task[None] | None, held: bool) -> None:
        if teardown is not None:
            await asyncio.wait({teardown})
        if held:
            self._capacity.give_back()
        with self._store.transaction():
            self._store.sandboxes.delete(sandbox_id)
        self._checkpoints.files.forget_sandbox(sandbox_id)
        self._locks.pop(sandbox_id, None)
        self._checkpoints.files.collect_garbage()

    async def _expire(self, sandbox_id: str) -> None:
        async with self.locked(sandbox_id):
            sandbox = self._store.sandboxes.get(sandbox_id)
            if sandbox is None or sandbox.state is not SandboxState.RUNNING:
                return
            if sandbox.end_at > datetime.now(UTC):
                self.expiry.watch(sandbox)
            elif sandbox.auto_pause:
                log.info("sandbox expired; pausing", sandbox=sandbox_id)
                await self.pause(sandbox, memory=sandbox.auto_pause_memory)
            else:
                log.info("sandbox expired; killing", sandbox=sandbox_id)
                self.delete(sandbox)

    def machine_died(self, machine: Machine, reason: str) -> None:
        """A VM ended by itself or its guest never came up."""
        self.background.spawn(self._bury(machine, reason))

    async def _bury(self, machine: Machine, reason: str) -> None:
        sandbox_id = machine.sandbox_id
        async with self.locked(sandbox_id):
            sandbox = self._store.sandboxes.get(sandbox_id)
            if self._machines.get(sandbox_id) is not machine or sandbox is None:
                return
            if sandbox.state is not SandboxState.RUNNING:
                return
            self.expiry.forget(sandbox_id)
            snapshot = self._store.snapshots.get(sandbox.snapshot_id or "")
            if snapshot is not None and snapshot.owner == sandbox_id:
                log.error("sandbox lost its VM; back to its last pause", sandbox=sandbox_id, reason=reason)
                self._machines.retire(sandbox_id)
                self.roll_back(sandbox)
                self._capacity.give_back()
                self._checkpoints.files.collect_garbage()
            else:
                log.error("sandbox lost its VM, was never paused: gone", sandbox=sandbox_id, reason=reason)
                self.delete(sandbox)
