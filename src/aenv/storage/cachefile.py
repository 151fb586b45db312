"""The cached blocks of one layer on disk. Disposable: nothing here is needed for anything but speed.

Two files per layer: ``<digest>.data`` is sparse and has each cached block at its own place in the layer;
``<digest>.map`` is a header and, per block, its CRC32C (0: not cached) and when it was used last. Each step is safe
against SIGKILL and loss of power without any sync, because a block is served only if its contents match its
checksum:

- a block is written first, then its entry. In between it is not there; its space is found again when the layer is
  opened next.
- a block is evicted by clearing its entry first, then its space.
- a torn or flipped block or entry is a block that does not match: it is fetched anew.
"""

import contextlib
import ctypes
import os
import struct
import threading
from pathlib import Path

import crc32c
import numpy as np
from numpy.typing import NDArray

HEADER = struct.Struct("<8sIIQ32s")  # magic, version, block size, layer size, digest
HEADER_SIZE = 64
MAGIC = b"AENVBLK\0"
VERSION = 1
ENTRY = np.dtype([("crc", "<u4"), ("used", "<u4")])

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
PUNCH = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


def paths(folder: Path, digest: str) -> tuple[Path, Path]:
    """The data file and the map of a layer. ``digest`` is sha256:<hex>."""
    name = digest.removeprefix("sha256:")
    return folder / f"{name}.data", folder / f"{name}.map"


class CacheFile:
    """Raises OSError where the disk does; callers go on without the cache. Reads need no lock."""

    def __init__(self, folder: Path, digest: str, size: int, block: int) -> None:
        """Open what there is of the layer, or begin anew when there is nothing or something else."""
        self.digest = digest
        self.size, self.block = size, block
        self.blocks = -(-size // block)
        self._data_path, self._map_path = paths(folder, digest)
        self._lock = threading.Lock()
        self._map = os.open(self._map_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._data = -1
        try:
            self._data = os.open(self._data_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            entries = self._load()
            self.entries = entries if entries is not None else self._begin()
            self._reclaim()
        except BaseException:
            self.close(save=False)
            raise

    @property
    def crc(self) -> NDArray[np.uint32]:
        crc: NDArray[np.uint32] = self.entries["crc"]
        return crc

    def cached(self) -> int:
        """Blocks that are here."""
        return int(np.count_nonzero(self.entries["crc"]))

    def _header(self) -> bytes:
        digest = bytes.fromhex(self.digest.removeprefix("sha256:"))
        return HEADER.pack(MAGIC, VERSION, self.block, self.size, digest).ljust(HEADER_SIZE, b"\0")

    def _load(self) -> NDArray[np.void] | None:
        data = os.pread(self._map, HEADER_SIZE + self.blocks * ENTRY.itemsize + 1, 0)
        if data[:HEADER_SIZE] != self._header() or len(data) != HEADER_SIZE + self.blocks * ENTRY.itemsize:
            return None
        return np.frombuffer(data, dtype=ENTRY, offset=HEADER_SIZE).copy()

    def _begin(self) -> NDArray[np.void]:
        # The map is written in full, so that later writes into it need no room on the disk.
        entries = np.zeros(self.blocks, dtype=ENTRY)
        os.ftruncate(self._data, 0)
        os.ftruncate(self._map, 0)
        _write(self._map, entries.tobytes(), HEADER_SIZE)
        _write(self._map, self._header(), 0)
        return entries

    def _reclaim(self) -> None:
        """Give back the space of blocks that have none or no longer an entry: what a crash left."""
        allocated = os.fstat(self._data).st_blocks * 512
        if allocated > self.cached() * self.block + (1 << 20):
            self._punch(np.flatnonzero(self.entries["crc"] == 0))

    def read(self, first: int, count: int) -> tuple[bytes, list[int]]:
        """``count`` blocks from ``first`` on, all of which have entries, and which of them are damaged.

        Raises OSError.
        """
        expected = self.entries["crc"][first : first + count].tolist()
        start = first * self.block
        data = os.pread(self._data, min(count * self.block, self.size - start), start)
        if count == 1:
            return data, [] if self._whole(data, first) and crc32c.crc32c(data) == expected[0] else [first]
        view = memoryview(data)
        bad = []
        for i, crc in enumerate(expected):
            piece = view[i * self.block : (i + 1) * self.block]
            if crc32c.crc32c(piece) != crc or not self._whole(piece, first + i):
                bad.append(first + i)
        return data, bad

    def _whole(self, piece: bytes | memoryview, number: int) -> bool:
        return len(piece) == min(self.block, self.size - number * self.block)

    def write(self, first: int, data: bytes, used: int) -> int:
        """Keep consecutive blocks; how many of them are new. Raises OSError, and keeps none then."""
        try:
            _write(self._data, data, first * self.block)
        except OSError:
            with contextlib.suppress(OSError):
                self._punch(np.arange(first, first + -(-len(data) // self.block)))
            raise
        view = memoryview(data)
        crcs = [crc32c.crc32c(view[at : at + self.block]) for at in range(0, len(data), self.block)]
        with self._lock:
            part = self.entries[first : first + len(crcs)]
            new = int(np.count_nonzero(part["crc"] == 0)) - crcs.count(0)
            part["crc"], part["used"] = crcs, used
            _write(self._map, part.tobytes(), HEADER_SIZE + first * ENTRY.itemsize)
        return new

    def touch(self, first: int, count: int, used: int) -> None:
        """Remember that blocks were used; reaches the disk with ``save``."""
        self.entries["used"][first : first + count] = used

    def evict(self, numbers: NDArray[np.intp]) -> int:
        """Forget blocks and free their space; how many were there. Raises OSError."""
        if not len(numbers):
            return 0
        with self._lock:
            here = numbers[self.entries["crc"][numbers] != 0]
            if not len(here):
                return 0
            self.entries["crc"][here] = 0
            low, high = int(here.min()), int(here.max()) + 1
            _write(self._map, self.entries[low:high].tobytes(), HEADER_SIZE + low * ENTRY.itemsize)
        self._punch(here)
        return len(here)

    def _punch(self, numbers: NDArray[np.intp]) -> None:
        if not len(numbers):
            return
        breaks = np.flatnonzero(np.diff(numbers) != 1)
        starts = numbers[np.concatenate(([0], breaks + 1))]
        ends = numbers[np.concatenate((breaks, [len(numbers) - 1]))] + 1
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            if _libc.fallocate(self._data, PUNCH, start * self.block, (end - start) * self.block):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))

    def save(self) -> None:
        """Write when blocks were used. Raises OSError."""
        with self._lock:
            if self._map >= 0:
                _write(self._map, self.entries.tobytes(), HEADER_SIZE)

    def remove(self) -> None:
        """Delete both files."""
        self._map_path.unlink(missing_ok=True)
        self._data_path.unlink(missing_ok=True)

    def close(self, *, save: bool = True) -> None:
        if save:
            with contextlib.suppress(OSError):
                self.save()
        with self._lock:
            for fd in (self._map, self._data):
                if fd >= 0:
                    os.close(fd)
            self._map = self._data = -1


def _write(fd: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written


def known(folder: Path) -> list[tuple[str, int, int]]:
    """Digest, layer size, block size of what the folder holds; foreign and torn maps are removed with their data."""
    found = []
    for path in folder.glob("*.map"):
        with path.open("rb") as file:
            head = file.read(HEADER_SIZE)
        data = path.with_suffix(".data")
        if len(head) == HEADER_SIZE:
            magic, version, block, size, digest = HEADER.unpack_from(head)
            if magic == MAGIC and version == VERSION and digest.hex() == path.stem and data.exists() and block:
                found.append((f"sha256:{path.stem}", size, block))
                continue
        path.unlink(missing_ok=True)
        data.unlink(missing_ok=True)
    for data in folder.glob("*.data"):
        if not data.with_suffix(".map").exists():
            data.unlink(missing_ok=True)
    return found
