"""Disks of images: volumes whose layers are in this node's image cache, or stay in a container registry.

To everything above, such a disk is a volume like those of the repository; only where its layers are differs, which is
on record as long as the volume is. For a converted image that is a folder ``$AENV_HOME/images/volumes/<volume>/``
with a second name for each of its layers, which keeps them in the cache; for an overlaybd-native one a file
``$AENV_HOME/images/native/<volume>`` with the image's reference and digest. Both appear by one rename before the
volume's record, and go after it.

A commit copies the layers into the repository, as they are, so that other nodes need neither cache nor registry.
"""

import asyncio
import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv.config import Settings
from aenv.errors import SourceError
from aenv.image.budget import MIB
from aenv.image.convert import Progress
from aenv.image.drives import DriveImage
from aenv.image.errors import UnsupportedImageError
from aenv.image.layerstore import LayerStore
from aenv.image.manifest import ImageConfig
from aenv.image.native import NativeImage
from aenv.image.ranged import RegistryBlobs, described
from aenv.image.reference import Reference, parse
from aenv.image.rootfs import ConvertedImage, pull_image
from aenv.image.unpacker import Unpackers
from aenv.orchestrator.firstboot import split_user
from aenv.orchestrator.store import Store
from aenv.snapshot.manifest import LayerRef, Volume
from aenv.snapshot.model import Committed, DiskLayer, is_volume, volume_id
from aenv.storage.layerd.client import LayerServer
from aenv.storage.source import FileSource, Source, check_range
from aenv.storage.stack import open_layer

SPARE = 300.0  # seconds for which a process is ready for the next conversion


@dataclass(frozen=True, slots=True)
class ImageDisk:
    """An image's root disk. ``reference`` is where its layers are read from; None: they are in the cache."""

    volume: Volume
    config: ImageConfig
    reference: Reference | None

    @property
    def prepared(self) -> bool:
        """Whether it has what the platform adds (``aenv.image.prepare``); else that is done in the guest."""
        return self.reference is None

    @property
    def user(self) -> str:
        """Whom the image's User is called in the guest that is made of it."""
        return self.config.user if self.prepared else split_user(self.config.user)[0]

    @property
    def mib(self) -> int:
        """Size of the disk, rounded up."""
        return -(-self.volume.virtual_size // MIB)


class ImageVolumes:
    """Pulls images, and stands for the layer server to ``Volumes``: it knows of each volume where its layers are."""

    def __init__(self, server: LayerServer, home: Path, settings: Settings) -> None:
        self._server = server
        self._home = home
        self._native = home / "images" / "native"
        self._converted = home / "images" / "volumes"  # see Layout.image_volume
        self._cache = LayerStore(home)
        self._settings = settings
        self._processes = Unpackers(SPARE)
        self._blobs: dict[Reference, RegistryBlobs] = {}  # each has a thread, so they are kept

    async def pull(
        self,
        image: str,
        *,
        size_mib: int,
        larger_mib: int = 0,
        credentials: tuple[str, str] | None = None,
        drives: Sequence[DriveImage] = (),
        progress: Progress = lambda text: None,
    ) -> ImageDisk:
        """The image's disk: of ``size_mib``, or ``larger_mib`` where it does not fit; a native one has its own size.

        Its layers may be collected ten minutes later unless it is ``put``. Raises ImageError, CapacityError,
        SourceError.
        """
        found = await pull_image(
            image,
            self._home,
            size_mib=size_mib,
            larger_mib=larger_mib,
            settings=self._settings,
            credentials=credentials,
            drives=drives,
            progress=progress,
            processes=self._processes,
        )
        if isinstance(found, ConvertedImage):
            layers = tuple(LayerRef(layer.digest, layer.size) for layer in found.layers)
            return ImageDisk(Volume(found.size, layers), found.config, None)
        try:
            volume = await asyncio.to_thread(volume_of, found, self._settings)
        except SourceError as error:
            if credentials is None:
                raise
            raise UnsupportedImageError(
                f"{image} is an overlaybd image, read on demand: that needs the node's own credentials. {error}",
                "Put the registry's credentials into the node's configuration.",
            ) from error
        return ImageDisk(volume, found.config, found.reference)

    def put(self, store: Store, disk: ImageDisk) -> DiskLayer:
        """Record the disk as a layer. Inside a transaction. Raises OSError."""
        name = volume_id(disk.volume)
        if name not in store.committed.rows:
            self._note(name, disk)
            store.committed.put(Committed(name, disk.volume))
        layer = DiskLayer(name, None, "raw")
        store.layers.put(layer)
        return layer

    def retain(self, names: Collection[str]) -> None:
        """Forget where the layers of other volumes are: what a crash left behind."""
        for folder in (self._native, self._converted):
            for path in folder.glob("*") if folder.exists() else ():
                if path.name not in names:
                    _remove(path)

    async def ensure_running(self) -> bool:
        return await self._server.ensure_running()

    async def export(self, name: str, volume: Volume, *, sequential: bool) -> Path:
        return await self._server.export(name, volume, sequential=sequential, repository=self._place(name))

    async def unexport(self, name: str) -> object:
        if is_volume(name):
            # Before anything else can run: a new volume of that name is recorded anew.
            _remove(self._native / name)
            _remove(self._converted / name)
        return await self._server.unexport(name)

    def origin(self, name: str) -> Callable[[LayerRef], Source] | None:
        """For ``aenv.snapshot.commit``. Blocking reads."""
        if (self._converted / name).exists():
            return lambda layer: _CachedLayer(self._cache.path(layer.digest), layer.size)
        reference = self._reference(name)
        if reference is None:
            return None
        blobs = self._blobs.get(reference)
        if blobs is None:
            blobs = self._blobs[reference] = RegistryBlobs(described(reference, self._settings))
        return lambda layer: blobs.open(layer.digest, layer.size)

    async def close(self) -> None:
        await self._processes.close()

    def _note(self, name: str, disk: ImageDisk) -> None:
        """From now on the volume is read from there."""
        folder = self._converted if disk.reference is None else self._native
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = folder / f".{name}.{uuid.uuid4().hex[:8]}"
        try:
            if disk.reference is not None:
                temporary.write_text(str(disk.reference))
                temporary.replace(folder / name)
            elif not (folder / name).exists():
                temporary.mkdir(mode=0o700)
                for digest in {layer.digest for layer in disk.volume.layers}:
                    os.link(self._cache.path(digest), temporary / digest.partition(":")[2])
                temporary.rename(folder / name)
        finally:
            _remove(temporary)

    def _place(self, name: str) -> dict[str, Any] | None:
        """For the layer server; None: the repository."""
        if (self._converted / name).exists():
            return {"backend": "posix_fs", "path": str(self._cache.root.parent)}
        reference = self._reference(name)
        return None if reference is None else described(reference, self._settings)

    def _reference(self, name: str) -> Reference | None:
        with contextlib.suppress(FileNotFoundError):
            return parse((self._native / name).read_text())
        return None


def volume_of(image: NativeImage, settings: Settings) -> Volume:
    """As large as the top layer says. Blocking; reads that layer's header and index only.

    Raises SourceError, CorruptFileError.
    """
    layers = tuple(LayerRef(layer.digest, layer.size or 0) for layer in image.layers)
    blobs = RegistryBlobs(described(image.reference, settings))
    try:
        top = open_layer(blobs.open(layers[-1].digest, layers[-1].size))
    finally:
        blobs.close()
    return Volume(top.virtual_size, layers)


class _CachedLayer:
    """A layer's file, opened for each read: whoever copies it closes nothing."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self.size = size

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, self._path)
        with FileSource(self._path) as file:
            return file.read(offset, length)


def _remove(path: Path) -> None:
    if path.is_dir():
        # Out of the way first: half of it must not be taken for the whole.
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        path.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
