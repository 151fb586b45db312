"""Committing a local snapshot: its files become layers, the layers go to the repository, and a manifest names them.

Only what no layer holds yet is read. What is committed of local objects is on record (``Committed``): of a disk, all
below the first layer that is; of a memory, its base, or a former snapshot of the same sandbox, and then the new layer
is the difference of the two. A layer is compressed (ZFile) and named by its digest, so that committing again what
a crash broke off stores nothing twice.

Blocking; runs in a worker thread while the sandbox goes on, and reads only files that are frozen.
"""

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from aenv.errors import CorruptFileError, NotFoundError
from aenv.snapshot.manifest import LayerRef, Manifest, Volume
from aenv.snapshot.model import Committed, DiskLayer, Snapshot, is_volume
from aenv.snapshot.repository import Claim, Repository
from aenv.snapshot.shared import file_digest
from aenv.storage import layers, zfile
from aenv.storage.fetching import FetchPolicy, fetch
from aenv.storage.lsmt import disk_errors
from aenv.storage.source import FileSource, Source
from aenv.storage.stack import LayerView, Stack, open_layer

MAX_DEPTH = 64  # layers of a volume beyond which a new one replaces several: far from the format's 255
MIB = 1 << 20
_PIECE = 4 * MIB

# Where the layers of a volume are that is read from elsewhere than the repository; None: it is not.
Origins = Callable[[str], Callable[[LayerRef], Source] | None]


@dataclass(frozen=True, slots=True)
class LocalMemory:
    """A snapshot's memory on this node: a base file and, over it, perhaps a delta."""

    snapshot_id: str
    base_id: str
    base: Path
    delta: Path | None


@dataclass(frozen=True, slots=True)
class CommitSource:
    """What one commit reads. Nothing in it may change or go while it runs."""

    snapshot: Snapshot
    disk: Sequence[tuple[DiskLayer, Path]]  # top first, down to the base
    memory: LocalMemory | None
    state: Path | None
    parent: LocalMemory | None  # of the snapshot before it, when that is committed and still here
    committed: Mapping[str, Volume]  # by id of a local object
    attributes: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class CommitResult:
    """``committed``: what is known now of local objects. ``layers`` and ``bytes`` are new in the repository."""

    manifest: Manifest
    committed: tuple[Committed, ...]
    layers: int
    bytes: int


class Committer:
    def __init__(
        self, repository: Repository, workspace: Path, owner: str, origins: Origins = lambda name: None
    ) -> None:
        """``workspace`` is a folder for unfinished layers, on a disk with room for them; ``owner`` names the node."""
        self._origins = origins
        self._flat: dict[Volume, Volume] = {}  # deep volumes, and what was committed in their place
        self._repository = repository
        self._workspace = workspace
        self._owner = owner

    def commit(self, source: CommitSource) -> CommitResult:
        """Idempotent. When it returns, the snapshot is in the repository whole; when it raises, it is not seen there.

        Raises SourceError, CapacityError, CorruptFileError, and NotFoundError when a layer of a volume that is read
        on demand is gone.
        """
        try:
            return self._commit(source, source.committed)
        except NotFoundError:
            # Layers that were committed once are gone from the repository. What is here is enough to write them anew.
            kept = {name: volume for name, volume in source.committed.items() if self._whole(volume)}
            return self._commit(source, kept)

    def _commit(self, source: CommitSource, known: Mapping[str, Volume]) -> CommitResult:
        folder = self._workspace / uuid.uuid4().hex
        with disk_errors(folder):
            folder.mkdir(mode=0o700, parents=True)
        snapshot = source.snapshot
        try:
            with self._repository.claim((), self._owner) as claim:
                work = _Work(self._repository, claim, folder, known, self._flat, self._origins)
                disk = work.disk(source)
                memory = work.memory(source) if source.memory is not None else None
                state = work.store(source.state) if source.state is not None else None
                manifest = Manifest(
                    id=snapshot.id,
                    created_at=snapshot.created_at,
                    parent=snapshot.parent,
                    disk=disk,
                    memory=memory,
                    state=state,
                    shape=snapshot.shape,
                    disk_mib=snapshot.disk_mib,
                    fingerprint=snapshot.fingerprint,
                    guest_token=snapshot.guest_token,
                    attributes=dict(source.attributes),
                )
                claim.add(manifest.digests())
                self._repository.commit(manifest, claim=claim)
            found = tuple(Committed(name, volume) for name, volume in work.made.items())
            return CommitResult(manifest, found, work.layers, work.bytes)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _whole(self, volume: Volume) -> bool:
        return all(self._repository.has_layer(layer.digest) for layer in volume.layers)


class _Work:
    """One commit: ``made`` are the volumes that it found, by id of the local object."""

    def __init__(
        self,
        repository: Repository,
        claim: Claim,
        folder: Path,
        known: Mapping[str, Volume],
        flat: dict[Volume, Volume],
        origins: Origins,
    ) -> None:
        self._flat = flat
        self._origins = origins
        self._repository = repository
        self._claim = claim
        self._folder = folder
        self._known = known
        self._count = 0
        self.made: dict[str, Volume] = {}
        self.layers = self.bytes = 0

    def disk(self, source: CommitSource) -> Volume:
        """The volume of the disk as the snapshot's frozen layer shows it."""
        size = source.snapshot.disk_mib * MIB
        new = []
        volume = Volume(size, ())
        for layer, path in source.disk:
            if layer.id in self._known:
                volume = self._known[layer.id]
                self._bring(layer.id, volume)
                break
            new.append((layer, path))
        if len(volume.layers) + len(new) > MAX_DEPTH:
            return self._flat_disk(source, size)
        for layer, path in reversed(new):
            out = self._scratch()
            if layer.format == "raw":
                layers.from_flat(path, out)
            else:
                layers.from_qcow2(path, out)
            volume = Volume(size, (*volume.layers, self._compressed(out)))
            self.made[layer.id] = volume
        return Volume(size, volume.layers)

    def _flat_disk(self, source: CommitSource, size: int) -> Volume:
        """The disk's base, and one layer with all that is over it here: a volume that grew deep is shallow again."""
        *over, (base, path) = source.disk
        bottom = self._known.get(base.id)
        if bottom is None:
            out = self._scratch()
            layers.from_flat(path, out)
            bottom = self.made[base.id] = Volume(size, (self._compressed(out),))
        with ExitStack() as stack:
            views = []
            for _, file in reversed(over):
                out = self._scratch()
                layers.from_qcow2(file, out)
                views.append(open_layer(stack.enter_context(FileSource(out))))
            merged = self._scratch()
            layers.compact(views, merged, bottom=False, virtual_size=size)
        shallow = self._shallow(bottom)
        volume = self.made[source.disk[0][0].id] = Volume(size, (*shallow.layers, self._compressed(merged)))
        return volume

    def memory(self, source: CommitSource) -> Volume:
        memory, size = source.memory, source.snapshot.shape.memory_mib * MIB
        assert memory is not None
        if (done := self._known.get(memory.snapshot_id)) is not None:
            return done
        bottom = self._known.get(memory.base_id)
        if bottom is None:
            out = self._scratch()
            layers.from_flat(memory.base, out)
            bottom = self.made[memory.base_id] = Volume(size, (self._compressed(out),))
        if memory.delta is None:
            volume = bottom
        else:
            volume = self._incremental(memory, source.parent, size) or Volume(
                size, (*self._shallow(bottom).layers, self._compressed(memory.delta))
            )
        self.made[memory.snapshot_id] = volume
        return volume

    def _incremental(self, memory: LocalMemory, parent: LocalMemory | None, size: int) -> Volume | None:
        """What differs from the snapshot before it, over the layers of that; None when this is no gain."""
        below = self._known.get(parent.snapshot_id) if parent is not None else None
        if parent is None or below is None or len(below.layers) >= MAX_DEPTH:
            return None
        if is_volume(memory.base_id) or is_volume(parent.base_id):
            return None  # to compare would read a base from the repository
        if parent.delta is None and parent.base_id == memory.base_id:
            return None  # the delta is the difference
        out = self._scratch()
        with ExitStack() as stack:
            old, new = (_memory_stack(stack, each, size) for each in (parent, memory))
            layers.difference(old, new, out)
        return Volume(size, (*below.layers, self._compressed(out)))

    def _shallow(self, volume: Volume) -> Volume:
        """A volume itself, or one that reads the same with one layer in place of all over its lowest.

        Snapshots that go from node to node get deep: nothing of them is here to be merged, so layers are fetched.
        """
        if len(volume.layers) < MAX_DEPTH:
            return volume
        if (done := self._flat.get(volume)) is None or not self._holds(done):
            lowest, *over = volume.layers
            self._claim.add(layer.digest for layer in over)
            with ExitStack() as stack:
                views = []
                for ref in over:
                    path = self._scratch()
                    self._repository.fetch(ref, path)
                    views.append(open_layer(stack.enter_context(FileSource(path)), ref.digest))
                merged = self._scratch()
                layers.compact(views, merged, bottom=False, virtual_size=volume.virtual_size)
            done = self._flat[volume] = Volume(volume.virtual_size, (lowest, self._compressed(merged)))
        return done

    def _holds(self, volume: Volume) -> bool:
        """Whether the repository has all its layers, and keeps them."""
        self._claim.add(layer.digest for layer in volume.layers)
        return all(self._repository.has_layer(layer.digest) for layer in volume.layers)

    def _compressed(self, path: Path) -> LayerRef:
        out = self._scratch()
        zfile.write_zfile(path, out)
        return self.store(out)

    def _bring(self, name: str, volume: Volume) -> None:
        """Copy a volume's layers into the repository, as they are, when it is read from elsewhere."""
        opener = self._origins(name)
        if opener is None:
            return
        for ref in volume.layers:
            self._claim.add([ref.digest])
            if self._repository.has_layer(ref.digest):
                continue
            path, source = self._scratch(), opener(ref)
            with disk_errors(path), path.open("wb") as file:
                for at in range(0, ref.size, _PIECE):
                    file.write(fetch(source, at, min(_PIECE, ref.size - at), FetchPolicy()))
            if file_digest(path) != ref.digest:
                raise CorruptFileError(f"What was fetched as {ref.digest} has another digest.")
            self.store(path)
            path.unlink()

    def store(self, path: Path) -> LayerRef:
        """Put a file into the repository under a claim that was there before it."""
        digest = file_digest(path)
        self._claim.add([digest])
        if not self._repository.has_layer(digest):
            self.layers, self.bytes = self.layers + 1, self.bytes + path.stat().st_size
        return self._repository.put_layer(path, digest)

    def _scratch(self) -> Path:
        self._count += 1
        return self._folder / str(self._count)


def _memory_stack(stack: ExitStack, memory: LocalMemory, size: int) -> Stack:
    base = layers.flat_view(stack.enter_context(FileSource(memory.base)), ("base", memory.base_id))
    views: list[LayerView] = [base]
    if memory.delta is not None:
        views.append(open_layer(stack.enter_context(FileSource(memory.delta)), ("delta", memory.snapshot_id)))
    return Stack(views, size)
