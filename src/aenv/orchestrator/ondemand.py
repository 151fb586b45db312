"""Disks of overlaybd-native images: volumes whose layers stay in a container registry and are read from there.

To everything above, such a disk is a volume like those of the repository; only where its layers are differs, which is
on record in ``$AENV_HOME/images/native/<volume>`` (the image's reference, with its digest) as long as the volume is.
A commit copies the layers into the repository, as they are, so that other nodes need not know the registry.
"""

import contextlib
import uuid
from collections.abc import Callable
from pathlib import Path

from aenv.config import Settings
from aenv.image.native import NativeImage
from aenv.image.ranged import RegistryBlobs, described
from aenv.image.reference import Reference, parse
from aenv.snapshot.manifest import LayerRef, Volume
from aenv.snapshot.model import is_volume
from aenv.storage.layerd.client import LayerServer
from aenv.storage.source import Source
from aenv.storage.stack import open_layer


class ImageVolumes:
    """The layer server as ``Volumes`` asks it, which knows of each volume where its layers are."""

    def __init__(self, server: LayerServer, home: Path, settings: Settings) -> None:
        self._server = server
        self._folder = home / "images" / "native"
        self._settings = settings
        self._blobs: dict[Reference, RegistryBlobs] = {}  # each has a thread, so they are kept

    async def ensure_running(self) -> bool:
        return await self._server.ensure_running()

    async def export(self, name: str, volume: Volume, *, sequential: bool) -> Path:
        reference = self._find(name)
        repository = None if reference is None else described(reference, self._settings)
        return await self._server.export(name, volume, sequential=sequential, repository=repository)

    async def unexport(self, name: str) -> object:
        if is_volume(name):
            # Before anything else can run: a new volume of that name is recorded anew.
            (self._folder / name).unlink(missing_ok=True)
        return await self._server.unexport(name)

    def note(self, name: str, reference: Reference) -> None:
        """From now on the volume is read from the image's repository in its registry."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{name}.{uuid.uuid4().hex[:8]}"
        temporary.write_text(str(reference))
        temporary.replace(self._folder / name)

    def origin(self, name: str) -> Callable[[LayerRef], Source] | None:
        """For ``aenv.snapshot.commit``. Blocking reads."""
        reference = self._find(name)
        if reference is None:
            return None
        blobs = self._blobs.get(reference)
        if blobs is None:
            blobs = self._blobs[reference] = RegistryBlobs(described(reference, self._settings))
        return lambda layer: blobs.open(layer.digest, layer.size)

    def _find(self, name: str) -> Reference | None:
        with contextlib.suppress(FileNotFoundError):
            return parse((self._folder / name).read_text())
        return None


def volume_of(image: NativeImage, settings: Settings) -> Volume:
    """The image's disk: as large as its top layer says. Blocking; reads that layer's header and index only.

    Raises SourceError, CorruptFileError.
    """
    layers = tuple(LayerRef(layer.digest, layer.size or 0) for layer in image.layers)
    blobs = RegistryBlobs(described(image.reference, settings))
    try:
        top = open_layer(blobs.open(layers[-1].digest, layers[-1].size))
    finally:
        blobs.close()
    return Volume(top.virtual_size, layers)
