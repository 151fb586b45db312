"""The sandbox lifecycle of one node: create, pause, resume, fork, kill, expire.

Every operation follows the same order: record the transition, act, record the outcome. ``recovery`` reads the
records after a crash at any point in between. Operations on one sandbox are serialised by its lock; an answer
is given when the outcome is on record, while VMs that are no longer needed are taken down behind it.
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import structlog

from aenv.config import Settings
from aenv.errors import (
    AenvError,
    ConflictError,
    InvalidRequestError,
    SandboxNotFoundError,
    SandboxUnreachableError,
)
from aenv.orchestrator import catalog, lifecycle, listing
from aenv.orchestrator.capacity import Capacity
from aenv.orchestrator.checkpoint import Checkpoints
from aenv.orchestrator.expiry import Expiry
from aenv.orchestrator.machines import Machine, Machines
from aenv.orchestrator.model import (
    ForkOutcome,
    Sandbox,
    SandboxFilter,
    SandboxPage,
    SandboxSpec,
    SandboxState,
    Template,
    Upstream,
)
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer, Snapshot

log = structlog.get_logger()

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH = 20  # as E2B's: lower case, so that it is a DNS label


def new_sandbox_id() -> str:
    return "i" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH - 1))


def new_layer(parent: str) -> DiskLayer:
    return DiskLayer(id=secrets.token_hex(10), parent=parent, format="qcow2")


@dataclass(frozen=True, slots=True)
class _Child:
    """A recorded, not yet running sandbox and its empty disk layer."""

    sandbox: Sandbox
    layer: DiskLayer


class Node:
    """Implements ``aenv.orchestrator.interface.Orchestrator``."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        machines: Machines,
        checkpoints: Checkpoints,
        capacity: Capacity,
    ) -> None:
        self._settings = settings
        self._store = store
        self._machines = machines
        self._checkpoints = checkpoints
        self._capacity = capacity
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._tasks: set[asyncio.Task[None]] = set()
        self.expiry = Expiry(self._expire)

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
                if not sandbox.auto_resume:
                    raise ConflictError(
                        f"Sandbox {sandbox_id!r} is paused.",
                        "Connect to it to resume it, or create it with autoResume enabled.",
                    )
                await self.connect(sandbox_id, sandbox.timeout)
                continue
            async with self._locked(sandbox_id):
                pass  # a transition is under way; look again when it is over

    # -- lifecycle --------------------------------------------------------------------------------------

    async def create(self, spec: SandboxSpec) -> Sandbox:
        lifecycle.check_timeout(spec.timeout, self._settings.max_timeout)
        template = self._template(spec.template)
        snapshot = self._store.snapshots[template.snapshot_id]
        self._capacity.take(1)
        now = datetime.now(UTC)
        sandbox = Sandbox(
            id=new_sandbox_id(),
            template_id=template.id,
            template_alias=template.aliases[0] if template.aliases else None,
            state=SandboxState.STARTING,
            started_at=now,
            end_at=now + timedelta(seconds=spec.timeout),
            timeout=spec.timeout,
            auto_pause=spec.auto_pause,
            auto_resume=spec.auto_resume,
            metadata=dict(spec.metadata),
            env_vars={**template.env_vars, **spec.env_vars},
            envd_access_token=secrets.token_urlsafe(32) if spec.secure else None,
            traffic_access_token=None if spec.allow_public_traffic else secrets.token_urlsafe(32),
            egress=spec.egress,
            vcpus=template.vcpus,
            memory_mib=template.memory_mib,
            disk_mib=template.disk_mib,
            envd_version=template.envd_version,
            snapshot_id=snapshot.id,
            default_user=template.default_user,
            default_workdir=template.default_workdir,
        )
        child = self._record(sandbox, snapshot)
        stored = self._store.templates[template.id]  # ``template`` may be another build of it
        used = replace(stored, spawn_count=stored.spawn_count + 1, last_spawned_at=now)
        with self._store.transaction():
            self._store.layers.put(child.layer)
            self._store.sandboxes.put(child.sandbox)
            self._store.templates.put(used)
        async with self._locked(sandbox.id):
            return await self._start(child, snapshot, wait=True)

    async def kill(self, sandbox_id: str) -> None:
        async with self._locked(sandbox_id):
            self._delete(self._visible(sandbox_id))

    async def pause(self, sandbox_id: str) -> Sandbox:
        async with self._locked(sandbox_id):
            return await self._pause(self._visible(sandbox_id))

    async def resume(self, sandbox_id: str, timeout: int, auto_pause: bool | None) -> Sandbox:
        lifecycle.check_timeout(timeout, self._settings.max_timeout)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            lifecycle.require(sandbox, SandboxState.PAUSED, "resumed")
            if auto_pause is not None:
                sandbox = replace(sandbox, auto_pause=auto_pause)
            return await self._resume(sandbox, timeout)

    async def connect(self, sandbox_id: str, timeout: int) -> tuple[Sandbox, bool]:
        lifecycle.check_timeout(timeout, self._settings.max_timeout)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            if sandbox.state is SandboxState.PAUSED:
                return await self._resume(sandbox, timeout), True
            return self._save(lifecycle.expiring_at_least(sandbox, timeout, datetime.now(UTC))), False

    async def set_timeout(self, sandbox_id: str, timeout: int) -> Sandbox:
        lifecycle.check_timeout(timeout, self._settings.max_timeout)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            lifecycle.require(sandbox, SandboxState.RUNNING, "given a timeout")
            return self._save(lifecycle.expiring(sandbox, timeout, datetime.now(UTC)))

    async def refresh(self, sandbox_id: str, duration: int) -> Sandbox:
        lifecycle.check_timeout(duration, self._settings.max_timeout)
        async with self._locked(sandbox_id):
            sandbox = self._visible(sandbox_id)
            lifecycle.require(sandbox, SandboxState.RUNNING, "refreshed")
            return self._save(lifecycle.expiring_at_least(sandbox, duration, datetime.now(UTC)))

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
        snapshot = await self._checkpoints.prepare_for(snapshot, count)
        outcomes = await asyncio.gather(*(self._start_child(child, snapshot) for child in children))
        return list(outcomes)

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
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._machines.close()
        await self._checkpoints.close()

    # -- parts ------------------------------------------------------------------------------------------

    def _visible(self, sandbox_id: str) -> Sandbox:
        sandbox = self._store.sandboxes.get(sandbox_id)
        if sandbox is None or sandbox.state in (SandboxState.STARTING, SandboxState.DELETING):
            raise SandboxNotFoundError(sandbox_id)
        return sandbox

    def _template(self, name: str) -> Template:
        return catalog.resolve(self._store.templates.rows.values(), self._store.builds.rows, name)

    @asynccontextmanager
    async def _locked(self, sandbox_id: str) -> AsyncIterator[None]:
        lock = self._locks[sandbox_id]
        try:
            async with lock:
                yield
        finally:
            if not lock.locked() and sandbox_id not in self._store.sandboxes.rows:
                self._locks.pop(sandbox_id, None)

    def _save(self, sandbox: Sandbox) -> Sandbox:
        with self._store.transaction():
            self._store.sandboxes.put(sandbox)
        if sandbox.state is SandboxState.RUNNING:
            self.expiry.watch(sandbox)
        return sandbox

    def _record(self, sandbox: Sandbox, snapshot: Snapshot) -> _Child:
        layer = new_layer(snapshot.disk)
        return _Child(replace(sandbox, disk=layer.id), layer)

    async def _start(self, child: _Child, snapshot: Snapshot, *, wait: bool) -> Sandbox:
        """Launch a recorded child (state STARTING, capacity taken); on failure nothing of it is left."""
        sandbox_id = child.sandbox.id
        try:
            machine = await self._machines.launch(child.sandbox, snapshot, child.layer)
            if wait:
                await self._machines.wait_ready(machine)
            started = self._store.sandboxes[sandbox_id]
            return self._save(lifecycle.move(started, SandboxState.RUNNING))
        except BaseException:
            sandbox = self._store.sandboxes.get(sandbox_id)
            if sandbox is not None and sandbox.state is not SandboxState.DELETING:
                self._delete(sandbox)
            raise

    async def _start_child(self, child: _Child, snapshot: Snapshot) -> ForkOutcome:
        try:
            async with self._locked(child.sandbox.id):
                return ForkOutcome(sandbox=await self._start(child, snapshot, wait=False))
        except Exception as error:
            if not isinstance(error, AenvError):
                log.exception("fork child failed", sandbox=child.sandbox.id)
            return ForkOutcome(error=error)

    def _delete(self, sandbox: Sandbox) -> None:
        """Mark as being deleted, and take down VM and records behind the answer."""
        with self._store.transaction():
            self._store.sandboxes.put(replace(sandbox, state=SandboxState.DELETING))
        self.expiry.forget(sandbox.id)
        teardown = self._machines.retire(sandbox.id)
        held = sandbox.state not in (SandboxState.PAUSED,)
        self._spawn(self._finish_delete(sandbox.id, teardown, held))

    async def _finish_delete(self, sandbox_id: str, teardown: asyncio.Task[None] | None, held: bool) -> None:
        if teardown is not None:
            await asyncio.wait({teardown})
        if held:
            self._capacity.give_back()
        with self._store.transaction():
            self._store.sandboxes.delete(sandbox_id)
        self._checkpoints.forget_sandbox(sandbox_id)
        self._locks.pop(sandbox_id, None)
        self._checkpoints.collect_garbage()

    async def _pause(self, sandbox: Sandbox) -> Sandbox:
        lifecycle.require(sandbox, SandboxState.RUNNING, "paused")
        machine = self._machine(sandbox)
        await self._machines.wait_ready(machine)
        self._save(lifecycle.move(sandbox, SandboxState.PAUSING))
        self.expiry.forget(sandbox.id)
        try:
            snapshot = await self._checkpoints.capture(sandbox, machine, owner=sandbox.id)
        except BaseException:
            self._save(sandbox)
            raise
        paused = replace(
            lifecycle.move(self._store.sandboxes[sandbox.id], SandboxState.PAUSED),
            snapshot_id=snapshot.id,
            vm_id=None,
            slot=None,
            memory_base=None,
        )
        with self._store.transaction():
            self._store.snapshots.put(snapshot)
            self._store.sandboxes.put(paused)
        self._machines.retire(sandbox.id)
        self._capacity.give_back()
        self._checkpoints.tidy(paused, snapshot)
        return paused

    async def _resume(self, sandbox: Sandbox, timeout: int) -> Sandbox:
        assert sandbox.snapshot_id is not None
        self._capacity.take(1)
        try:
            snapshot = self._store.snapshots[sandbox.snapshot_id]
            layer = new_layer(snapshot.disk)
            resuming = replace(lifecycle.move(sandbox, SandboxState.RESUMING), disk=layer.id)
            with self._store.transaction():
                self._store.layers.put(layer)
                self._store.sandboxes.put(resuming)
            try:
                await self._machines.launch(resuming, snapshot, layer)
            except BaseException:
                self._roll_back(self._store.sandboxes[sandbox.id])
                raise
        except BaseException:
            self._capacity.give_back()
            raise
        running = lifecycle.move(self._store.sandboxes[sandbox.id], SandboxState.RUNNING)
        return self._save(lifecycle.expiring(running, timeout, datetime.now(UTC)))

    def _roll_back(self, sandbox: Sandbox) -> Sandbox:
        """Back to the snapshot it was paused in; the disk layer written since is garbage."""
        assert sandbox.snapshot_id is not None
        snapshot = self._store.snapshots[sandbox.snapshot_id]
        back = replace(
            sandbox, state=SandboxState.PAUSED, disk=snapshot.disk, vm_id=None, slot=None, memory_base=None
        )
        with self._store.transaction():
            self._store.sandboxes.put(back)
        return back

    async def _fork_point(
        self, sandbox: Sandbox, count: int, timeout: int | None
    ) -> tuple[Snapshot, Sequence[_Child]]:
        """The snapshot to fork from and ``count`` recorded children; the source runs on, or stays paused."""
        forked = sandbox
        if sandbox.state is SandboxState.PAUSED:
            assert sandbox.snapshot_id is not None
            snapshot = self._store.snapshots[sandbox.snapshot_id]
        else:
            lifecycle.require(sandbox, SandboxState.RUNNING, "forked")
            machine = self._machine(sandbox)
            await self._machines.wait_ready(machine)
            snapshot, layer = await self._checkpoints.fork_point(sandbox, machine)
            forked = replace(sandbox, disk=layer.id)
        now = datetime.now(UTC)
        lifetime = sandbox.timeout if timeout is None else timeout
        children = [
            self._record(
                replace(
                    sandbox,
                    id=new_sandbox_id(),
                    state=SandboxState.STARTING,
                    started_at=now,
                    end_at=now + timedelta(seconds=lifetime),
                    timeout=lifetime,
                    envd_access_token=secrets.token_urlsafe(32) if sandbox.envd_access_token else None,
                    traffic_access_token=secrets.token_urlsafe(32) if sandbox.traffic_access_token else None,
                    parent_id=sandbox.id,
                    snapshot_id=snapshot.id,
                    vm_id=None,
                    slot=None,
                    memory_base=None,
                ),
                snapshot,
            )
            for _ in range(count)
        ]
        with self._store.transaction():
            if forked is not sandbox:
                self._store.snapshots.put(snapshot)
                self._store.layers.put(layer)
                self._store.sandboxes.put(forked)
            for child in children:
                self._store.layers.put(child.layer)
                self._store.sandboxes.put(child.sandbox)
        return snapshot, children

    def _machine(self, sandbox: Sandbox) -> Machine:
        machine = self._machines.get(sandbox.id)
        if machine is None:
            raise ConflictError(f"Sandbox {sandbox.id!r} has just lost its VM.", "Try again in a moment.")
        return machine

    async def _expire(self, sandbox_id: str) -> None:
        async with self._locked(sandbox_id):
            sandbox = self._store.sandboxes.get(sandbox_id)
            if sandbox is None or sandbox.state is not SandboxState.RUNNING:
                return
            if sandbox.end_at > datetime.now(UTC):
                self.expiry.watch(sandbox)
            elif sandbox.auto_pause:
                log.info("sandbox expired; pausing", sandbox=sandbox_id)
                await self._pause(sandbox)
            else:
                log.info("sandbox expired; killing", sandbox=sandbox_id)
                self._delete(sandbox)

    def machine_died(self, machine: Machine, reason: str) -> None:
        """A VM ended by itself or its guest never came up."""
        self._spawn(self._bury(machine, reason))

    async def _bury(self, machine: Machine, reason: str) -> None:
        sandbox_id = machine.sandbox_id
        async with self._locked(sandbox_id):
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
                self._roll_back(sandbox)
                self._capacity.give_back()
                self._checkpoints.collect_garbage()
            else:
                log.error("sandbox lost its VM, was never paused: gone", sandbox=sandbox_id, reason=reason)
                self._delete(sandbox)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", error=repr(error))
