"""An image reference in, an ext4 root file system and the image's configuration out.

``$AENV_HOME/images``: ``blobs/`` (see ``store``), ``rootfs/<digest>-<MiB>-v<version>.ext4`` with ``….json`` beside it
(the configuration, written first: an image without it is not used), ``work/`` (trees being unpacked; what a crash
left there is removed by the next pull) and ``locks/``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aenv.config import Settings
from aenv.errors import CapacityError
from aenv.guest.commands import write_durably
from aenv.image.budget import MIB
from aenv.image.endpoints import check_allowed
from aenv.image.errors import (
    ArchiveError,
    DigestMismatchError,
    ImageNotFoundError,
    ImageTooLargeError,
    RegistryForbiddenError,
    RegistryUnauthorizedError,
    UnsupportedImageError,
)
from aenv.image.ext4 import make_ext4
from aenv.image.gc import collect
from aenv.image.inventory import note
from aenv.image.locks import locked, try_lock
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
from aenv.image.sources import LocalSource, identity, open_local, parse_local
from aenv.image.store import BlobStore, Lease
from aenv.image.worker import Unpacker

Progress = Callable[[str], None]
_PROGRESS_S = 2.0
LOCAL_SCHEMES = ("oci", "docker-archive", "tar")
_TUPLES = ("entrypoint", "cmd", "shell", "exposed_ports", "volumes")


async def pull_image(
    reference: str, home: Path, *, size_mib: int, settings: Settings, progress: Progress = lambda text: None
) -> tuple[Path, ImageConfig] | NativeImage:
    """As ``pull_rootfs``, from a registry; of an overlaybd-native image nothing but its description is fetched."""
    (home / "images").mkdir(mode=0o700, parents=True, exist_ok=True)
    if reference.partition(":")[0] in LOCAL_SCHEMES:
        raise _local_refused(reference)
    return await _from_registry(parse(reference), home, size_mib, settings, None, progress)


async def pull_rootfs(
    reference: str,
    home: Path,
    *,
    size_mib: int,
    settings: Settings,
    credentials: tuple[str, str] | None = None,
    progress: Progress = lambda text: None,
    allow_local: bool = False,
) -> tuple[Path, ImageConfig]:
    """The image as an ext4 file system of ``size_mib`` MiB under ``home``, and its configuration. Needs root.

    The file belongs to the cache: link it within ten minutes (``gc.MIN_AGE_S``), never write to it. It is made once
    for each manifest and size; then a tag costs one request, and a digest none. ``credentials`` (user name,
    password) go to the registry of the reference. With ``allow_local``, ``oci:PATH``, ``docker-archive:PATH`` and
    ``tar:PATH`` name files of this machine: never allow that to whoever may not read its files.

    Raises ImageError and its kinds, CapacityError.
    """
    # What users pull may be private to them.
    (home / "images").mkdir(mode=0o700, parents=True, exist_ok=True)
    if reference.partition(":")[0] in LOCAL_SCHEMES and (local := parse_local(reference)) is not None:
        if not allow_local:
            raise _local_refused(reference)
        return await _from_local(local, home, size_mib, settings, progress)
    found = await _from_registry(parse(reference), home, size_mib, settings, credentials, progress)
    if isinstance(found, NativeImage):
        raise UnsupportedImageError(
            f"{reference} is an overlaybd image: it is not unpacked, sandboxes read it on demand.",
            "Start it cold; a snapshot of that sandbox is used as a template is.",
        )
    return found


def _local_refused(reference: str) -> RegistryForbiddenError:
    return RegistryForbiddenError(
        f"{reference!r} names a file of the node, which is not allowed here.", "Push the image to a registry."
    )


async def _from_local(
    source: LocalSource, home: Path, size_mib: int, settings: Settings, progress: Progress
) -> tuple[Path, ImageConfig]:
    digest = await identity(source)
    async with _making(home, digest, size_mib) as target:
        if (known := _cached(target)) is not None:
            return target, known
        async with _workspace(home) as work, _unpacker(size_mib, work, settings, progress) as unpacker:
            progress(f"reading {source.described}")
            config, layers = await open_local(source, digest, work, unpacker)
            tree = _new_tree(work)
            for number, layer in enumerate(layers, 1):
                progress(f"unpacking layer {number} of {len(layers)}")
                await unpacker.apply(tree, layer.path, diff_id=layer.diff_id, whiteouts=layer.whiteouts)
            config = await _finish(tree, target, config, size_mib, unpacker, progress)
    await asyncio.to_thread(collect, home, settings.image_cache * MIB)
    return target, config


async def _from_registry(
    reference: Reference,
    home: Path,
    size_mib: int,
    settings: Settings,
    credentials: tuple[str, str] | None,
    progress: Progress,
) -> tuple[Path, ImageConfig] | NativeImage:
    store = BlobStore(home)
    async with RegistryClient(settings, credentials) as client:
        found, digest, parsed = await _resolve(
            client, store, candidates(reference, settings.registry_search), settings
        )
        if is_native(parsed):
            config_data = store.get(parsed.config.digest) or await client.document(found, parsed.config)
            await asyncio.to_thread(store.put, config_data, parsed.config.digest)
            config = image_config(document(config_data, "image's configuration"), digest)
            return NativeImage(replace(found, digest=digest), config, parsed.layers)
        used = [parsed.config.digest, *(layer.digest for layer in parsed.layers)]
        await asyncio.to_thread(note, home, digest, str(found), used)
        async with _making(home, digest, size_mib) as target:
            if (known := _cached(target)) is not None:
                return target, known
            config_data = store.get(parsed.config.digest) or await client.document(found, parsed.config)
            await asyncio.to_thread(store.put, config_data, parsed.config.digest)
            value = document(config_data, "image's configuration")
            config, ids = image_config(value, digest), diff_ids(value)
            if len(ids) != len(parsed.layers):
                raise MalformedImageError("The manifest and the configuration differ in the number of layers.")
            _check_sizes(parsed, home, size_mib, settings)
            async with _workspace(home) as work, _unpacker(size_mib, work, settings, progress) as unpacker:
                tree = _new_tree(work)
                await _pull_layers(client, store, found, parsed, ids, tree, unpacker, progress)
                config = await _finish(tree, target, config, size_mib, unpacker, progress)
    await asyncio.to_thread(collect, home, settings.image_cache * MIB)
    return target, config


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


async def _pull_layers(
    client: RegistryClient,
    store: BlobStore,
    reference: Reference,
    parsed: Manifest,
    ids: tuple[str, ...],
    tree: Path,
    unpacker: Unpacker,
    progress: Progress,
) -> None:
    """Download all layers side by side and unpack each as soon as it and those below it are there."""
    count = len(parsed.layers)
    report = _Download(sum(layer.size or 0 for layer in parsed.layers), progress)
    progress(f"pulling {reference}: {count} layers, {report.total / 1e6:.1f} MB")
    # A layer may occur twice; it is downloaded once.
    distinct = {layer.digest: layer for layer in parsed.layers}
    downloads = {
        digest: asyncio.ensure_future(client.blob(reference, layer, store, report.received))
        for digest, layer in distinct.items()
    }
    try:
        for number, (layer, diff_id) in enumerate(zip(parsed.layers, ids, strict=True), 1):
            lease = await downloads[layer.digest]
            progress(f"unpacking layer {number} of {count}")
            try:
                await unpacker.apply(tree, lease.path, diff_id=diff_id)
            except (DigestMismatchError, ArchiveError) as error:
                if not isinstance(error, ImageTooLargeError):
                    lease.close()
                    store.remove(layer.digest)
                raise
    finally:
        for download in downloads.values():
            download.cancel()
        for result in await asyncio.gather(*downloads.values(), return_exceptions=True):
            if isinstance(result, Lease):
                result.close()


async def _finish(
    tree: Path, target: Path, config: ImageConfig, size_mib: int, unpacker: Unpacker, progress: Progress
) -> ImageConfig:
    """The configuration as a sandbox follows it: its user has a name."""
    config = replace(config, user=await unpacker.prepare(tree, config.user, config.env.get("PATH", "")))
    progress("writing the file system")
    image = tree.with_name("image")
    await make_ext4(tree, image, target.stem, size_mib)
    await asyncio.to_thread(write_durably, target.with_suffix(".json"), json.dumps(asdict(config)).encode())
    image.rename(target)
    return config


def _cached(target: Path) -> ImageConfig | None:
    """The configuration of a converted image, which is marked as used; None where there is none."""
    try:
        value = json.loads(target.with_suffix(".json").read_bytes())
        os.utime(target)
        fields: dict[str, Any] = {key: tuple(item) if key in _TUPLES else item for key, item in value.items()}
        return ImageConfig(**fields)
    except (FileNotFoundError, ValueError, TypeError):
        return None


@contextlib.asynccontextmanager
async def _making(home: Path, digest: str, size_mib: int) -> AsyncIterator[Path]:
    """Where the converted image is to be, with the right to make it."""
    name = f"{digest.partition(':')[2]}-{size_mib}-v{VERSION}.ext4"
    target = home / "images" / "rootfs" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    async with locked(home / "images" / "locks" / name):
        yield target


@contextlib.asynccontextmanager
async def _workspace(home: Path) -> AsyncIterator[Path]:
    """A new directory that only root may enter (set-user-id files and devices go in), locked while it is in use."""
    parent = home / "images" / "work"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    await asyncio.to_thread(_remove_leftovers, parent)
    work = Path(tempfile.mkdtemp(prefix="unpacking-", dir=parent))
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try_lock(descriptor)
        yield work
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, work, ignore_errors=True))
        os.close(descriptor)


def _remove_leftovers(parent: Path) -> None:
    """Remove what a crash left: workspaces that nobody has locked. A minute old, as one may not be locked yet."""
    for path in parent.iterdir():
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if time.time() - os.fstat(descriptor).st_ctime > 60 and try_lock(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _unpacker(size_mib: int, work: Path, settings: Settings, progress: Progress) -> Unpacker:
    return Unpacker(size_mib, work, settings.reserve_disk, progress)


def _new_tree(work: Path) -> Path:
    tree = work / "tree"
    tree.mkdir(mode=0o755)
    tree.chmod(0o755)
    return tree


def _check_sizes(parsed: Manifest, home: Path, size_mib: int, settings: Settings) -> None:
    """Refuse before the download what cannot fit after it."""
    total = sum(layer.size or 0 for layer in parsed.layers)
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
