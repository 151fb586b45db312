"""A saved snapshot's root file system as an image in a registry: its layers as they are, and a manifest over them.

The image is overlaybd-native (``aenv.image.native``), so it is started on demand. A layer that is committed is pushed
as it is in the repository, under the same digest, so what the registry has already is not sent again; what is not
committed yet is compressed here.

Of a snapshot with memory the guest's disk lacks what its page cache holds: it is run for a moment to write that out.
"""

import asyncio
import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aenv.errors import NotFoundError, SnapshotNotFoundError
from aenv.image.manifest import OCI_CONFIG, OCI_MANIFEST
from aenv.image.native import BLOB_DIGEST, BLOB_SIZE, FILE_SYSTEM, FORMAT_VERSION, VERSION
from aenv.image.push import RegistryWriter, target
from aenv.image.reference import Reference
from aenv.orchestrator.capacity import Capacity
from aenv.orchestrator.model import SavedSnapshot
from aenv.orchestrator.ondemand import ImageVolumes
from aenv.snapshot.manifest import LayerRef, Volume
from aenv.snapshot.model import DiskLayer, Snapshot
from aenv.snapshot.reachability import chain
from aenv.snapshot.repository import Repository
from aenv.snapshot.shared import file_digest
from aenv.storage import layers, zfile
from aenv.storage.source import FileSource, Source
from aenv.template.machine import Pins, Workshop

_LAYER = "application/vnd.oci.image.layer.v1.tar"  # what overlaybd's converter calls its layers


@dataclass(frozen=True, slots=True)
class PublishedImage:
    """``pushed_layers`` and ``pushed_bytes`` are those that the registry did not have."""

    reference: Reference
    digest: str
    layers: int
    pushed_layers: int
    pushed_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    """One layer of the image: a file made here, or what a volume is made of."""

    digest: str
    size: int
    file: Path | None = None


class ImageExport:
    def __init__(
        self, workshop: Workshop, repository: Repository, on_demand: ImageVolumes, capacity: Capacity
    ) -> None:
        self._workshop = workshop
        self._repository = repository
        self._on_demand = on_demand
        self._capacity = capacity

    async def publish(
        self, saved: SavedSnapshot, image: str, login: tuple[str, str] | None = None, *, environment: bool = False
    ) -> PublishedImage:
        """Push ``saved`` to ``image``. ``environment``: with its variables, which may be secrets; else PATH alone.

        Raises ImageError and its kinds, SnapshotNotFoundError, SourceError, CapacityError, IncompatibleSnapshotError.
        """
        workshop, reference = self._workshop, target(image)
        snapshot = workshop.store.snapshots.get(saved.snapshot_id)
        if snapshot is None:
            raise SnapshotNotFoundError(saved.id)
        pins = Pins(workshop.checkpoints)
        pins.add(snapshot.id)
        work = workshop.layout.commits / uuid.uuid4().hex
        settled: DiskLayer | None = None
        try:
            work.mkdir(mode=0o700)
            if snapshot.has_memory:
                settled = await self._settle(snapshot, pins)
            async with RegistryWriter(workshop.settings, login) as writer:
                return await self._push(writer, reference, saved, snapshot, settled, work, environment)
        finally:
            pins.release()
            if settled is not None:
                workshop.layout.layer(settled).unlink(missing_ok=True)
            await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)

    async def _settle(self, snapshot: Snapshot, pins: Pins) -> DiskLayer:
        self._capacity.take(1)
        try:
            return await self._workshop.settled(snapshot, pins)
        finally:
            self._capacity.give_back()

    async def _push(
        self,
        writer: RegistryWriter,
        reference: Reference,
        saved: SavedSnapshot,
        snapshot: Snapshot,
        settled: DiskLayer | None,
        work: Path,
        environment: bool,
    ) -> PublishedImage:
        workshop = self._workshop
        below = chain(workshop.store.layers.rows, snapshot.disk)
        with workshop.checkpoints.files.reading(below):
            base, parts = await self._parts([settled, *below] if settled is not None else below, work)
            sent = [await self._push_part(writer, reference, part, base) for part in parts]
        config = json.dumps(_config(saved, parts, environment=environment)).encode()
        await writer.push(reference, _digest(config), _Bytes(config))
        manifest = json.dumps(_manifest(config, parts)).encode()
        await writer.put_manifest(reference, manifest, OCI_MANIFEST)
        pushed = [part for part, was_sent in zip(parts, sent, strict=True) if was_sent]
        return PublishedImage(
            reference, _digest(manifest), len(parts), len(pushed), sum(part.size for part in pushed)
        )

    async def _parts(self, disk: Sequence[DiskLayer], work: Path) -> tuple[str, list[_Part]]:
        """The id of the local object that is committed, and the image's layers, bottom first. ``disk``: top first."""
        committed, new = self._workshop.store.committed, list[DiskLayer]()
        base, volume = "", Volume(0, ())
        for layer in disk:
            if (row := committed.get(layer.id)) is not None:
                base, volume = row.id, row.volume
                break
            new.append(layer)
        parts = [_Part(ref.digest, ref.size) for ref in volume.layers]
        for layer in reversed(new):
            made = await _in_thread(self._compress, layer, work)
            parts.append(made)
        return base, parts

    def _compress(self, layer: DiskLayer, work: Path) -> _Part:
        plain, path = work / "plain", work / layer.id
        source = self._workshop.layout.layer(layer)
        if layer.format == "raw":
            layers.from_flat(source, plain)
        else:
            layers.from_qcow2(source, plain)
        zfile.write_zfile(plain, path)
        plain.unlink()
        return _Part(file_digest(path), path.stat().st_size, path)

    async def _push_part(self, writer: RegistryWriter, reference: Reference, part: _Part, base: str) -> bool:
        if await writer.has(reference, part.digest):
            return False
        with self._open(part, base) as source:
            return await writer.push(reference, part.digest, source)

    @contextmanager
    def _open(self, part: _Part, base: str) -> Iterator[Source]:
        if part.file is not None:
            with FileSource(part.file) as file:
                yield file
            return
        ref = LayerRef(part.digest, part.size)
        elsewhere = self._on_demand.origin(base)
        try:
            opened = self._repository.open_layer(ref)
        except NotFoundError:
            if elsewhere is None:
                raise
            yield elsewhere(ref)
            return
        with closing(opened):
            yield opened


async def _in_thread(work: Any, *arguments: object) -> _Part:
    """A thread cannot be cancelled, and reads files that must stay until it has ended."""
    task = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        made: _Part = await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
    return made


class _Bytes:
    """A small document as a source."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        return self._data[offset : offset + length]


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _config(saved: SavedSnapshot, parts: Sequence[_Part], *, environment: bool) -> dict[str, Any]:
    variables = [f"{name}={text}" for name, text in saved.env_vars.items() if environment or name == "PATH"]
    config = {"Env": variables, "User": saved.default_user, "WorkingDir": saved.default_workdir or ""}
    return {
        "created": datetime.now(UTC).isoformat(),
        "os": "linux",
        "architecture": "amd64",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [part.digest for part in parts]},
    }


def _manifest(config: bytes, parts: Sequence[_Part]) -> dict[str, Any]:
    return {
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": {"mediaType": OCI_CONFIG, "digest": _digest(config), "size": len(config)},
        "layers": [
            {
                "mediaType": _LAYER,
                "digest": part.digest,
                "size": part.size,
                "annotations": {
                    BLOB_DIGEST: part.digest,
                    BLOB_SIZE: str(part.size),
                    VERSION: FORMAT_VERSION,
                    FILE_SYSTEM: "ext4",
                },
            }
            for part in parts
        ],
    }
