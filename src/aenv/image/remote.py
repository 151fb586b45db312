"""An image in a registry: found by its name, described, and its layers downloaded side by side."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aenv.config import Settings
from aenv.errors import CapacityError
from aenv.image.budget import MIB
from aenv.image.chain import layer_id
from aenv.image.convert import Progress, SourceLayer
from aenv.image.endpoints import check_allowed
from aenv.image.errors import (
    ArchiveError,
    DigestMismatchError,
    ImageNotFoundError,
    ImageTooLargeError,
    RegistryUnauthorizedError,
)
from aenv.image.inventory import note
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
from aenv.image.reference import Reference, candidates
from aenv.image.registry import RegistryClient
from aenv.image.store import BlobStore, Lease

_PROGRESS_S = 2.0


@dataclass(frozen=True, slots=True)
class RemoteImage:
    """``digest`` is that of ``manifest``, which is for this platform."""

    client: RegistryClient
    home: Path
    reference: Reference
    digest: str
    manifest: Manifest

    async def config(self) -> ImageConfig:
        return image_config(await self._document(), self.digest)

    async def layers(self) -> list[SourceLayer]:
        """Raises MalformedImageError."""
        ids = diff_ids(await self._document())
        if len(ids) != len(self.manifest.layers):
            raise MalformedImageError("The manifest and the configuration differ in the number of layers.")
        return [
            SourceLayer(layer_id(diff_id, layer.digest), diff_id)
            for layer, diff_id in zip(self.manifest.layers, ids, strict=True)
        ]

    async def note(self) -> None:
        """Put its name and blobs on record."""
        used = [self.manifest.config.digest, *(layer.digest for layer in self.manifest.layers)]
        await asyncio.to_thread(note, self.home, self.digest, str(self.reference), used)

    async def _document(self) -> dict[str, Any]:
        store, described = BlobStore(self.home), self.manifest.config
        data = store.get(described.digest) or await self.client.document(self.reference, described)
        await asyncio.to_thread(store.put, data, described.digest)
        return document(data, "image's configuration")


async def find(client: RegistryClient, home: Path, reference: Reference, settings: Settings) -> RemoteImage:
    """The image, in the first of the registries that are searched for its name. Raises ImageError and its kinds."""
    names = candidates(reference, settings.registry_search)
    return RemoteImage(client, home, *await _resolve(client, BlobStore(home), names, settings))


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


class Downloads:
    """Archives of a registry's image, downloaded side by side; as an asynchronous context manager."""

    def __init__(
        self,
        image: RemoteImage,
        size_mib: int,
        settings: Settings,
        progress: Progress,
    ) -> None:
        """``size_mib`` is that of the disk that all of it is to fit on."""
        self._image = image
        self._store = BlobStore(image.home)
        self._size = size_mib
        self._settings = settings
        self._progress = progress
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
        wanted = {
            layer.digest: layer for layer in self._image.manifest.layers[first:] if layer.digest not in self._tasks
        }
        total = sum(layer.size or 0 for layer in wanted.values())
        _check_sizes(total, self._image.home, self._size, self._settings)
        if wanted:
            self._progress(f"pulling {self._image.reference}: {len(wanted)} layers, {total / 1e6:.1f} MB")
        report = _Download(total, self._progress)
        for digest, layer in wanted.items():
            work = self._image.client.blob(self._image.reference, layer, self._store, report.received)
            self._tasks[digest] = asyncio.ensure_future(work)

    async def apply(self, number: int, unpack: Callable[[Path], Awaitable[None]]) -> None:
        """A damaged one is removed, so that the next pull downloads it."""
        digest = self._image.manifest.layers[number].digest
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
