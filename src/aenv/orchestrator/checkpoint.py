"""Turning a running VM into a snapshot, and keeping the snapshots' files few and shallow."""

import asyncio
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import structlog

from aenv.errors import AenvError
from aenv.orchestrator import lifecycle
from aenv.orchestrator.machines import Machine, Machines
from aenv.orchestrator.model import Sandbox
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer, MemoryBase, Snapshot
from aenv.snapshot.reachability import chain, find_garbage
from aenv.storage.layout import Layout, allocated_bytes, remove
from aenv.storage.lsmt import compose
from aenv.vmm.protocol import Fingerprint, MachineShape

log = structlog.get_logger()

MAX_CHAIN = 12  # disk layers above which a paused sandbox's chain is merged; each costs an open on resume
MERGE_DELTA = 64 << 20  # bytes of memory delta above which it is merged into a base while paused


class Checkpoints:
    def __init__(self, layout: Layout, store: Store, machines: Machines, fingerprint: Fingerprint) -> None:
        self._layout = layout
        self._store = store
        self._machines = machines
        self._fingerprint = fingerprint
        self._tasks: set[asyncio.Task[None]] = set()
        self.pinned: Counter[str] = Counter()  # snapshots in use by template builds, which no record names yet

    async def capture(self, sandbox: Sandbox, machine: Machine, *, owner: str | None) -> Snapshot:
        """Stop the VM and write its state and memory; it stays stopped. On failure it runs on.

        The files are complete and in place when this returns; the snapshot is not recorded yet.
        """
        snapshot_id = secrets.token_hex(10)
        folder = self._layout.snapshot(snapshot_id)
        vm = machine.vm
        folder.mkdir(mode=0o700)
        try:
            await vm.stop()
            stats = await vm.capture(self._layout.state(snapshot_id), self._layout.delta(snapshot_id))
        except BaseException:
            await asyncio.shield(self._undo(machine, snapshot_id))
            raise
        assert sandbox.disk is not None and sandbox.memory_base is not None
        log.debug(
            "captured",
            sandbox=sandbox.id,
            memory=stats.memory_bytes,
            zero=stats.zero_bytes,
            stall_s=stats.stall,
        )
        return Snapshot(
            id=snapshot_id,
            owner=owner,
            memory_base=sandbox.memory_base,
            delta_bytes=max(1, stats.memory_bytes),
            disk=sandbox.disk,
            shape=MachineShape(sandbox.vcpus, sandbox.memory_mib),
            disk_mib=sandbox.disk_mib,
            fingerprint=self._fingerprint,
            guest_token=sandbox.envd_access_token,
            created_at=datetime.now(UTC),
        )

    async def _undo(self, machine: Machine, snapshot_id: str) -> None:
        try:
            await machine.vm.cont()
        except AenvError as error:
            log.error("VM could not run on after a failed capture", vm=machine.vm.id, error=str(error))
        remove(self._layout.snapshot(snapshot_id))

    async def fork_point(self, sandbox: Sandbox, machine: Machine) -> tuple[Snapshot, DiskLayer]:
        """Capture a running sandbox in place: its disk is frozen, and it runs on upon a new layer.

        Neither the snapshot nor the layer is recorded yet. If the server dies before they are, recovery asks
        the VM which layer it writes to.
        """
        assert sandbox.disk is not None
        layer = DiskLayer(id=secrets.token_hex(10), parent=sandbox.disk, format="qcow2")
        started = time.monotonic()
        snapshot = await self.capture(sandbox, machine, owner=None)
        try:
            await machine.vm.rebase_disk(self._layout.layer(layer))
        except BaseException:
            await asyncio.shield(self._undo(machine, snapshot.id))
            raise
        await machine.vm.cont()
        log.debug("fork point", sandbox=sandbox.id, stall_s=time.monotonic() - started)
        # The guest's clock stood still meanwhile.
        self._spawn(self._machines.introduce(sandbox, machine.lease, [sandbox.envd_access_token], 10.0))
        return snapshot, layer

    async def prepare_for(self, snapshot: Snapshot, children: int) -> Snapshot:
        """Merge the memory delta into a base of its own if that moves fewer bytes than copying it each time."""
        base = self._store.memory[snapshot.memory_base]
        if not snapshot.delta_bytes or not lifecycle.should_compose(snapshot.delta_bytes, base.data_bytes, children):
            return snapshot
        try:
            return await self._compose(snapshot)
        except (AenvError, OSError) as error:
            log.warning("memory could not be merged; children get copies", error=str(error))
            return snapshot

    async def _compose(self, snapshot: Snapshot) -> Snapshot:
        merged = secrets.token_hex(10)
        path = self._layout.memory(merged)
        delta = self._layout.delta(snapshot.id)
        base = self._layout.memory(snapshot.memory_base)
        await asyncio.to_thread(compose, base, delta, path)
        current = self._store.snapshots.get(snapshot.id)
        if current is None or current.memory_base != snapshot.memory_base:
            path.unlink(missing_ok=True)
            return current or snapshot
        composed = replace(current, memory_base=merged, delta_bytes=0)
        with self._store.transaction():
            self._store.memory.put(MemoryBase(merged, allocated_bytes(path)))
            self._store.snapshots.put(composed)
        if not self._machines.launching(snapshot.id):  # else it goes with the snapshot
            delta.unlink(missing_ok=True)
        self.collect_garbage()
        return composed

    def tidy(self, sandbox: Sandbox, snapshot: Snapshot) -> None:
        """After a pause: drop what the previous snapshot alone kept, and merge what has grown."""
        self.collect_garbage()
        depth = len(chain(self._store.layers.rows, snapshot.disk))
        if depth > MAX_CHAIN:
            self._spawn(self._merge_disk(sandbox.id, snapshot))
        if snapshot.delta_bytes > MERGE_DELTA:
            self._spawn(self._merge_memory(snapshot))

    async def _merge_memory(self, snapshot: Snapshot) -> None:
        await self._compose(snapshot)

    async def _merge_disk(self, sandbox_id: str, snapshot: Snapshot) -> None:
        """Write all layers above the base image into one new layer, and swap it in if nothing has changed.

        All layers involved are frozen, so the sandbox need not be locked while this reads them.
        """
        layers = chain(self._store.layers.rows, snapshot.disk)
        base = layers[-1]
        merged = DiskLayer(id=secrets.token_hex(10), parent=base.id, format="qcow2")
        path = self._layout.layer(merged)
        process = await asyncio.create_subprocess_exec(
            "qemu-img", "convert", "-O", "qcow2", "-B", str(self._layout.layer(base)), "-F", base.format,
            str(self._layout.layer(layers[0])), str(path),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, stderr = await process.communicate()
        if process.returncode != 0:
            path.unlink(missing_ok=True)
            log.error("disk layers could not be merged", sandbox=sandbox_id, error=stderr.decode().strip())
            return
        sandbox = self._store.sandboxes.get(sandbox_id)
        current = self._store.snapshots.get(snapshot.id)
        if current is None or sandbox is None or sandbox.disk != snapshot.disk:
            path.unlink(missing_ok=True)  # it was resumed or killed meanwhile
            return
        with self._store.transaction():
            self._store.layers.put(merged)
            self._store.snapshots.put(replace(current, disk=merged.id))
            self._store.sandboxes.put(replace(sandbox, disk=merged.id))
        log.info("merged disk layers", sandbox=sandbox_id, layers=len(layers) - 1)
        self.collect_garbage()

    def forget_sandbox(self, sandbox_id: str) -> None:
        shutil.rmtree(self._layout.sandbox(sandbox_id), ignore_errors=True)

    def collect_garbage(self) -> None:
        """Forget and remove every snapshot, layer and memory base that nothing names any more.

        Records go first: a file without a record is debris that the next start removes, the reverse would be
        a snapshot that cannot be restored.
        """
        store = self._store
        sandboxes = store.sandboxes.rows.values()
        garbage = find_garbage(
            store.snapshots.rows,
            store.layers.rows,
            store.memory.rows,
            named_snapshots=[
                *(s.snapshot_id for s in sandboxes if s.snapshot_id),
                *(t.snapshot_id for t in store.templates.rows.values()),
                *(b.image.snapshot_id for b in store.builds.rows.values() if b.image is not None),
                *(layer.snapshot_id for layer in store.build_cache.rows.values()),
                *self.pinned,
            ],
            named_layers=[s.disk for s in sandboxes if s.disk],
            named_memory=[s.memory_base for s in sandboxes if s.memory_base],
        )
        if not garbage:
            return
        paths = [
            *(self._layout.snapshot(name) for name in garbage.snapshots),
            *(self._layout.layer(store.layers[name]) for name in garbage.layers),
            *(self._layout.memory(name) for name in garbage.memory),
        ]
        with store.transaction():
            for name in garbage.snapshots:
                store.snapshots.delete(name)
            for name in garbage.layers:
                store.layers.delete(name)
            for name in garbage.memory:
                store.memory.delete(name)
        self._spawn(asyncio.to_thread(_remove_all, paths))

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.warning("background work failed", error=str(error))


def _remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        remove(path)
