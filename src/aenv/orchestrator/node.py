"""The sandboxes, templates and saved snapshots of one node, as the API and the proxy ask for them.

Operations on one sandbox are serialised by its lock; an answer is given when the outcome is on record, while VMs that
are no longer needed are taken down behind it. What an operation does to a sandbox is in ``transitions``.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import structlog

from aenv.config import Settings
from aenv.errors import InvalidRequestError, SandboxUnreachableError
from aenv.orchestrator import lifecycle, listing, records, repeats
from aenv.orchestrator.capacity import Capacity
from aenv.orchestrator.checkpoint import Checkpoint, Checkpoints
from aenv.orchestrator.cold import ColdStarts
from aenv.orchestrator.imports import Imports
from aenv.orchestrator.machines import Machine, Machines, egress_policy
from aenv.orchestrator.model import (
    ColdMachine,
    Egress,
    ForkOutcome,
    Sandbox,
    SandboxFilter,
    SandboxPage,
    SandboxSpec,
    SandboxState,
    SavedSnapshot,
    SavedSnapshotPage,
    Template,
    Upstream,
)
from aenv.orchestrator.records import Child
from aenv.orchestrator.saved import SavedSnapshots
from aenv.orchestrator.store import Store
from aenv.orchestrator.transitions import Transitions
from aenv.snapshot.model import Snapshot

log = structlog.get_logger()


class Node:
    """Implements ``aenv.orchestrator.interface.Orchestrator``."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        machines: Machines,
        checkpoints: Checkpoints,
        capacity: Capacity,
        imports: Imports,
        cold: ColdStarts,
    ) -> None:
        self._settings = settings
        self._store = store
        self._machines = machines
        self._checkpoints = checkpoints
        self._capacity = capacity
        self._imports = imports
        self._cold = cold
        self._turns = repeats.Turns()
        self._saved = SavedSnapshots(store)
        self._transitions = Transitions(store, machines, checkpoints, capacity)
        self._visible, self._locked = self._transitions.visible, self._transitions.locked
        self.expiry = self._transitions.expiry

    # -- reading ----------------------------------------------------------------------------------------

    async def get(self, sandbox_id: str) -> Sandbox:
        return self._visible(sandbox_id)

    async def list(self, where: SandboxFilter, limit: int, token: str | None) -> SandboxPage:
        return listing.page(self._store.sandboxes.rows.values(), where, limit, token)

    async def templates(self) -> Sequence[Template]:
        return sorted(self._store.templates.rows.values(), key=lambda t: t.created_at)

    async def upstream(self, sandbox_id: str) -> Upstream:
        while True:
            sandbox = self._visible(sandbox_id)
            machine = self._machines.get(sandbox_id)
            if sandbox.state is SandboxState.RUNNING and machine is not None:
                if not machine.ready.done():
                    await self._machines.wait_ready(machine)
                elif machine.ready.cancelled() or machine.ready.exception() is not None:
                    raise SandboxUnreachableError(f"The guest of sandbox {sandbox_id} does not answer.")
                return Upstream(sandbox, machine.host, machine.generation)
            if sandbox.state is SandboxState.PAUSED:
                lifecycle.require_wakeable(sandbox)
                await self.connect(sandbox_id, sandbox.timeout)
                continue
            async with self._locked(sandbox_id):  # a transition is under way; look again when it is over
                sandbox = self._visible(sandbox_id)
                runs = sandbox.state is SandboxState.RUNNING and self._machines.get(sandbox_id) is not None
                if not runs and sandbox.state is not SandboxState.PAUSED:
                    # Nobody is at work on it, so waiting would never end.
                    raise SandboxUnreachableError(f"Sandbox {sandbox_id} is {sandbox.state} and has no VM.")

    # -- lifecycle --------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> Sandbox:
        if spec.idempotency_key is None:
            return await self._create(spec)
        async with self._turns.of(spec.idempotency_key):
            made = repeats.made_before(self._store.sandboxes.rows.values(), spec)
            return made or await self._create(spec)

    async def _create(self, spec: SandboxSpec) -> Sandbox:
        lifecycle.check_timeout(spec.timeout, self._settings.max_timeout)
        origin = await self._imports.origin(spec.template)
        snapshot = self._store.snapshots[origin.snapshot_id]
        now = datetime.now(UTC)
        child = records.created(spec, origin, snapshot, now)
        self._capacity.take(1)
        try:
            with self._store.transaction():
                self._put(child)
                if isinstance(origin, Template):
                    stored = self._store.templates[origin.id]  # ``origin`` may be another build of it
                    used = replace(stored, spawn_count=stored.spawn_count + 1, last_spawned_at=now)
                    self._store.templates.put(used)
        except BaseException:
            self._capacity.give_back()
            raise
        async with self._locked(child.sandbox.id):
            return await self._transitions.start(child, snapshot, wait=True)

    async def create_cold(self, spec: SandboxSpec, machine: ColdMachine) -> Sandbox:
        lifecycle.check_timeout(spec.timeout, self._settings.max_timeout)
        root = await self._cold.root(spec.template, machine)
        self._capacity.take(1)
        try:
            with self._store.transaction():
                snapshot = self._cold.snapshot(root, self._cold.put(root))
                origin = self._cold.origin(spec.template, root)
                child = records.created(spec, origin, snapshot, datetime.now(UTC))
                self._store.snapshots.put(snapshot)
                self._put(child)
        except BaseException:
            self._capacity.give_back()
            raise
        async with self._locked(child.sandbox.id):
            started = await self._transitions.start(child, snapshot, wait=True)
            try:
                await self._cold.complete(root, started, self._transitions.machine(started).host)
            except BaseException:
                self._transitions.delete(started)
                raise
            return started

    async def kill(self, sandbox_id: str) -> None:
        async with self._locked(sandbox_id):
            self._transitions.delete(self._visible(sandbox_id))

    async def pause(self, sandbox_id: str, *, memory: bool = True, strict: bool = False) -> Sandbox:
        async with self._locked(sandbox_id):
            return await self._transitions.pause(self._visible(sandbox_id), memory=memory, strict=strict)

    async def resume(
        self, sandbox_id: str, timeout: int, auto_pause: bool | None, *, reboot: bool = False
    ) -> Sandbox:
        lifecycle.check_timeout(timeout, self._settings.max_timeout)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            lifecycle.require(sandbox, SandboxState.PAUSED, "resumed")
            lifecycle.require_answering(sandbox, reboot=reboot)
            if auto_pause is not None:
                sandbox = replace(sandbox, auto_pause=auto_pause)
            return await self._transitions.resume(sandbox, timeout, reboot=reboot)

    async def connect(self, sandbox_id: str, timeout: int, *, reboot: bool = False) -> tuple[Sandbox, bool]:
        lifecycle.check_timeout(timeout, self._settings.max_timeout)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            if sandbox.state is SandboxState.PAUSED:
                lifecycle.require_answering(sandbox, reboot=reboot)
                return await self._transitions.resume(sandbox, timeout, reboot=reboot), True
            longer = lifecycle.expiring_at_least(sandbox, timeout, datetime.now(UTC))
            return self._transitions.save(longer), False

    async def set_timeout(self, sandbox_id: str, timeout: int) -> Sandbox:
        lifecycle.check_timeout(timeout, self._settings.max_timeout)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            lifecycle.require(sandbox, SandboxState.RUNNING, "given a timeout")
            return self._transitions.save(lifecycle.expiring(sandbox, timeout, datetime.now(UTC)))

    async def refresh(self, sandbox_id: str, duration: int) -> Sandbox:
        lifecycle.check_timeout(duration, self._settings.max_timeout)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            lifecycle.require(sandbox, SandboxState.RUNNING, "refreshed")
            return self._transitions.save(lifecycle.expiring_at_least(sandbox, duration, datetime.now(UTC)))

    async def update_network(self, sandbox_id: str, egress: Egress) -> Sandbox:
        egress_policy(egress)  # refuses what cannot be applied before anything changes
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            lifecycle.require(sandbox, SandboxState.RUNNING, "given another network policy")
            machine = self._transitions.machine(sandbox)
            # Recorded first: a server that starts after a crash in between applies what is on record.
            changed = self._transitions.save(replace(sandbox, egress=egress))
            try:
                await self._machines.apply_egress(machine, egress)
            except BaseException:
                self._transitions.save(sandbox)
                raise
            return changed

    async def fork(self, sandbox_id: str, count: int, timeout: int | None) -> Sequence[ForkOutcome]:
        if not 1 <= count <= self._settings.max_fork:
            raise InvalidRequestError(
                f"A fork of {count} is out of range.", f"Ask for 1 to {self._settings.max_fork} (max_fork)."
            )
        if timeout is not None:
            lifecycle.check_timeout(timeout, self._settings.max_timeout)
        self._visible(sandbox_id)
        self._capacity.take(count)
        try:
            async with self._locked(sandbox_id):
                snapshot, children = await self._fork_point(self._visible(sandbox_id), count, timeout)
        except BaseException:
            self._capacity.give_back(count)
            raise
        snapshot = await self._checkpoints.files.prepare_for(snapshot, count)
        outcomes = await asyncio.gather(*(self._transitions.start_child(child, snapshot) for child in children))
        return list(outcomes)

    async def _fork_point(
        self, sandbox: Sandbox, count: int, timeout: int | None
    ) -> tuple[Snapshot, Sequence[Child]]:
        """The snapshot to fork from and ``count`` recorded children; the source runs on, or stays paused."""
        if sandbox.state is SandboxState.PAUSED:
            lifecycle.require_answering(sandbox)
            assert sandbox.snapshot_id is not None
            checkpoint = Checkpoint(self._store.snapshots[sandbox.snapshot_id])
        else:
            checkpoint = await self._transitions.checkpoint(sandbox, "forked")
        now = datetime.now(UTC)
        children = [records.forked(sandbox, checkpoint.snapshot, timeout, now) for _ in range(count)]
        with self._store.transaction():
            checkpoint.record(self._store)
            for child in children:
                self._put(child)
        return checkpoint.snapshot, children

    # -- saved snapshots --------------------------------------------------------------------------------

    async def create_snapshot(self, sandbox_id: str, name: str | None, memory: bool | None) -> SavedSnapshot:
        self._saved.check(name)
        await self._imports.inherit(name)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            if sandbox.state is SandboxState.PAUSED:
                lifecycle.require_kept(sandbox, memory)
                assert sandbox.snapshot_id is not None
                checkpoint = Checkpoint(self._store.snapshots[sandbox.snapshot_id])
            else:
                checkpoint = await self._transitions.checkpoint(sandbox, "saved", memory=memory is not False)
            await self._checkpoints.files.make_durable(checkpoint.snapshot)
            # Read anew: what a paused sandbox names may have been merged meanwhile.
            snapshot = self._store.snapshots.get(checkpoint.snapshot.id) or checkpoint.snapshot
            saved = self._saved.record(name, sandbox, snapshot)
            with self._store.transaction():
                if snapshot is checkpoint.snapshot:
                    checkpoint.record(self._store)
                self._store.saved.put(saved)
                # What is captured of it next is stored as the difference to this.
                self._store.sandboxes.put(replace(self._store.sandboxes[sandbox_id], captured_id=snapshot.id))
        self._checkpoints.files.collect_garbage()  # what a snapshot of the same name was before
        self._checkpoints.files.merge_memory(snapshot)
        return saved

    async def snapshots(
        self, sandbox_id: str | None, name: str | None, limit: int, token: str | None
    ) -> SavedSnapshotPage:
        return self._saved.page(sandbox_id, name, limit, token, self._imports.others())

    async def snapshot(self, name: str) -> SavedSnapshot:
        found = self._saved.find(name)
        return await self._imports.find(name) if found is None or found.imported else found

    async def delete_snapshot(self, name: str) -> None:
        saved = await self.snapshot(name)
        if saved.imported:
            await self._imports.delete(saved)
        else:
            with self._store.transaction():
                self._store.saved.delete(saved.id)
        self._checkpoints.files.collect_garbage()

    # -- leaving ----------------------------------------------------------------------------------------

    async def close(self, *, pause_all: bool) -> None:
        """Stop all timers and let running VMs be, or pause them first."""
        await self.expiry.close()
        if pause_all:
            running = [s.id for s in self._store.sandboxes.rows.values() if s.state is SandboxState.RUNNING]
            results = await asyncio.gather(*(self.pause(name) for name in running), return_exceptions=True)
            for name, result in zip(running, results, strict=True):
                if isinstance(result, BaseException):
                    log.error("sandbox could not be paused; it stays running", sandbox=name, error=str(result))
        await self._transitions.background.settle()
        await self._transitions.compaction.background.settle()
        await self._machines.close()
        await self._checkpoints.files.background.settle()

    # -- parts ------------------------------------------------------------------------------------------

    def machine_died(self, machine: Machine, reason: str) -> None:
        """A VM ended by itself or its guest never came up."""
        self._transitions.machine_died(machine, reason)

    def _put(self, child: Child) -> None:
        self._store.layers.put(child.layer)
        self._store.sandboxes.put(child.sandbox)
