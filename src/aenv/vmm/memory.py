"""Guest RAM of a running VM: which pages are its own, reading them into a layer, writing a layer into it.

RAM is one private mapping of an immutable file in the VMM's process. A page that was ever written is anonymous (or
swapped) from then on; every other page still is the file's. So "what differs from the base" needs no dirty log
and no co-operation of the VMM. All functions block: call them in a worker thread, with the VM stopped.
"""

import ctypes
import fcntl
import functools
import itertools
import os
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aenv.errors import CorruptFileError, VmmError
from aenv.storage import lsmt

PAGE = 4096
IOV_MAX = 1024
CHUNK = 1024  # pages read at once: 4 MiB
THREADS = min(4, os.cpu_count() or 1)  # that copy: more only wait for the same memory bus
PAGEMAP_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg), linux/fs.h since Linux 6.7
IS_FILE, IS_PRESENT, IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
REGIONS = 4096  # regions that one ioctl may return
# /proc/PID/pagemap, Documentation/admin-guide/mm/pagemap.rst
BIT_FILE, BIT_SWAP, BIT_PRESENT = np.uint64(1 << 61), np.uint64(1 << 62), np.uint64(1 << 63)

Words = NDArray[np.uint64]
_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    getattr(_libc, _name).argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
    ]  # fmt: skip
    getattr(_libc, _name).restype = ctypes.c_ssize_t


@dataclass(frozen=True, slots=True)
class Mapping:
    """Guest RAM, or a piece of it, in the address space of ``pid``: ``size`` bytes from ``offset`` of the file on."""

    pid: int
    start: int
    size: int
    offset: int = 0

    @property
    def bias(self) -> int:
        """What makes an address of an offset in the file."""
        return self.start - self.offset


@dataclass(frozen=True, slots=True)
class Captured:
    """Bytes written as data, and bytes that were zero."""

    data: int
    zero: int


def find_mapping(pid: int, base: Path, size: int) -> Mapping:
    """Where ``pid`` maps ``base``. Raises VmmError when it does not, or not as one linear piece of ``size`` bytes."""
    stat = base.stat()
    device = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}"
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError as error:
        raise VmmError(f"Process {pid} is gone.") from error
    start, end = 0, 0
    for line in lines:
        span, _, offset, dev, inode = line.split(None, 5)[:5]
        if dev != device or int(inode) != stat.st_ino:
            continue
        low, high = (int(x, 16) for x in span.split("-"))
        # The kernel may have split the mapping; the pieces must follow each other.
        if not start:
            start = end = low
        if low != end or int(offset, 16) != low - start:
            raise VmmError(f"Process {pid} does not map {base} in one piece.")
        end = high
    if end - start != size:
        raise VmmError(f"Process {pid} maps {end - start} bytes of {base}, not {size}.")
    return Mapping(pid, start, size)


def private_runs(mapping: Mapping) -> tuple[Words, Words]:
    """Page numbers and lengths (pages) of the runs of pages that are the process's own, ascending."""
    return _runs_where(mapping, own=True)


def touched_runs(mapping: Mapping) -> tuple[Words, Words]:
    """The same of all pages that the process has mapped now, its own or the file's: those it has used."""
    return _runs_where(mapping, own=False)


def _runs_where(mapping: Mapping, *, own: bool) -> tuple[Words, Words]:
    try:
        fd = os.open(f"/proc/{mapping.pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise VmmError(f"Process {mapping.pid} is gone.") from error
    try:
        try:
            starts, ends = _scan(fd, mapping, IS_FILE if own else 0)
        except OSError:  # ENOTTY: Linux < 6.7
            return _runs_by_pagemap(fd, mapping, own)
    finally:
        os.close(fd)
    first = (starts - np.uint64(mapping.bias)) // np.uint64(PAGE)
    return first, (ends - starts) // np.uint64(PAGE)


def _scan(fd: int, mapping: Mapping, without: int) -> tuple[Words, Words]:
    """Starts and ends (addresses) of regions that are mapped and not of the categories ``without``."""
    vector = np.zeros((REGIONS, 3), dtype=np.uint64)
    start, end = mapping.start, mapping.start + mapping.size
    found = []
    while start < end:
        # size, flags, start, end, walk_end, vec, vec_len, max_pages, inverted, mask, anyof, return
        argument = bytearray(
            struct.pack(
                "12Q", 96, 0, start, end, 0, vector.ctypes.data, REGIONS, 0,
                without, without, IS_PRESENT | IS_SWAPPED, without,
            )
        )  # fmt: skip
        count = fcntl.ioctl(fd, PAGEMAP_SCAN, argument, True)
        found.append(vector[:count, :2].copy())
        if count < REGIONS:
            break
        # Not walk_end: the kernel collects 512 regions at a time and leaves in it where one of the earlier batches
        # ended (seen on 6.18), from where the rest would be reported a second time.
        start = int(vector[count - 1, 1])
    regions = np.concatenate(found)
    starts, ends = regions[:, 0], regions[:, 1]
    if len(starts) > 1:
        joins = ends[:-1] == starts[1:]
        starts, ends = starts[np.concatenate(([True], ~joins))], ends[np.concatenate((~joins, [True]))]
    return starts, ends


def _runs_by_pagemap(fd: int, mapping: Mapping, own: bool) -> tuple[Words, Words]:
    pages = mapping.size // PAGE
    entries = np.empty(pages, dtype=np.uint64)
    view = entries.view(np.uint8).data
    got = 0
    while got < len(view):
        count = os.preadv(fd, [view[got:]], mapping.start // PAGE * 8 + got)
        if count <= 0:
            raise VmmError(f"Process {mapping.pid} is gone.")
        got += count
    found = (entries & (BIT_PRESENT | BIT_SWAP)) != 0
    if own:
        found &= (entries & BIT_FILE) == 0
    return runs(np.flatnonzero(found).astype(np.uint64) + np.uint64(mapping.offset // PAGE))


def runs(pages: Words) -> tuple[Words, Words]:
    """Ascending page numbers as runs: first page and length of each."""
    if not len(pages):
        return pages, pages
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    first = pages[np.concatenate(([0], breaks))]
    return first, np.diff(np.concatenate((np.concatenate(([0], breaks)), [len(pages)]))).astype(np.uint64)


def chunks(first: Words, length: Words, limit: int) -> Iterator[tuple[Words, Words]]:
    """The same runs in groups of at most ``limit`` pages, and so of at most ``limit`` runs; long runs are cut."""
    ends = np.cumsum(length, dtype=np.uint64)
    total = int(ends[-1]) if len(ends) else 0
    # Counted in pages that were captured: where runs begin, and where groups do.
    starts = ends - length
    cuts = np.union1d(starts, np.arange(0, total, limit, dtype=np.uint64))
    which = np.searchsorted(starts, cuts, side="right") - 1
    at = first[which] + (cuts - starts[which])
    size = np.diff(np.append(cuts, np.uint64(total)))
    bounds = np.searchsorted(cuts, np.arange(0, total + limit, limit, dtype=np.uint64))
    for low, high in itertools.pairwise(bounds.tolist()):
        yield at[low:high], size[low:high]


def data_of(base: Path) -> tuple[Words, Words]:
    """First and last but one page of each part of a memory file that is no hole (lseek(2), SEEK_DATA).

    Remembered, since bases do not change: every VM of a template has the same.
    """
    stat = base.stat()
    return _data_of(base, stat.st_dev, stat.st_ino, stat.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _data_of(base: Path, *_: int) -> tuple[Words, Words]:
    starts, ends = [], []
    with base.open("rb", buffering=0) as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        while at < size:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            starts.append(start // PAGE)
            ends.append(-(-at // PAGE))
    return np.array(starts, dtype=np.uint64), np.array(ends, dtype=np.uint64)


def capture(mapping: Mapping, delta: Path, data: tuple[Words, Words]) -> Captured:
    """Write every page that is the process's own to a layer at ``delta``.

    Zero pages become ``zeroed`` entries where the base has ``data`` (as ``data_of`` says), and are left out where it
    is zero as well. Raises VmmError when the process goes away, CapacityError when the disk is full; no file is left
    then.
    """
    return capture_pieces([mapping], delta, data)


def capture_pieces(
    pieces: Sequence[Mapping],
    delta: Path,
    data: tuple[Words, Words],
    cleared: tuple[Words, Words] = (np.zeros(0, np.uint64), np.zeros(0, np.uint64)),
) -> Captured:
    """``capture`` of a guest whose RAM is in ``pieces``, which make up the whole of the file.

    ``cleared`` are runs of pages that are the process's own and zero without being there: a balloon took them.
    """
    groups = [(piece, *group) for piece in pieces for group in chunks(*private_runs(piece), CHUNK)]
    threads = min(THREADS, -(-len(groups) // 4))
    with lsmt.LayerWriter(delta, sum(piece.size for piece in pieces)) as writer:

        def copy(groups: Iterator[tuple[Mapping, Words, Words]]) -> list[tuple[int, int]]:
            buffer = np.empty((CHUNK, PAGE // 8), dtype=np.uint64)
            return [_copy(piece, writer, buffer, first, length, data) for piece, first, length in groups]

        writer.add_zeroed(*(words * np.uint64(PAGE) for words in _hiding(*cleared, data)))

        if threads < 2:
            counts = copy(iter(groups))
        else:
            # Reading another process's memory and writing the page cache are the kernel's work, done side by side.
            queue = _Shared(groups)
            with ThreadPoolExecutor(threads, thread_name_prefix="capture") as pool:
                counts = [pair for part in pool.map(lambda _: copy(queue), range(threads)) for pair in part]
        writer.commit()
    return Captured(sum(data for data, _ in counts) * PAGE, sum(zero for _, zero in counts) * PAGE)


def _hiding(first: Words, length: Words, data: tuple[Words, Words]) -> tuple[Words, Words]:
    """What of ascending runs of pages lies within the parts of a base that are no holes."""
    found = []
    for start, size in zip(first.tolist(), length.tolist(), strict=True):
        low = int(np.searchsorted(data[1], start, side="right"))
        high = int(np.searchsorted(data[0], start + size, side="left"))
        found += [
            (max(start, begin), min(start + size, end) - max(start, begin))
            for begin, end in zip(data[0][low:high].tolist(), data[1][low:high].tolist(), strict=True)
        ]
    both = np.array(found, dtype=np.uint64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


class _Shared(Iterator[tuple[Mapping, Words, Words]]):
    """One iterator for several threads."""

    def __init__(self, items: Iterable[tuple[Mapping, Words, Words]]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> tuple[Mapping, Words, Words]:
        with self._lock:
            return next(self._items)


def _copy(
    mapping: Mapping,
    writer: lsmt.LayerWriter,
    buffer: Words,
    starts: Words,
    lengths: Words,
    data: tuple[Words, Words],
) -> tuple[int, int]:
    """Write one group of runs; how many pages were data, and how many zero."""
    page, count = np.uint64(PAGE), int(lengths.sum())
    _transfer(_libc.process_vm_readv, mapping, starts, lengths, buffer.ctypes.data)
    block = buffer[:count]
    full = block[:, 0] != 0
    full[~full] = block[~full].any(axis=1)
    if full.all():
        writer.add(starts * page, lengths * page, block.reshape(-1).view(np.uint8).data)
        return count, 0
    numbers = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths.astype(np.int64))
    numbers += np.arange(count, dtype=np.uint64)
    zero = numbers[~full]
    if len(data[0]):
        inside = np.searchsorted(data[0], zero, side="right") - 1  # the part that begins last before it
        hides = (inside >= 0) & (zero < data[1][inside])
        at, size = runs(zero[hides])
        writer.add_zeroed(at * page, size * page)
    kept = int(np.count_nonzero(full))
    if kept:
        at, size = runs(numbers[full])
        writer.add(at * page, size * page, block[full].reshape(-1).view(np.uint8).data)
    return kept, count - kept


def inject(mapping: Mapping, delta: Path) -> int:
    """Write the layer's extents into guest RAM; bytes written.

    Raises CorruptFileError when the layer is damaged or made for another size, VmmError when the process is gone.
    """
    return inject_pieces([mapping], delta)


def inject_pieces(pieces: Sequence[Mapping], delta: Path) -> int:
    """``inject`` into a guest whose RAM is in ``pieces``, which make up the whole of the file."""
    size = sum(piece.size for piece in pieces)
    with lsmt.Layer(delta) as layer:
        if layer.virtual_size != size:
            raise CorruptFileError(f"{delta} is for {layer.virtual_size} bytes of memory, and the VM has {size}.")
        extents = layer.extents
        if not len(extents):
            return 0
        zeros = extents.zeroed
        with layer.mapped() as file:
            view = np.frombuffer(file, dtype=np.uint8)
            try:
                local = np.uint64(view.ctypes.data) + extents.source
                for piece in pieces:
                    offset, length, skipped = _within(piece, extents.offset[~zeros], extents.length[~zeros])
                    inside = length > 0
                    _write(piece, (local[~zeros] + skipped)[inside], offset[inside], length[inside])
            finally:
                del view
        for piece in pieces:
            offset, length, _ = _within(piece, extents.offset[zeros], extents.length[zeros])
            inside = length > 0
            _write_zeros(piece, offset[inside], length[inside])
        return int(extents.length.sum())


def _within(piece: Mapping, offset: Words, length: Words) -> tuple[Words, Words, Words]:
    """Extents cut down to what lies in ``piece``, others to nothing; and what was cut off at their beginning."""
    low, high = np.uint64(piece.offset), np.uint64(piece.offset + piece.size)
    start, end = np.clip(offset, low, high), np.clip(offset + length, low, high)
    return start, end - start, start - offset


def _write_zeros(mapping: Mapping, offset: Words, length: Words) -> None:
    if not len(offset):
        return
    zeros = np.zeros(int(min(int(length.max()), 1 << 20)), dtype=np.uint8)
    offsets, lengths = [], []
    for at, size in zip(offset.tolist(), length.tolist(), strict=True):
        for skip in range(0, size, len(zeros)):
            offsets.append(at + skip)
            lengths.append(min(len(zeros), size - skip))
    local = np.full(len(offsets), zeros.ctypes.data, dtype=np.uint64)
    _write(mapping, local, np.array(offsets, dtype=np.uint64), np.array(lengths, dtype=np.uint64))


def _write(mapping: Mapping, local: Words, offset: Words, length: Words) -> None:
    remote = offset + np.uint64(mapping.bias)
    ends = np.cumsum(length)
    at = 0
    while at < len(local):
        # MAX_RW_COUNT: the kernel transfers less than 2 GiB at once.
        limit = int(np.searchsorted(ends, ends[at] - length[at] + np.uint64(1 << 30), side="right"))
        part = slice(at, min(at + IOV_MAX, limit))
        at = part.stop
        ours = np.ascontiguousarray(np.stack((local[part], length[part]), axis=1))
        theirs = np.ascontiguousarray(np.stack((remote[part], length[part]), axis=1))
        _call(_libc.process_vm_writev, mapping, ours, theirs, int(length[part].sum()))


def _transfer(function: object, mapping: Mapping, first: Words, length: Words, address: int) -> None:
    size = length * np.uint64(PAGE)
    theirs = np.ascontiguousarray(np.stack((first * np.uint64(PAGE) + np.uint64(mapping.bias), size), axis=1))
    total = int(size.sum())
    _call(function, mapping, np.array([[address, total]], dtype=np.uint64), theirs, total)


def _call(function: object, mapping: Mapping, ours: Words, theirs: Words, total: int) -> None:
    """One process_vm_readv(2)/writev(2): both sides are arrays of struct iovec."""
    assert callable(function) and sys.byteorder == "little"
    done = function(mapping.pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
    if done != total:
        why = os.strerror(ctypes.get_errno()) if done < 0 else f"{done} of {total} bytes"
        raise VmmError(f"Memory of process {mapping.pid} cannot be accessed: {why}.")
