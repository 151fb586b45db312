"""The files behind snapshots: kept few and shallow, made durable, removed when nothing names them."""

import asyncio
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from aenv.background import Background
from aenv.errors import AenvError
from aenv.orchestrator import lifecycle
from aenv.orchestrator.machines import Machines
from aenv.orchestrator.model import Sandbox
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer, MemoryBase, Snapshot
from aenv.snapshot.reachability import chain, find_garbage
from aenv.storage.layout import Layout, allocated_bytes, remove
from aenv.storage.lsmt import compose
from aenv.storage.merge import merge_layers

log = structlog.get_logger()

MAX_CHAIN = 12  # disk layers above which a paused sandbox's chain is merged; each costs an open on resume
MERGE_DELTA = 64 << 20  # bytes of memory delta above which it is merged into a base while nobody waits


class SnapshotFiles:
    def __init__(self, layout: Layout, store: Store, machines: Machines) -> None:
        self._layout = layout
        self._store = store
        self._machines = machines
        self.background = Background()
        self.pinned: Counter[str] = Counter()  # snapshots in use by template builds, which no record names yet

    async def prepare_for(self, snapshot: Snapshot, children: int) -> Snapshot:
        """Merge the memory delta into a base of its own if that moves fewer bytes than copying it each time."""
        if not snapshot.delta_bytes or snapshot.memory_base is None:
            return snapshot
        base = self._store.memory[snapshot.memory_base]
        if not lifecycle.should_compose(snapshot.delta_bytes, base.data_bytes, children):
            return snapshot
        try:
            return await self._compose(snapshot, snapshot.memory_base)
        except (AenvError, OSError) as error:
            log.warning("memory could not be merged; children get copies", error=str(error))
            return snapshot

    async def _compose(self, snapshot: Snapshot, base: str) -> Snapshot:
        merged = secrets.token_hex(10)
        path = self._layout.memory(merged)
        delta = self._layout.delta(snapshot.id)
        await asyncio.to_thread(compose, self._layout.memory(base), delta, path)
        current = self._store.snapshots.get(snapshot.id)
        if current is None or current.memory_base != base:
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
            self.background.spawn(self._merge_disk(sandbox.id, snapshot))
        self.merge_memory(snapshot)

    def merge_memory(self, snapshot: Snapshot) -> None:
        """In the background, when the delta is large."""
        if snapshot.memory_base is not None and snapshot.delta_bytes > MERGE_DELTA:
            self.background.spawn(self._merge_memory(snapshot, snapshot.memory_base))

    async def _merge_memory(self, snapshot: Snapshot, base: str) -> None:
        await self._compose(snapshot, base)

    async def _merge_disk(self, sandbox_id: str, snapshot: Snapshot) -> None:
        """Write all layers above the base image into one new layer, and swap it in if nothing has changed.

        All layers involved are frozen, so the sandbox need not be locked while this reads them.
        """
        layers = chain(self._store.layers.rows, snapshot.disk)
        base = layers[-1]
        merged = DiskLayer(id=secrets.token_hex(10), parent=base.id, format="qcow2")
        path = self._layout.layer(merged)
        try:
            await merge_layers(self._layout.layer(layers[0]), self._layout.layer(base), base.format, path)
        except (AenvError, OSError) as error:
            log.error("disk layers could not be merged", sandbox=sandbox_id, error=str(error))
            return
        await asyncio.to_thread(sync_all, [path])  # what it replaces may have been made durable
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

    async def make_durable(self, snapshot: Snapshot) -> None:
        """Have the host's disk hold all that the snapshot names. CapacityError or OSError when it cannot.

        A sandbox is lost with the host's memory when the host dies, so nothing of it is synced; what a user saves is.
        """
        folder = self._layout.snapshot(snapshot.id)
        layers = chain(self._store.layers.rows, snapshot.disk)
        paths = [self._layout.layer(layer) for layer in layers]
        if snapshot.memory_base is not None:
            paths += [self._layout.memory(snapshot.memory_base), self._layout.state(snapshot.id)]
        if snapshot.delta_bytes:
            paths.append(self._layout.delta(snapshot.id))
        folders = dict.fromkeys([folder, *(path.parent for path in paths), folder.parent])
        await asyncio.to_thread(sync_all, [*paths, *folders])

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
                *(s.snapshot_id for s in store.saved.rows.values()),
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
        self.background.spawn(asyncio.to_thread(_remove_all, paths))


def sync_all(paths: Iterable[Path]) -> None:
    """``fsync`` files and folders. One that is gone was merged into another, which was synced when it was made."""
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        remove(path)
