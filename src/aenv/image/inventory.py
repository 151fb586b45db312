"""What the image cache holds, as images: names, sizes, what is shared and what is in use; removing one of them.

``$AENV_HOME/images/records/<hex>.json`` says for a manifest's digest under which names it was last pulled and which
blobs it is made of. A record is a remark: without it the image's files are used and collected all the same, and it
goes when none of them is left. It is written by one rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from aenv.errors import ConflictError, NotFoundError
from aenv.image.errors import InvalidReferenceError
from aenv.image.gc import Collected, collect
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
    """``size`` is what it takes on disk, blobs and converted file systems, in bytes; ``shared`` the part of it that
    other images have as well. ``users`` counts disks that are on it: of sandboxes, templates and snapshots.
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
    records = _records(home)
    shares = Counter(blob for record in records.values() for blob in record.blobs)
    roots: dict[str, list[os.stat_result]] = {}
    for path in _roots(home):
        with contextlib.suppress(FileNotFoundError):
            roots.setdefault(_digest_of(path), []).append(path.stat())
    found = []
    for digest in {*records, *roots}:
        record = records.get(digest, Record(digest, (), (digest,)))
        own = [blobs[name] for name in record.blobs if name in blobs]
        files = roots.get(digest, [])
        if not own and not files:
            _path(home, digest).unlink(missing_ok=True)
            continue
        used = max([*(blob.used for blob in own), *(status.st_mtime for status in files)])
        found.append(
            CachedImage(
                digest=digest,
                names=record.names,
                size=sum(blob.size for blob in own) + sum(status.st_blocks * 512 for status in files),
                shared=sum(blob.size for blob in own if shares[blob.digest] > 1),
                users=sum(status.st_nlink - 1 for status in files),
                last_used=datetime.fromtimestamp(used, UTC),
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
            f"{wanted[:200]} is in use by {image.users} disks of sandboxes, templates or snapshots.",
            "Delete those first; removing it would free nothing.",
        )
    for path in _roots(home):
        if _digest_of(path) == image.digest:
            if not remove_unused(path):
                raise ConflictError(f"{wanted[:200]} is being used.", "Try again in a moment.")
            path.with_suffix(".json").unlink(missing_ok=True)
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


def _roots(home: Path) -> list[Path]:
    return sorted((home / "images" / "rootfs").glob("*.ext4"))


def _digest_of(path: Path) -> str:
    name = path.name.partition("-")[0]
    return f"{'sha256' if len(name) == 64 else 'sha512'}:{name}"
