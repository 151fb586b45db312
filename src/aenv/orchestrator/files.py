"""The files behind snapshots: kept few and shallow, made durable, removed when nothing names them."""

import asyncio
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import structlog

from aenv.background import Background
from aenv.errors import AenvError
from aenv.orchestrator import lifecycle
from aenv.orchestrator.machines import Machines
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer, MemoryBase, Snapshot, is_volume
from aenv.snapshot.reachability import chain, find_garbage
from aenv.storage.layout import Layout, allocated_bytes, remove
from aenv.storage.lsmt import compose

log = structlog.get_logger()

MERGE_DELTA = 64 << 20  # bytes of memory delta above which it is merged into a base while nobody waits


class SnapshotFiles:
    def __init__(self, layout: Layout, store: Store, machines: Machines) -> None:
        self._layout = layout
        self._store = store
        self._machines = machines
        self.background = Background()
        self.on_forget: Callable[[set[str]], None] = lambda _: None  # told of volumes that nothing names any more
        self._pinned: Counter[str] = Counter()  # snapshots in use by builds and commits, whatever names them
        self._read: Counter[str] = Counter()  # disk layers that work in progress reads

    def pin(self, *snapshot_ids: str) -> None:
        """Keep these snapshots and their files exactly as they are until ``unpin``."""
        self._pinned.update(snapshot_ids)

    def unpin(self, *snapshot_ids: str) -> None:
        self._pinned.subtract(snapshot_ids)
        self._pinned += Counter()  # drops zeros
        self.collect_garbage()

    def in_use(self, snapshot_id: str) -> bool:
        """Whether its files must stay exactly as they are now."""
        return self._pinned[snapshot_id] > 0 or self._machines.launching(snapshot_id)

    @contextmanager
    def reading(self, layers: Sequence[DiskLayer]) -> Iterator[None]:
        """Keep these layers, whatever becomes of the records that name them."""
        names = [layer.id for layer in layers]
        self._read.update(names)
        try:
            yield
        finally:
            self._read.subtract(names)
            self._read += Counter()  # drops zeros

    async def prepare_for(self, snapshot: Snapshot, children: int) -> Snapshot:
        """Merge the memory delta into a base of its own if that moves fewer bytes than copying it each time."""
        if not snapshot.delta_bytes or snapshot.memory_base is None or is_volume(snapshot.memory_base):
            return snapshot  # a volume would have to be fetched whole
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
        if current is None or current.memory_base != base or self._pinned[snapshot.id]:
            path.unlink(missing_ok=True)
            return current or snapshot
        composed = replace(current, memory_base=merged, delta_bytes=0)
        with self._store.transaction():
            self._store.memory.put(MemoryBase(merged, allocated_bytes(path)))
            self._store.snapshots.put(composed)
            if (known := self._store.committed.get(snapshot.id)) is not None:
                self._store.committed.put(replace(known, id=merged))
        if not self._machines.launching(snapshot.id):  # else it goes with the snapshot
            delta.unlink(missing_ok=True)
        self.collect_garbage()
        return composed

    def tidy(self, snapshot: Snapshot) -> None:
        """After a pause: drop what the previous snapshot alone kept, and merge what has grown."""
        self.collect_garbage()
        self.merge_memory(snapshot)

    def merge_memory(self, snapshot: Snapshot) -> None:
        """In the background, when the delta is large."""
        base = snapshot.memory_base
        if base is not None and not is_volume(base) and snapshot.delta_bytes > MERGE_DELTA:
            self.background.spawn(self._merge_memory(snapshot, base))

    async def _merge_memory(self, snapshot: Snapshot, base: str) -> None:
        await self._compose(snapshot, base)

    async def make_durable(self, snapshot: Snapshot) -> None:
        """Have the host's disk hold all that the snapshot names. CapacityError or OSError when it cannot.

        A sandbox is lost with the host's memory when the host dies, so nothing of it is synced; what a user saves is.
        """
        folder = self._layout.snapshot(snapshot.id)
        layers = chain(self._store.layers.rows, snapshot.disk)
        paths = [self._layout.layer(layer) for layer in layers if not is_volume(layer.id)]
        if snapshot.memory_base is not None:
            paths.append(self._layout.state(snapshot.id))
            if not is_volume(snapshot.memory_base):
                paths.append(self._layout.memory(snapshot.memory_base))
        if snapshot.delta_bytes:
            paths.append(self._layout.delta(snapshot.id))
        # Layers of images were synced when they were made, their second names not.
        images = [self._layout.image_volume(layer.id) for layer in layers if is_volume(layer.id)]
        names = [path for image in images for path in (image, image.parent)]
        folders = dict.fromkeys([folder, *(path.parent for path in paths), folder.parent, *names])
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
                *self._pinned,
            ],
            named_layers=[*(s.disk for s in sandboxes if s.disk), *self._read],
            named_memory=[s.memory_base for s in sandboxes if s.memory_base],
        )
        if not garbage:
            return
        volumes = {name for name in (*garbage.layers, *garbage.memory) if is_volume(name)}
        paths = [
            *(self._layout.snapshot(name) for name in garbage.snapshots),
            *(self._layout.layer(store.layers[name]) for name in garbage.layers - volumes),
            *(self._layout.memory(name) for name in garbage.memory - volumes),
        ]
        with store.transaction():
            for name in (*garbage.snapshots, *garbage.layers, *garbage.memory):
                if name in store.committed.rows:
                    store.committed.delete(name)
            for name in garbage.snapshots:
                store.snapshots.delete(name)
            for name in garbage.layers:
                store.layers.delete(name)
            for name in garbage.memory:
                store.memory.delete(name)
        # An import may bring a snapshot, with its id, back before its files are removed: they are out of its way now.
        paths = [_aside(path) for path in paths]
        self.background.spawn(asyncio.to_thread(_remove_all, paths))
        self.on_forget(volumes)


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


def _aside(path: Path) -> Path:
    """The same file or folder under a name that nothing else has; a start removes it if this process does not."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return path
    return aside


def _remove_all(paths: Sequence[Path]) -> None:
    for path in paths:
        remove(path)
