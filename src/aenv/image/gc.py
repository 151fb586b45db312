"""Garbage collection of the image cache: blobs and converted root file systems, the longest unused first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aenv.image.store import BlobStore, remove_unused

MIN_AGE_S = 600.0
"""What was used this recently is kept: a pull returns a path that its caller has yet to link."""


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

    What somebody holds stays. A root file system that a template links has a second name: removing this one
    would free nothing, so it neither counts nor goes.
    """
    store = BlobStore(home)
    now = time.time()
    store.remove_stale_partials(now)
    entries = [Entry(store.path(blob.digest), blob.size, blob.used) for blob in store.blobs()]
    entries += rootfs_entries(home)
    total = sum(entry.size for entry in entries)
    removed = freed = 0
    for entry in candidates(entries, now):
        if total - freed <= capacity:
            break
        if remove_unused(entry.path):
            entry.path.with_suffix(".json").unlink(missing_ok=True)
            removed += 1
            freed += entry.size
    return Collected(removed, freed, total - freed)


def rootfs_entries(home: Path) -> list[Entry]:
    """The converted root file systems that only the cache names."""
    found = []
    for path in (home / "images" / "rootfs").glob("*.ext4"):
        try:
            status = os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            continue
        if status.st_nlink == 1:
            found.append(Entry(path, status.st_blocks * 512, status.st_mtime))
    return found
