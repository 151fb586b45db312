"""Snapshots that other nodes committed: found in the repository by name, and recorded here so that sandboxes start.

Nothing of memory and disk is copied: the records name volumes of the layer server, which reads what a guest touches.
Only the device state is fetched, some 20 kB.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from weakref import WeakValueDictionary

import structlog
from pydantic import TypeAdapter, ValidationError

from aenv.errors import (
    AenvError,
    CorruptFileError,
    InvalidRequestError,
    NotFoundError,
    SnapshotNotFoundError,
    SourceError,
)
from aenv.orchestrator import catalog
from aenv.orchestrator.model import SavedSnapshot
from aenv.orchestrator.publication import HOT, Attributes
from aenv.orchestrator.records import Origin
from aenv.orchestrator.remote import remotely
from aenv.orchestrator.saved import SavedSnapshots
from aenv.orchestrator.store import Store
from aenv.orchestrator.volumes import Volumes, put_volumes
from aenv.snapshot.manifest import Manifest
from aenv.snapshot.model import Snapshot
from aenv.snapshot.repository import Repository
from aenv.storage.layout import Layout, remove
from aenv.storage.lsmt import disk_errors

log = structlog.get_logger()

ANSWER = 5.0  # seconds that whoever asks for a name waits for the repository
FRESH = 5.0  # seconds for which an imported name is used without asking the repository again
_ATTRIBUTES: TypeAdapter[Attributes] = TypeAdapter(Attributes)


class Imports:
    def __init__(self, layout: Layout, store: Store, repository: Repository, volumes: Volumes, owner: str) -> None:
        self._layout = layout
        self._store = store
        self._repository = repository
        self._volumes = volumes
        self._owner = owner
        self._saved = SavedSnapshots(store)
        self._listed: list[SavedSnapshot] = []
        self.deleted = 0  # committed snapshots, since the start
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # those that somebody uses
        self._checked: dict[tuple[str, str], float] = {}

    async def origin(self, text: str) -> Origin:
        """What sandboxes and builds start from: a template or snapshot of this node, else one of the repository.

        Raises NotFoundError, SourceError, CorruptFileError.
        """
        try:
            found = self._saved.origin(text)
        except NotFoundError as error:
            try:
                return await self.find(text)
            except SnapshotNotFoundError:
                raise error from None
        if isinstance(found, SavedSnapshot) and found.imported:
            return await self.find(text)  # it may have another content now
        return found

    async def inherit(self, name: str | None) -> None:
        """Record what the repository has under a name that is about to get another content, so that its id stays."""
        if name is None or self._saved.find(name) is not None:
            return
        try:
            await self.find(name)
        except SnapshotNotFoundError:
            pass
        except AenvError as error:  # the name gets an id of its own then
            log.warning("the repository cannot say whether it has a name", name=name, error=str(error))

    async def delete(self, saved: SavedSnapshot) -> None:
        """Remove an imported snapshot, with all its names, for every node. Raises SourceError."""
        with contextlib.suppress(SnapshotNotFoundError):
            await remotely(self._repository.delete, saved.snapshot_id)
            self.deleted += 1
        self.forget(saved)

    def others(self) -> Iterable[SavedSnapshot]:
        """Snapshots of other nodes that the last listing of the repository had, and that are not recorded here."""
        rows = self._store.saved.rows
        return [saved for saved in self._listed if saved.id not in rows]

    async def refresh(self) -> None:
        """List the repository, and follow names of this node that others gave another content. Raises SourceError."""
        own = self._own()
        names, listed = await remotely(self._list)
        own |= self._own()
        self._listed = [saved for saved in listed if saved.snapshot_id not in own]
        for saved in list(self._store.saved.rows.values()):
            if saved.name is not None and names.get((saved.name, saved.tag), saved.snapshot_id) != saved.snapshot_id:
                await self._follow(saved.name, saved.tag)

    def _own(self) -> set[str]:
        """What this node published: listed by its own records, and not at all once those are gone."""
        return {row.snapshot_id for row in self._store.published.rows.values()}

    async def _follow(self, name: str, tag: str) -> None:
        """Two nodes saved under one name: what the repository has under it holds, for the other one as well.

        What this node has not published yet will be the newer one. The listing may be older than what it published
        since, so the repository is asked again.
        """
        key = f"{name}:{tag}"
        async with self._locks.setdefault(name, asyncio.Lock()):
            given = self._store.published.get(key)
            now = await self._resolve(name, tag)
            saved = self._saved.find(key)
            if given is None or given != self._store.published.get(key) or now == given.snapshot_id:
                return
            if saved is None or saved.imported or saved.name != name or saved.snapshot_id != given.snapshot_id:
                return
            log.info("another node saved under a name of this one", name=key, snapshot=now)
            await self._take(now, tag, instead_of=saved)

    def _list(self) -> tuple[dict[tuple[str, str], str], list[SavedSnapshot]]:
        """What each name means, and the snapshots that have one."""
        names = {(entry.name, entry.tag): entry.snapshot for entry in self._repository.names()}
        tags = {snapshot: tag for (_, tag), snapshot in names.items()}
        found = []
        for manifest in self._repository.list():
            with contextlib.suppress(CorruptFileError):
                saved = _saved(manifest, tags.get(manifest.id, catalog.DEFAULT_TAG))
                if saved.sandbox_id and manifest.id in tags:
                    found.append(saved)
        return names, found

    async def find(self, text: str) -> SavedSnapshot:
        """The snapshot that the repository has under a name or id, recorded here.

        Raises SnapshotNotFoundError, SourceError, CorruptFileError.
        """
        try:
            reference = catalog.parse(text)
        except InvalidRequestError:
            raise SnapshotNotFoundError(text[:200]) from None
        key = (reference.name, reference.tag or catalog.DEFAULT_TAG)
        async with self._locks.setdefault(reference.name, asyncio.Lock()):
            known = self._known(*key)
            if known is not None and time.monotonic() - self._checked.get(key, -FRESH) < FRESH:
                return known
            try:
                snapshot_id = await self._resolve(*key)
            except SnapshotNotFoundError:
                self.forget(known)
                raise SnapshotNotFoundError(text) from None
            except (SourceError, CorruptFileError) as error:
                if known is None:
                    raise
                log.warning("the repository cannot say what a name means; it is what it was", name=text,
                            error=str(error))  # fmt: skip
                snapshot_id = known.snapshot_id
            given = self._store.published.get(f"{key[0]}:{key[1]}")
            if given is not None and given.snapshot_id == snapshot_id:
                # This node gave the name, and is asked here because its record is gone: it will be taken back.
                raise SnapshotNotFoundError(text)
            self._checked[key] = time.monotonic()
            if known is not None and known.snapshot_id == snapshot_id:
                return known
            return await self._take(snapshot_id, key[1])

    async def _resolve(self, name: str, tag: str) -> str:
        """Raises SourceError also when the answer takes long: somebody waits for it."""
        try:
            return await asyncio.wait_for(remotely(self._repository.resolve, name, tag), ANSWER)
        except TimeoutError:
            raise SourceError(
                f"The repository did not say within {ANSWER:.0f} s whether it has {name!r}.",
                "Check the server and the network.",
            ) from None

    def forget(self, saved: SavedSnapshot | None) -> None:
        """Drop the record of an imported snapshot; sandboxes made from it go on."""
        if saved is not None and saved.imported and saved.id in self._store.saved.rows:
            with self._store.transaction():
                self._store.saved.delete(saved.id)

    def _known(self, name: str, tag: str) -> SavedSnapshot | None:
        imported = (s for s in self._store.saved.rows.values() if s.imported and s.tag == tag)
        return next((s for s in imported if name in (s.name, s.id.partition(":")[0])), None)

    async def _take(self, snapshot_id: str, tag: str, instead_of: SavedSnapshot | None = None) -> SavedSnapshot:
        """Record a snapshot of the repository. ``instead_of`` is of this node; it gives its name to the other, and is
        gone when that has its id as well.
        """
        manifest, claim = await remotely(self._repository.acquire, snapshot_id, self._owner)
        try:
            async with self._volumes.keeping(manifest.digests()):
                saved = _saved(manifest, tag)
                known = self._store.saved.get(saved.id)
                if known is not None and not known.imported and known != instead_of:
                    return known  # it is this node's own
                state = await self._fetch_state(manifest)
                with self._store.transaction():
                    if instead_of is not None and self._store.saved.get(instead_of.id) == instead_of:
                        self._store.saved.put(replace(instead_of, name=None))
                    if snapshot_id not in self._store.snapshots.rows:
                        self._record(manifest)
                    self._store.saved.put(saved)
        except BaseException:
            if snapshot_id not in self._store.snapshots.rows:
                remove(self._layout.snapshot(snapshot_id))
            raise
        finally:
            await remotely(claim.release)
        log.info("imported a snapshot", snapshot=snapshot_id, name=saved.name, state=str(state))
        return saved

    async def _fetch_state(self, manifest: Manifest) -> Path | None:
        path = self._layout.state(manifest.id)
        if manifest.state is None or manifest.id in self._store.snapshots.rows:
            return None
        with disk_errors(path.parent):
            path.parent.mkdir(mode=0o700, exist_ok=True)
        await remotely(self._repository.fetch, manifest.state, path)
        return path

    def _record(self, manifest: Manifest) -> None:
        disk, memory = put_volumes(self._store, manifest)
        self._store.snapshots.put(
            Snapshot(
                id=manifest.id,
                owner=None,
                memory_base=memory,
                delta_bytes=0,
                disk=disk,
                shape=manifest.shape,
                disk_mib=manifest.disk_mib,
                fingerprint=manifest.fingerprint,
                guest_token=manifest.guest_token,
                created_at=manifest.created_at,
                parent=manifest.parent,
                hot=used if isinstance(used := manifest.attributes.get(HOT), str) else None,
            )
        )


def _saved(manifest: Manifest, tag: str) -> SavedSnapshot:
    """Raises CorruptFileError for what this program would not have committed."""
    shape, disk, memory = manifest.shape, manifest.disk.virtual_size, manifest.memory
    fits = disk == manifest.disk_mib << 20 and (memory is None or memory.virtual_size == shape.memory_mib << 20)
    if not fits or shape.vcpus < 1 or shape.memory_mib < 1 or manifest.disk_mib < 1:
        raise CorruptFileError(
            f"Snapshot {manifest.id} of the repository says two things about its size.",
            "Another program or version committed it.",
        )
    try:
        attributes = _ATTRIBUTES.validate_python(dict(manifest.attributes))
    except ValidationError as error:
        raise CorruptFileError(
            f"Snapshot {manifest.id} of the repository does not say how to start it: {error.errors()[0]['msg']}.",
            "Another program or version committed it.",
        ) from error
    return SavedSnapshot(
        id=attributes.public_id if tag == catalog.DEFAULT_TAG else f"{attributes.public_id}:{tag}",
        name=attributes.name,
        tag=tag,
        snapshot_id=manifest.id,
        sandbox_id=attributes.sandbox_id,
        vcpus=manifest.shape.vcpus,
        memory_mib=manifest.shape.memory_mib,
        disk_mib=manifest.disk_mib,
        envd_version=attributes.envd_version,
        created_at=manifest.created_at,
        updated_at=manifest.created_at,
        env_vars=attributes.env_vars,
        default_user=attributes.default_user,
        default_workdir=attributes.default_workdir,
        imported=True,
    )
