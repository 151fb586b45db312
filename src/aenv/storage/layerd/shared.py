"""What outlives ``kill -9`` of the server: requests that were read and not answered, and the files that are open.

It is an anonymous file in memory (memfd) whose descriptor the keeper holds and every server maps. The kernel copies
a request straight into its slot, so there is no moment at which a request is in nobody's hands: before read(2) of the
device it is in the kernel, after it in the slot, until the slot is cleared behind the answer. Slots are touched when
the server starts, so that the kernel's copy into them never waits for memory: a copy that is interrupted by SIGKILL
fails the request.

Layout: ``SLOTS`` of ``SLOT`` bytes, each a request from its first byte on or zeros; then ``HANDLES`` pairs of u64
(handle, inode), zeros when free. A handle is the ``unique`` of the OPEN that made it, so serving that OPEN twice
records it once.
"""

import errno
import mmap
import os
import queue
import threading
from collections.abc import Iterator

import numpy as np

from aenv.storage.layerd import protocol

SLOTS = 1024  # requests under way at once; more wait in the kernel
SLOT = 512  # bytes: a LOOKUP with its name has at most 296
HANDLES = 32768  # files open at once
SIZE = SLOTS * SLOT + HANDLES * 16


def create() -> int:
    """A new, empty one: its descriptor."""
    fd = os.memfd_create("aenv-layerd", os.MFD_CLOEXEC)
    os.ftruncate(fd, SIZE)
    return fd


def any_open(fd: int) -> bool:
    """Whether a file is open, for a process other than the server, which goes on writing there."""
    with mmap.mmap(fd, SIZE, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        return bool(view[SLOTS * SLOT :].strip(b"\0"))


class Shared:
    """The mapping. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, SIZE, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ | mmap.PROT_WRITE)
        view = memoryview(self._map)
        for at in range(0, SIZE, mmap.PAGESIZE):  # written to, so that they are mapped writable
            view[at] = view[at]
        self._views = [view[i * SLOT : (i + 1) * SLOT] for i in range(SLOTS)]
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(SLOTS):
            if not self._length(slot):
                self._free.put(slot)
        self._table = np.frombuffer(view[SLOTS * SLOT :], dtype="<u8").reshape(-1, 2)
        self._lock = threading.Lock()
        used = np.flatnonzero(self._table[:, 0])
        self._rows = {int(self._table[row, 0]): int(row) for row in used}
        self._free_rows = [row for row in range(HANDLES - 1, -1, -1) if not self._table[row, 0]]

    # Requests

    def take(self) -> int:
        """A free slot; waits for one."""
        return self._free.get()

    def request(self, slot: int) -> memoryview:
        return self._views[slot]

    def done(self, slot: int) -> None:
        """The request was answered: forget it."""
        self._views[slot][:8] = b"\0\0\0\0\0\0\0\0"
        self._free.put(slot)

    def unanswered(self) -> Iterator[int]:
        """Slots that a former server left. Only before any is taken."""
        return (slot for slot in range(SLOTS) if self._length(slot))

    def _length(self, slot: int) -> int:
        return int.from_bytes(self._views[slot][:4], "little")

    # Open files

    def opened(self, handle: int, inode: int) -> bool:
        """Record an open file; False when it is recorded already. Raises FuseError(ENFILE)."""
        with self._lock:
            if handle in self._rows:
                return False
            if not self._free_rows:
                raise protocol.FuseError(errno.ENFILE)
            row = self._free_rows.pop()
            self._table[row, 1] = inode
            self._table[row, 0] = handle
            self._rows[handle] = row
            return True

    def released(self, handle: int) -> None:
        """Forget an open file; fine when it is forgotten."""
        with self._lock:
            row = self._rows.pop(handle, None)
            if row is not None:
                self._table[row] = 0
                self._free_rows.append(row)

    def is_open(self, inode: int) -> bool:
        with self._lock:
            return any(int(self._table[row, 1]) == inode for row in self._rows.values())

    def open_inodes(self) -> dict[int, int]:
        """How many times each file is open."""
        with self._lock:
            counts: dict[int, int] = {}
            for row in self._rows.values():
                inode = int(self._table[row, 1])
                counts[inode] = counts.get(inode, 0) + 1
            return counts
