"""What the image cache holds, as images: names, sizes, what is shared and what is in use; removing one of them.

``$AENV_HOME/images/records/<hex>.json`` says for a manifest's digest under which names it was last pulled and which
blobs it is made of. A record is a remark: without it the image's files are used and collected all the same, and it
goes when none of them is left. It is written by one rename.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from aenv.errors import ConflictError, NotFoundError
from aenv.image.errors import InvalidReferenceError
from aenv.image.gc import Collected, collect, forget
from aenv.image.layerstore import LayerStore, StoredLayer, read_record
from aenv.image.reference import is_digest, parse
from aenv.image.store import BlobStore, remove_unused

MIN_PREFIX = 8  # hexadecimal digits by which an image may be named


@dataclass(frozen=True, slots=True)
class Record:
    """``names`` are canonical references; ``blobs`` digests: manifest, configuration and layers."""

    digest: str
    names: tuple[str, ...]
    blobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CachedImage:
    """``size`` is what it takes on disk, blobs and converted layers, in bytes; ``shared`` the part of it that other
    images have as well. ``users`` counts its disks that sandboxes, templates and snapshots are on: one for each size.
    """

    digest: str
    names: tuple[str, ...]
    size: int
    shared: int
    users: int
    last_used: datetime


def note(home: Path, digest: str, name: str, blobs: Iterable[str]) -> None:
    """Record a pull: ``name`` means ``digest`` from now on. Blocking, some small files."""
    records = _records(home)
    for other in records.values():
        if other.digest != digest and name in other.names:
            _write(home, Record(other.digest, tuple(n for n in other.names if n != name), other.blobs))
    old = records.get(digest)
    names = tuple(dict.fromkeys((name, *(old.names if old else ()))))
    wanted = Record(digest, names, tuple(dict.fromkeys((digest, *blobs))))
    if wanted != old:
        _write(home, wanted)


def images(home: Path) -> list[CachedImage]:
    """Every image of which something is cached, the last used first. Blocking."""
    blobs = {blob.digest: blob for blob in BlobStore(home).blobs()}
    records, disks = _records(home), _disks(home)
    parts: dict[str, dict[str, int]] = {}  # of each image: its blobs and layers, with their sizes
    used: dict[str, float] = {}
    users: Counter[str] = Counter()
    for digest, record in records.items():
        own = [blobs[name] for name in record.blobs if name in blobs]
        parts[digest] = {blob.digest: blob.size for blob in own}
        used[digest] = max((blob.used for blob in own), default=0.0)
    for disk in disks:
        parts.setdefault(disk.digest, {}).update((layer.digest, layer.size) for layer in disk.layers)
        used[disk.digest] = max(used.get(disk.digest, 0.0), disk.used)
        users[disk.digest] += disk.users
    shares = Counter(part for own in parts.values() for part in own)
    found = []
    for digest, sizes in parts.items():
        if not sizes:
            _path(home, digest).unlink(missing_ok=True)
            continue
        found.append(
            CachedImage(
                digest=digest,
                names=records[digest].names if digest in records else (),
                size=sum(sizes.values()),
                shared=sum(size for part, size in sizes.items() if shares[part] > 1),
                users=users[digest],
                last_used=datetime.fromtimestamp(used[digest], UTC),
            )
        )
    return sorted(found, key=lambda image: image.last_used, reverse=True)


def remove(home: Path, wanted: str) -> CachedImage:
    """Remove one image, by name, digest or the beginning of the digest; what others share stays. Blocking.

    Raises NotFoundError, and ConflictError while disks are on it or it is being pulled.
    """
    image = _find(images(home), wanted)
    if image.users:
        raise ConflictError(
            f"{wanted[:200]} is in use: {image.users} of its disks are those of sandboxes, templates or snapshots.",
            "Delete those first; removing it would free nothing.",
        )
    disks, layers = _disks(home), LayerStore(home)
    kept_layers = {layer for disk in disks if disk.digest != image.digest for layer in disk.layers}
    for disk in disks:
        if disk.digest == image.digest:
            disk.path.unlink(missing_ok=True)
            # The top first: what is left of a chain is of use as long as it begins at the bottom.
            for layer in reversed(disk.layers):
                if layer not in kept_layers and _is_alone(layers.path(layer.digest)):
                    remove_unused(layers.path(layer.digest))  # one that is held is part of a pull under way
    forget(home)
    records = _records(home)
    record = records.pop(image.digest, None)
    kept = {blob for other in records.values() for blob in other.blobs}
    store = BlobStore(home)
    for blob in record.blobs if record else (image.digest,):
        if blob not in kept and not store.remove(blob):
            raise ConflictError(f"{wanted[:200]} is being pulled.", "Try again in a moment.")
    _path(home, image.digest).unlink(missing_ok=True)
    return image


def collect_images(home: Path, capacity: int) -> Collected:
    """``gc.collect``, and forget what has nothing left. Blocking."""
    collected = collect(home, capacity)
    images(home)
    return collected


def _find(found: list[CachedImage], wanted: str) -> CachedImage:
    name = wanted
    with contextlib.suppress(InvalidReferenceError):
        name = str(parse(wanted))
    matches = [image for image in found if name in image.names or wanted == image.digest]
    if not matches:  # a short name, as it was pulled, or a part of a digest
        matches = [image for image in found if any(_short(full, name) for full in image.names)]
    prefix = wanted.removeprefix("sha256:")
    if not matches and len(prefix) >= MIN_PREFIX:
        matches = [image for image in found if image.digest.partition(":")[2].startswith(prefix)]
    if len(matches) > 1:
        raise ConflictError(f"{wanted[:200]} may mean {len(matches)} images.", "Use a whole name or digest.")
    if not matches:
        raise NotFoundError(f"Image {wanted[:200]!r} is not in the cache.", "GET /images lists what is.")
    return matches[0]


def _short(full: str, name: str) -> bool:
    """Whether ``name`` is ``full`` without its registry, or without that and Docker Hub's ``library/``."""
    path = full.partition("/")[2]
    return name in (path, path.removeprefix("library/"))


def _records(home: Path) -> dict[str, Record]:
    found = {}
    for path in (home / "images" / "records").glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            value = json.loads(path.read_bytes())
            record = Record(value["digest"], tuple(value["names"]), tuple(value["blobs"]))
            if all(map(is_digest, (record.digest, *record.blobs))):
                found[record.digest] = record
    return found


def _write(home: Path, record: Record) -> None:
    target = _path(home, record.digest)
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as file:
        json.dump(asdict(record), file)
    Path(file.name).replace(target)


def _path(home: Path, digest: str) -> Path:
    return home / "images" / "records" / f"{digest.partition(':')[2]}.json"


@dataclass(frozen=True, slots=True)
class _Disk:
    """A converted image, in one size. ``users``: volumes that have its topmost layer."""

    path: Path
    digest: str  # of the image
    layers: tuple[StoredLayer, ...]
    users: int
    used: float


def _disks(home: Path) -> list[_Disk]:
    store = LayerStore(home)
    found = []
    for path in sorted((home / "images" / "rootfs").glob("*.json")):
        record = read_record(path)
        if record is None or not record[0]:
            continue
        layers, _ = record
        with contextlib.suppress(FileNotFoundError):
            status = store.path(layers[-1].digest).stat()
            name = path.name.partition("-")[0]
            digest = f"{'sha256' if len(name) == 64 else 'sha512'}:{name}"
            found.append(_Disk(path, digest, layers, status.st_nlink - 1, status.st_mtime))
    return found


def _is_alone(path: Path) -> bool:
    """Whether the cache alone names a layer."""
    try:
        return path.stat().st_nlink == 1
    except FileNotFoundError:
        return False
