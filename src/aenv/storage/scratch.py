"""A disk that is written to, and whose changes become overlaybd layers: the new in a file, the old in a stack.

Written pages go to an unnamed file, each to one place however often it is written. ``seal`` gives what was written
since the last one as the bytes of a layer, in the order of the disk, and the disk goes on over it. Pages of zeros
take no room, and are not in the layer where nothing is below them. Not thread-safe.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aenv.storage.lsmt import BLOCK, disk_errors, frame
from aenv.storage.source import Source, check_range
from aenv.storage.stack import LayerView, Stack, open_layer

PAGE = 4096  # bytes
_CLEAN, _ZERO, _FIRST = 0, 1, 2  # of a page: not written, zeros, and the first number of a place in the file

Places = NDArray[np.uint32]


class ScratchDisk:
    """``size`` bytes, whole pages. Reads and writes may begin and end anywhere within it."""

    def __init__(self, layers: Sequence[LayerView], size: int, folder: Path) -> None:
        """``layers``, bottom first, are what it begins as; ``folder`` is on the disk that takes what is written."""
        if size % PAGE:
            raise ValueError(f"A disk of {size} bytes is no whole number of pages.")
        self.size = size
        self._folder = folder
        self._layers = list(layers)
        self._base: Source = Stack(self._layers, size)
        self._open()

    def _open(self) -> None:
        with disk_errors(self._folder):
            self._fd = os.open(self._folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._places: Places = np.zeros(self.size // PAGE, dtype=np.uint32)
        self._next = _FIRST

    def read(self, offset: int, length: int) -> bytes:
        """Raises SourceError, CorruptFileError."""
        check_range(self, offset, length, "The disk")
        first, last = offset // PAGE, -(-(offset + length) // PAGE)
        places = self._places[first:last]
        if not places.any():
            return self._base.read(offset, length)
        out = bytearray((last - first) * PAGE)
        for begin, end, place in _pieces(places):
            if place >= _FIRST:
                _read_into(self._fd, place, memoryview(out)[begin * PAGE : end * PAGE])
            elif place == _CLEAN:
                at = (first + begin) * PAGE
                out[begin * PAGE : end * PAGE] = self._base.read(at, (end - begin) * PAGE)
        skip = offset - first * PAGE
        return bytes(out[skip : skip + length])

    def write(self, offset: int, data: memoryview) -> None:
        """Raises CapacityError when the host's disk is full, and what ``read`` raises."""
        length = len(data)
        check_range(self, offset, length, "The disk")
        if not length:
            return
        head, tail = offset % PAGE, -(offset + length) % PAGE
        if head or tail:
            first, last = offset - head, offset + length + tail
            whole = bytearray(self.read(first, last - first))
            whole[head : head + length] = data
            offset, data = first, memoryview(whole)
        pages = np.frombuffer(data, dtype=np.uint64).reshape(-1, PAGE // 8)
        filled = pages.any(axis=1)
        first = offset // PAGE
        places = self._places[first : first + len(pages)]
        places[~filled] = _ZERO
        fresh = filled & (places < _FIRST)
        count = int(fresh.sum())
        places[fresh] = np.arange(self._next, self._next + count, dtype=np.uint32)
        self._next += count
        with disk_errors(self._folder):
            for begin, end, place in _pieces(places):
                if place >= _FIRST:
                    _write(self._fd, data[begin * PAGE : end * PAGE], (place - _FIRST) * PAGE)

    def zero(self, offset: int, length: int) -> None:
        """As writing zeros. Raises what ``write`` raises."""
        check_range(self, offset, length, "The disk")
        end = offset + length
        first, last = -(-offset // PAGE), end // PAGE
        if first >= last:
            self.write(offset, memoryview(bytes(length)))
            return
        self.write(offset, memoryview(bytes(first * PAGE - offset)))
        self._places[first:last] = _ZERO
        self.write(last * PAGE, memoryview(bytes(end - last * PAGE)))

    def seal(self) -> "Sealed":
        """What was written since the beginning, or the last ``seal``. It is part of the disk from now on."""
        pages = np.flatnonzero(self._places)
        places = self._places[pages]
        if not self._layers:
            pages, places = pages[places != _ZERO], places[places != _ZERO]
        sealed = Sealed(self._fd, pages.astype(np.uint64), places, self.size)
        self._layers.append(open_layer(sealed))
        self._base = Stack(self._layers, self.size)
        self._open()
        return sealed


class Sealed:
    """The bytes of a plain layer, whose data is in a scratch file; a Source."""

    def __init__(self, fd: int, pages: NDArray[np.uint64], places: Places, virtual_size: int) -> None:
        self._fd = fd
        self._places = places[places >= _FIRST]
        end = BLOCK + len(self._places) * PAGE
        zeroed = places == _ZERO
        source = np.uint64(BLOCK) + np.uint64(PAGE) * (np.cumsum(~zeroed, dtype=np.uint64) - np.uint64(1))
        length = np.full(len(pages), PAGE, dtype=np.uint64)
        self._head, self._tail = frame(pages * np.uint64(PAGE), length, source, zeroed, end, virtual_size)
        self._end = end

    @property
    def size(self) -> int:
        return self._end + len(self._tail)

    @property
    def data_bytes(self) -> int:
        return self._end - BLOCK

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, "A layer")
        out = bytearray(length)
        view, end = memoryview(out), offset + length
        if offset < BLOCK:
            part = self._head[offset:end]
            view[: len(part)] = part
        if end > self._end:
            begin = max(offset, self._end)
            view[begin - offset :] = self._tail[begin - self._end : end - self._end]
        begin, stop = max(offset, BLOCK), min(end, self._end)
        if begin < stop:
            self._read_data(begin - BLOCK, view[begin - offset : stop - offset])
        return bytes(out)

    def _read_data(self, position: int, out: memoryview) -> None:
        first, last = position // PAGE, -(-(position + len(out)) // PAGE)
        for begin, end, place in _pieces(self._places[first:last]):
            start = max((first + begin) * PAGE, position)
            stop = min((first + end) * PAGE, position + len(out))
            skip = start - (first + begin) * PAGE
            _read_into(self._fd, place, out[start - position : stop - position], skip)


def _pieces(places: Places) -> Iterator[tuple[int, int, int]]:
    """Runs of pages that are next to each other in the file too, or that are all clean or all zero: begin, end, place
    of the first.
    """
    if not len(places):
        return
    step = np.diff(places.astype(np.int64))
    stored = places >= _FIRST
    goes_on = (stored[:-1] & (step == 1)) | (~stored[:-1] & (step == 0))
    cuts = [0, *(np.flatnonzero(~goes_on) + 1).tolist(), len(places)]
    for begin, end in pairwise(cuts):
        yield begin, end, int(places[begin])


def _read_into(fd: int, place: int, out: memoryview, skip: int = 0) -> None:
    position = (place - _FIRST) * PAGE + skip
    while out:
        count = os.preadv(fd, [out], position)
        if not count:
            raise EOFError("the scratch file became shorter")
        out, position = out[count:], position + count


def _write(fd: int, data: memoryview, position: int) -> None:
    while data:
        written = os.pwrite(fd, data, position)
        data, position = data[written:], position + written
