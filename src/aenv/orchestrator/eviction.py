"""Local files of committed snapshots are a cache: when the disk runs short, the repository's copy takes their place.

An evicted snapshot is as one that was imported: its memory and disk are volumes that the layer server reads on
demand. Its files go unless something else names them: a sandbox that runs from it keeps them, and so does a snapshot
that is not committed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime

import structlog

from aenv.errors import CorruptFileError, NotFoundError
from aenv.orchestrator.files import SnapshotFiles
from aenv.orchestrator.remote import remotely
from aenv.orchestrator.store import Store
from aenv.orchestrator.volumes import Volumes, put_volumes
from aenv.snapshot.manifest import Manifest
from aenv.snapshot.model import Snapshot, is_volume
from aenv.snapshot.repository import Repository
from aenv.storage.layout import Layout

log = structlog.get_logger()


def evictable(store: Store) -> Iterator[Snapshot]:
    """Snapshots that the repository has whole and that have files here, the longest unused first."""
    published = {row.snapshot_id for row in store.published.rows.values()}
    used: dict[str, datetime] = {}
    for template in store.templates.rows.values():
        used[template.snapshot_id] = template.last_spawned_at or template.created_at
    found = [
        snapshot
        for snapshot in store.snapshots.rows.values()
        if snapshot.id in published
        and snapshot.owner is None
        and snapshot.disk in store.committed.rows
        and (not snapshot.has_memory or snapshot.id in store.committed.rows)
        and not (is_volume(snapshot.disk) and (snapshot.memory_base is None or is_volume(snapshot.memory_base)))
    ]
    yield from sorted(found, key=lambda snapshot: used.get(snapshot.id, snapshot.created_at))


class Eviction:
    def __init__(
        self,
        layout: Layout,
        store: Store,
        files: SnapshotFiles,
        repository: Repository,
        volumes: Volumes,
        is_short: Callable[[], bool],
    ) -> None:
        """``is_short`` says whether the disk has less room than it should."""
        self._layout = layout
        self._store = store
        self._files = files
        self._repository = repository
        self._volumes = volumes
        self._is_short = is_short
        self._sound: set[str] = set()  # digests of layers that were read whole

    async def relieve(self) -> int:
        """Evict until the disk is no longer short, or nothing is left; how many snapshots. Raises SourceError."""
        evicted = 0
        for snapshot in list(evictable(self._store)):
            if not self._is_short():
                break
            evicted += await self._evict(snapshot.id)
            await self._files.background.settle()  # the files are gone then
        return evicted

    async def _evict(self, snapshot_id: str) -> bool:
        """Only what is in the repository whole: its copy is the only one from then on. So it is read once, all."""
        try:
            manifest, claim = await remotely(self._repository.acquire, snapshot_id, self._volumes.owner)
        except (NotFoundError, CorruptFileError) as error:
            log.error("a committed snapshot is not in the repository", snapshot=snapshot_id, error=str(error))
            return False
        try:
            try:
                await self._check(manifest)
            except (NotFoundError, CorruptFileError) as error:
                log.error("a committed snapshot is damaged in the repository; its files stay", snapshot=snapshot_id,
                          error=str(error))  # fmt: skip
                return False
            async with self._volumes.keeping(manifest.digests()):
                snapshot = self._store.snapshots.get(snapshot_id)
                if snapshot is None or self._files.in_use(snapshot_id):
                    return False
                self._record(snapshot, manifest)
        finally:
            await remotely(claim.release)
        self._layout.delta(snapshot_id).unlink(missing_ok=True)
        log.info("evicted a committed snapshot", snapshot=snapshot_id)
        self._files.collect_garbage()
        return True

    async def _check(self, manifest: Manifest) -> None:
        """Raises NotFoundError, CorruptFileError, SourceError."""
        for layer in manifest.layers():
            if layer.digest not in self._sound:
                await remotely(self._repository.check_layer, layer)
                self._sound.add(layer.digest)

    def _record(self, snapshot: Snapshot, manifest: Manifest) -> None:
        with self._store.transaction():
            disk, memory = put_volumes(self._store, manifest)
            self._store.snapshots.put(replace(snapshot, disk=disk, memory_base=memory, delta_bytes=0))
