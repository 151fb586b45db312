"""Garbage collection of the image cache: blobs and converted layers, the longest unused first."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aenv.image.layerstore import LayerStore, read_record
from aenv.image.store import BlobStore, remove_unused
from aenv.image.workspace import remove_leftovers

MIN_AGE_S = 600.0
"""What was used this recently is kept: a pull returns layers that its caller has yet to name."""
_STALE_LOCK_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached file: bytes it takes on disk, time of its last use (seconds since the epoch)."""

    path: Path
    size: int
    used: float


@dataclass(frozen=True, slots=True)
class Collected:
    removed: int
    freed_bytes: int
    kept_bytes: int


def candidates(entries: Iterable[Entry], now: float) -> list[Entry]:
    """What may go, in the order in which it goes: the longest unused first."""
    return sorted((entry for entry in entries if now - entry.used >= MIN_AGE_S), key=lambda entry: entry.used)


def collect(home: Path, capacity: int) -> Collected:
    """Shrink the cache under ``home`` to ``capacity`` bytes. Blocking.

    What somebody holds stays. A layer that is part of a sandbox's or template's disk has a second name: removing this
    one would free nothing, so it neither counts nor goes. However many images share a layer, it counts once.
    """
    store = BlobStore(home)
    now = time.time()
    store.remove_stale_partials(now)
    remove_leftovers(home)
    _remove_stale_locks(home, now)
    entries = [Entry(store.path(blob.digest), blob.size, blob.used) for blob in store.blobs()]
    entries += unused_layers(home)
    total = sum(entry.size for entry in entries)
    removed = freed = 0
    for entry in candidates(entries, now):
        if total - freed <= capacity:
            break
        if remove_unused(entry.path, since=entry.used):  # a pull may have ended since they were listed
            removed += 1
            freed += entry.size
    if removed:
        forget(home)
    return Collected(removed, freed, total - freed)


def unused_layers(home: Path) -> list[Entry]:
    """The converted layers that only the cache names."""
    found = []
    for path in LayerStore(home).paths():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if status.st_nlink == 1:
                found.append(Entry(path, status.st_size, status.st_mtime))
    return found


def forget(home: Path) -> None:
    """Remove the records of what lacks a layer."""
    store = LayerStore(home)
    store.forget()
    for path in (home / "images" / "rootfs").glob("*.json"):
        record = read_record(path)
        if record is None or not store.has(record[0]):
            path.unlink(missing_ok=True)


def _remove_stale_locks(home: Path, now: float) -> None:
    for path in (home / "images" / "locks").glob("*"):
        with contextlib.suppress(FileNotFoundError):
            if now - os.stat(path).st_mtime > _STALE_LOCK_S:  # noqa: PTH116
                remove_unused(path)
