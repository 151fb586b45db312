"""An image reference in, the layers of a root disk and the image's configuration out.

``$AENV_HOME/images``: ``blobs/`` (see ``store``), ``layers/`` and ``chains/`` (see ``layerstore``),
``rootfs/<digest>-<MiB>-….json`` (converted images by the digest of their manifest: layers and configuration),
``work/`` (what a crash left there is removed by the next pull) and ``locks/``.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from aenv.config import Settings
from aenv.image.budget import MIB, no_space
from aenv.image.chain import CONVERTED, layer_id
from aenv.image.convert import Conversion, Progress, SourceLayer
from aenv.image.drives import DriveImage
from aenv.image.errors import ImageTooLargeError, RegistryForbiddenError, UnsupportedImageError
from aenv.image.gc import collect
from aenv.image.layerstore import Hold, LayerStore, StoredLayer, read_record, write_record
from aenv.image.locks import locked
from aenv.image.manifest import ImageConfig
from aenv.image.native import NativeImage, is_native
from aenv.image.prepare import VERSION
from aenv.image.reference import Reference, parse
from aenv.image.registry import RegistryClient
from aenv.image.remote import Downloads, find
from aenv.image.sources import Layer, LocalSource, file_digest, identity, open_local, parse_local
from aenv.image.unpacker import Unpackers
from aenv.image.workspace import workspace

LOCAL_SCHEMES = ("oci", "docker-archive", "tar")
_TUPLES = ("entrypoint", "cmd", "shell", "exposed_ports", "volumes")


@dataclass(frozen=True, slots=True)
class ConvertedImage:
    """A disk of ``size`` bytes whose layers, from the bottom up, are in the cache (``aenv.image.layerstore``).

    They are nobody's: name them within ten minutes (``gc.MIN_AGE_S``), never write to them.
    """

    config: ImageConfig
    layers: tuple[StoredLayer, ...]
    size: int


async def pull_image(
    reference: str,
    home: Path,
    *,
    size_mib: int,
    settings: Settings,
    larger_mib: int = 0,
    credentials: tuple[str, str] | None = None,
    progress: Progress = lambda text: None,
    allow_local: bool = False,
    drives: Sequence[DriveImage] = (),
    processes: Unpackers | None = None,
) -> ConvertedImage | NativeImage:
    """The image as an ext4 file system on a disk of ``size_mib`` MiB, and its configuration. Needs root.

    Where it does not fit, and ``larger_mib`` is larger, the disk has that size.

    It is made once for each manifest and size; then a tag costs one request, and a digest none. Layers that other
    images have made are used. Of an overlaybd-native image nothing but its description is fetched. ``credentials``
    (user name, password) go to the registry of the reference. With ``allow_local``, ``oci:PATH``,
    ``docker-archive:PATH`` and ``tar:PATH`` name files of this machine: never allow that to whoever may not read
    its files. ``drives`` are images whose files are put into folders of it. ``processes`` does the work.

    Raises ImageError and its kinds, CapacityError.
    """
    # What users pull may be private to them.
    (home / "images").mkdir(mode=0o700, parents=True, exist_ok=True)
    sizes = (size_mib, larger_mib) if larger_mib > size_mib else (size_mib,)
    own = Unpackers()
    maker = _Maker(home, sizes, settings, progress, processes or own)
    try:
        scheme, _, rest = reference.partition(":")
        if scheme in LOCAL_SCHEMES and not allow_local and "/" in rest:
            # Whether there is such a file is nobody's business.
            raise RegistryForbiddenError(
                f"{reference!r} names a file of the node, which is not allowed here.", "Push the image to a registry."
            )
        if scheme in LOCAL_SCHEMES and allow_local and (local := parse_local(reference)) is not None:
            return await _from_local(local, maker)
        return await _from_registry(parse(reference), maker, credentials, drives)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_space(home) from error
        raise
    finally:
        await asyncio.shield(asyncio.to_thread(collect, home, settings.image_cache * MIB))
        await asyncio.shield(own.close())


Work = Callable[[Conversion, int], Awaitable[tuple[ImageConfig, Hold]]]


@dataclass(frozen=True, slots=True)
class _Maker:
    """How one pull converts. ``sizes``, in MiB, are those to be tried, the smaller first."""

    home: Path
    sizes: tuple[int, ...]
    settings: Settings
    progress: Progress
    processes: Unpackers

    async def make(self, digest: str, work: Work, variant: Sequence[str] = ()) -> ConvertedImage:
        """The converted image, by ``work`` unless it is cached. ``variant``: what else it depends on."""
        name = digest.partition(":")[2]
        if variant:
            name += "-v" + hashlib.sha256("\n".join(variant).encode()).hexdigest()[:32]
        for size in self.sizes:
            if (known := self._cached(name, size)) is not None:
                return known
        for size in self.sizes[:-1]:
            try:
                return await self._make(name, size, work)
            except ImageTooLargeError:
                self.progress(f"it does not fit {size} MiB; converting it to {self.sizes[-1]} MiB")
        return await self._make(name, self.sizes[-1], work)

    async def _make(self, name: str, size: int, work: Work) -> ConvertedImage:
        target = self._record(name, size)
        async with locked(self.home / "images" / "locks" / target.stem):
            if (known := self._cached(name, size)) is not None:
                return known
            async with Conversion(self.home, size, self.settings, self.progress, self.processes) as conversion:
                config, hold = await work(conversion, size)
                # As a sandbox follows it: its user has a name.
                config = replace(config, user=hold.user)
                await asyncio.to_thread(write_record, target, hold.layers, config=asdict(config))
                return ConvertedImage(config, hold.layers, size * MIB)

    def _cached(self, name: str, size: int) -> ConvertedImage | None:
        """Marks its layers as used."""
        target = self._record(name, size)
        record = read_record(target)
        hold = LayerStore(self.home).hold(record[0]) if record is not None else None
        if hold is None:
            return None
        with hold:
            try:
                value = json.loads(target.read_bytes())["config"]
                fields: dict[str, Any] = {k: tuple(item) if k in _TUPLES else item for k, item in value.items()}
                return ConvertedImage(ImageConfig(**fields), hold.layers, size * MIB)
            except (OSError, ValueError, TypeError, KeyError):
                return None

    def _record(self, name: str, size: int) -> Path:
        return self.home / "images" / "rootfs" / f"{name}-{size}-c{CONVERTED}-p{VERSION}.json"


async def _from_local(source: LocalSource, maker: _Maker) -> ConvertedImage:
    digest = await identity(source)

    async def work(conversion: Conversion, size: int) -> tuple[ImageConfig, Hold]:
        async with workspace(maker.home) as folder:
            maker.progress(f"reading {source.described}")
            config, layers = await open_local(source, digest, folder, conversion.unpacker)
            found = [
                SourceLayer(layer_id(layer.diff_id, await _digest(layer), whiteouts=layer.whiteouts),
                            layer.diff_id, layer.whiteouts)
                for layer in layers
            ]  # fmt: skip
            return config, await conversion.run(found, _Files(layers), config)

    return await maker.make(digest, work)


async def _digest(layer: Layer) -> str:
    """Of its file, where nothing else names it that is verified."""
    if layer.diff_id is not None and layer.diff_id.startswith("sha256:") and layer.whiteouts:
        return layer.diff_id
    return await asyncio.to_thread(file_digest, layer.path)


async def _from_registry(
    reference: Reference, maker: _Maker, credentials: tuple[str, str] | None, drives: Sequence[DriveImage]
) -> ConvertedImage | NativeImage:
    settings = maker.settings
    async with RegistryClient(settings, credentials) as client:
        image = await find(client, maker.home, reference, settings)
        if is_native(image.manifest):
            if drives:
                raise UnsupportedImageError(
                    f"{image.reference} is an overlaybd image, to whose disk no drives can be added.",
                    "Use the image that it was converted from.",
                )
            at = replace(image.reference, digest=image.digest)
            return NativeImage(at, await image.config(), image.manifest.layers)
        await image.note()
        attached = []
        for drive in drives:
            found = await find(client, maker.home, parse(drive.image), settings)
            if is_native(found.manifest):
                raise UnsupportedImageError(
                    f"{found.reference} is an overlaybd image, which cannot be a drive.",
                    "Use the image that it was converted from.",
                )
            await found.note()
            attached.append((drive, found))

        async def work(conversion: Conversion, size: int) -> tuple[ImageConfig, Hold]:
            config = await image.config()
            async with Downloads(image, size, settings, maker.progress) as downloads:
                await conversion.run(await image.layers(), downloads, config)
            for drive, found in attached:
                async with Downloads(found, size, settings, maker.progress) as downloads:
                    await conversion.attach(drive, await found.layers(), downloads)
            return config, conversion.hold

        variant = [f"{found.digest} {drive.path} {drive.folder}" for drive, found in attached]
        return await maker.make(image.digest, work, variant)


class _Files:
    """Archives of a local image."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def start(self, first: int) -> None:
        pass

    async def apply(self, number: int, unpack: Callable[[Path], Awaitable[None]]) -> None:
        await unpack(self._layers[number].path)
