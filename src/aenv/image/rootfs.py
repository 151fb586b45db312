"""An image reference in, the layers of a root disk and the image's configuration out.

``$AENV_HOME/images``: ``blobs/`` (see ``store``), ``layers/`` and ``chains/`` (see ``layerstore``),
``rootfs/<digest>-<MiB>-….json`` (converted images by the digest of their manifest: layers and configuration),
``work/`` (what a crash left there is removed by the next pull) and ``locks/``.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aenv.config import Settings
from aenv.errors import CapacityError
from aenv.image.budget import MIB
from aenv.image.chain import CONVERTED, layer_id
from aenv.image.convert import Conversion, SourceLayer, workspace
from aenv.image.endpoints import check_allowed
from aenv.image.errors import (
    ArchiveError,
    DigestMismatchError,
    ImageNotFoundError,
    ImageTooLargeError,
    RegistryForbiddenError,
    RegistryUnauthorizedError,
)
from aenv.image.gc import collect
from aenv.image.inventory import note
from aenv.image.layerstore import Hold, LayerStore, StoredLayer, read_record, write_record
from aenv.image.locks import locked
from aenv.image.manifest import (
    ImageConfig,
    MalformedImageError,
    Manifest,
    diff_ids,
    document,
    image_config,
    is_index,
    manifest,
    select,
)
from aenv.image.native import NativeImage, is_native
from aenv.image.prepare import VERSION
from aenv.image.reference import Reference, candidates, parse
from aenv.image.registry import RegistryClient
from aenv.image.sources import Layer, LocalSource, file_digest, identity, open_local, parse_local
from aenv.image.store import BlobStore, Lease
from aenv.image.unpacker import Unpackers

Progress = Callable[[str], None]
_PROGRESS_S = 2.0
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
    processes: Unpackers | None = None,
) -> ConvertedImage | NativeImage:
    """The image as an ext4 file system on a disk of ``size_mib`` MiB, and its configuration. Needs root.

    Where it does not fit, and ``larger_mib`` is larger, the disk has that size.

    It is made once for each manifest and size; then a tag costs one request, and a digest none. Layers that other
    images have made are used. Of an overlaybd-native image nothing but its description is fetched. ``credentials``
    (user name, password) go to the registry of the reference. With ``allow_local``, ``oci:PATH``,
    ``docker-archive:PATH`` and ``tar:PATH`` name files of this machine: never allow that to whoever may not read
    its files. ``processes`` does the work.

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
        return await _from_registry(parse(reference), maker, credentials)
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

    async def make(self, digest: str, work: Work) -> ConvertedImage:
        """The converted image, by ``work`` unless it is cached."""
        for size in self.sizes:
            if (known := self._cached(digest, size)) is not None:
                return known
        for size in self.sizes[:-1]:
            try:
                return await self._make(digest, size, work)
            except ImageTooLargeError:
                self.progress(f"it does not fit {size} MiB; converting it to {self.sizes[-1]} MiB")
        return await self._make(digest, self.sizes[-1], work)

    async def _make(self, digest: str, size: int, work: Work) -> ConvertedImage:
        target = self._record(digest, size)
        async with locked(self.home / "images" / "locks" / target.stem):
            if (known := self._cached(digest, size)) is not None:
                return known
            async with Conversion(self.home, size, self.settings, self.progress, self.processes) as conversion:
                config, hold = await work(conversion, size)
                # As a sandbox follows it: its user has a name.
                config = replace(config, user=hold.user)
                await asyncio.to_thread(write_record, target, hold.layers, config=asdict(config))
                return ConvertedImage(config, hold.layers, size * MIB)

    def _cached(self, digest: str, size: int) -> ConvertedImage | None:
        """Marks its layers as used."""
        target = self._record(digest, size)
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

    def _record(self, digest: str, size: int) -> Path:
        name = f"{digest.partition(':')[2]}-{size}-c{CONVERTED}-p{VERSION}.json"
        return self.home / "images" / "rootfs" / name


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
    reference: Reference, maker: _Maker, credentials: tuple[str, str] | None
) -> ConvertedImage | NativeImage:
    store, settings = BlobStore(maker.home), maker.settings
    async with RegistryClient(settings, credentials) as client:
        found, digest, parsed = await _resolve(
            client, store, candidates(reference, settings.registry_search), settings
        )
        if is_native(parsed):
            value = await _config(client, store, found, parsed)
            return NativeImage(replace(found, digest=digest), image_config(value, digest), parsed.layers)
        used = [parsed.config.digest, *(layer.digest for layer in parsed.layers)]
        await asyncio.to_thread(note, maker.home, digest, str(found), used)

        async def work(conversion: Conversion, size: int) -> tuple[ImageConfig, Hold]:
            value = await _config(client, store, found, parsed)
            config, ids = image_config(value, digest), diff_ids(value)
            if len(ids) != len(parsed.layers):
                raise MalformedImageError("The manifest and the configuration differ in the number of layers.")
            layers = [
                SourceLayer(layer_id(diff_id, layer.digest), diff_id)
                for layer, diff_id in zip(parsed.layers, ids, strict=True)
            ]
            async with _Downloads(client, store, found, parsed, maker, size) as downloads:
                return config, await conversion.run(layers, downloads, config)

        return await maker.make(digest, work)


async def _config(client: RegistryClient, store: BlobStore, found: Reference, parsed: Manifest) -> dict[str, Any]:
    data = store.get(parsed.config.digest) or await client.document(found, parsed.config)
    await asyncio.to_thread(store.put, data, parsed.config.digest)
    return document(data, "image's configuration")


async def _resolve(
    client: RegistryClient, store: BlobStore, names: list[Reference], settings: Settings
) -> tuple[Reference, str, Manifest]:
    """The first of ``names`` that exists, with digest and content of its manifest for this platform.

    A registry that cannot be reached ends the search: another one's image of that name may be a stranger's.
    """
    for name in names:
        assert name.registry is not None
        check_allowed(name.registry, settings.registry_allow)
        try:
            version: str | None = None
            for _ in range(4):  # an index may list indexes
                wanted = version or name.digest
                data = store.get(wanted) if wanted else None
                media_type = ""
                if data is None or wanted is None:
                    received = await client.manifest(name, version)
                    data, wanted, media_type = received.data, received.digest, received.media_type
                    await asyncio.to_thread(store.put, data, wanted)
                value = document(data, "manifest")
                if not is_index(value, media_type):
                    return name, wanted, manifest(value)
                version = select(value).digest
            raise MalformedImageError(f"Indexes of {name} are nested too deep.")
        except (ImageNotFoundError, RegistryUnauthorizedError) as error:
            if name is names[-1]:
                if len(names) == 1:
                    raise
                searched = ", ".join(str(tried.registry) for tried in names)
                raise ImageNotFoundError(
                    f"Image {names[0].repository} is in none of {searched}. Last answer: {error.message}", error.hint
                ) from error
    raise AssertionError("the search list is never empty")


class _Files:
    """Archives of a local image."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers

    def start(self, first: int) -> None:
        pass

    async def apply(self, number: int, unpack: Callable[[Path], Awaitable[None]]) -> None:
        await unpack(self._layers[number].path)


class _Downloads:
    """Archives of a registry's image, downloaded side by side; as an asynchronous context manager."""

    def __init__(
        self,
        client: RegistryClient,
        store: BlobStore,
        reference: Reference,
        parsed: Manifest,
        maker: _Maker,
        size_mib: int,
    ) -> None:
        self._client = client
        self._store = store
        self._reference = reference
        self._parsed = parsed
        self._maker = maker
        self._size = size_mib
        self._tasks: dict[str, asyncio.Future[Lease]] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for download in self._tasks.values():
            download.cancel()
        for result in await asyncio.gather(*self._tasks.values(), return_exceptions=True):
            if isinstance(result, Lease):
                result.close()

    def start(self, first: int) -> None:
        """Raises ImageTooLargeError, CapacityError."""
        # A layer may occur twice; it is downloaded once.
        wanted = {layer.digest: layer for layer in self._parsed.layers[first:] if layer.digest not in self._tasks}
        total = sum(layer.size or 0 for layer in wanted.values())
        _check_sizes(total, self._maker.home, self._size, self._maker.settings)
        if wanted:
            self._maker.progress(f"pulling {self._reference}: {len(wanted)} layers, {total / 1e6:.1f} MB")
        report = _Download(total, self._maker.progress)
        for digest, layer in wanted.items():
            work = self._client.blob(self._reference, layer, self._store, report.received)
            self._tasks[digest] = asyncio.ensure_future(work)

    async def apply(self, number: int, unpack: Callable[[Path], Awaitable[None]]) -> None:
        """A damaged one is removed, so that the next pull downloads it."""
        digest = self._parsed.layers[number].digest
        lease = await self._tasks[digest]
        try:
            await unpack(lease.path)
        except (DigestMismatchError, ArchiveError) as error:
            if not isinstance(error, ImageTooLargeError):
                lease.close()
                self._store.remove(digest)
            raise


def _check_sizes(total: int, home: Path, size_mib: int, settings: Settings) -> None:
    """Refuse before the download what cannot fit after it."""
    if total > 2 * size_mib * MIB:
        raise ImageTooLargeError(
            f"The image has {total // MIB} MiB of compressed layers, for a disk of {size_mib} MiB.",
            "Ask for a larger disk.",
        )
    free = shutil.disk_usage(home).free
    if total + settings.reserve_disk * MIB > free:
        raise CapacityError(
            f"The image's download needs {total // MIB} MiB and the node has {free // MIB} MiB free.",
            "Free space, lower `image_cache`, or set AENV_HOME to a larger disk.",
        )


class _Download:
    """Reports how much has arrived, now and then."""

    def __init__(self, total: int, progress: Progress) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._last = time.monotonic()

    def received(self, count: int) -> None:
        self._done += count
        if time.monotonic() - self._last >= _PROGRESS_S:
            self._last = time.monotonic()
            self._progress(f"downloaded {self._done / 1e6:.0f} of {self.total / 1e6:.0f} MB")
