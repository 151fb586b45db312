"""Writing layers: from a flat file, from one qcow2 overlay, from what differs between two disks, from other layers.

All of them write a plain overlaybd layer through a temporary neighbour and one rename. Its bytes depend on what was
given alone, so two nodes that write the same get the same digest. Everything goes in batches of 1 MiB.
"""

import errno
import os
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aenv.errors import CorruptFileError
from aenv.storage import qcow2_map
from aenv.storage.extents import Extents
from aenv.storage.lsmt import LayerWriter
from aenv.storage.runs import ZERO, Longs, Runs, clip, fill, holes, intersect, join
from aenv.storage.source import FileSource, Source
from aenv.storage.stack import LayerView, Segment, Stack, gather_into

PAGE = 4096  # bytes; what is found to be zero or equal
SECTOR = 512
_BATCH = 1 << 20  # bytes: what is read is still in the CPU's cache when it is looked at and written

Pages = NDArray[np.uint64]  # one row each


def from_flat(path: Path, out: Path, durable: bool = False) -> None:
    """The layer of a (sparse) flat file: its pages that are not zero. A bottom layer.

    Raises CapacityError, SourceError.
    """
    with FileSource(path) as file:
        padded = _padded(file)
        with LayerWriter(out, padded.size) as writer:
            _write_pages(writer, [padded], _data_of(file), zeroes=False)
            writer.commit(durable)


def from_qcow2(path: Path, out: Path, durable: bool = False) -> None:
    """The layer of what one frozen qcow2 overlay itself holds; its backing file is not read.

    Pages that are zero become zeroed extents, since they hide what is below. Raises CapacityError, CorruptFileError,
    SourceError.
    """
    with FileSource(path) as file:
        size, runs = qcow2_map.allocated(file, path)
        end = int((runs.position + runs.end - runs.start).max(initial=0))
        with LayerWriter(out, size) as writer:
            _write_pages(writer, [_padded(file, end)], runs, zeroes=True)
            writer.commit(durable)


def compact(layers: Sequence[LayerView], out: Path, bottom: bool, virtual_size: int | None = None) -> None:
    """One layer that stands for ``layers``, which follow each other in a stack.

    ``bottom`` says that nothing is below them, so that zeroed extents need not be kept. ``virtual_size`` is that of
    the stack, by default of the last of the layers. Raises CapacityError, CorruptFileError, SourceError.
    """
    stack = Stack(layers, virtual_size)
    size = _sectors(stack.size)
    with LayerWriter(out, size) as writer:
        blobs = [layer.source for layer in stack.layers]
        zero = stack.runs.layer == ZERO
        if not bottom:
            _add_zeroed(writer, stack.runs.pick(zero))
        buffer = _Buffer()
        for batch in _batches(stack.runs.pick(~zero)):
            total = _total(batch)
            buffer.fill(blobs, batch, total)
            writer.add(_words(batch.start), _words(batch.end - batch.start), buffer.bytes[:total])
        writer.commit()


def difference(old: Source, new: Source, out: Path, durable: bool = False) -> int:
    """The layer that makes ``new`` out of ``old``: the pages that differ. Returns their data bytes.

    Where both are stacks, parts that come from the same place of the same layer are equal without being read, and
    holes and zeroed extents are not read. Raises CapacityError, CorruptFileError, SourceError.
    """
    size = _sectors(new.size)
    blobs = _Blobs()
    here = blobs.map(new, size)
    there = blobs.map(old, size)
    changed = _rounded(_unequal(here, there), size)
    holds, held = (_rounded(runs.pick(runs.layer != ZERO), size) for runs in (here, there))
    with LayerWriter(out, size) as writer:
        _add_zeroed(writer, _without(changed, holds))
        data = intersect(changed, holds.start, holds.end)
        buffer, other = _Buffer(), _Buffer()
        for batch in _batches(_without(data, held)):
            _add_pages(writer, batch, blobs.read(here, batch, buffer), zeroes=False)
        for batch in _batches(intersect(data, held.start, held.end)):
            now, was = blobs.read(here, batch, buffer), blobs.read(there, batch, other)
            _add_pages(writer, batch, now, zeroes=True, old=was)
        writer.commit(durable)
        return writer.bytes_written


def flat_view(file: FileSource, identity: Hashable) -> LayerView:
    """A flat (sparse) file as the bottom layer of a stack: its data where it has any.

    ``identity`` is as in ``LayerView``. Raises SourceError.
    """
    runs = _data_of(file)
    length = runs.end - runs.start
    zeroed = np.zeros(len(runs), dtype=np.bool_)
    extents = Extents(_words(runs.start), _words(length), _words(runs.start), zeroed)
    return LayerView(_padded(file), _sectors(file.size), extents, identity)


class _Padded:
    """A source that goes on with zeros up to ``size``."""

    def __init__(self, source: Source, size: int) -> None:
        self._source = source
        self.size = size

    def read(self, offset: int, length: int) -> bytes:
        there = max(0, min(length, self._source.size - offset))
        return self._source.read(offset, there) + bytes(length - there) if there else bytes(length)


def _padded(source: Source, end: int = 0) -> Source:
    """``source`` as whole sectors, with zeros up to ``end`` if it is shorter."""
    size = max(_sectors(source.size), end)
    return source if size == source.size else _Padded(source, size)


class _Blobs:
    """The blobs below several disks, each of them once: two disks that share a layer have the same number for it."""

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self._numbers: dict[object, int] = {}

    def map(self, disk: Source, size: int) -> Runs:
        """Where all of the disk is, zeros beyond its end; ``layer`` is a number in ``sources``."""
        if isinstance(disk, Stack):
            numbers = [self._number(layer.source, ("layer", layer.identity)) for layer in disk.layers]
            runs = disk.runs
            # The last place is for ZERO, which is -1.
            runs = Runs(runs.start, runs.end, np.array([*numbers, ZERO], dtype=np.int32)[runs.layer], runs.position)
        else:
            number = self._number(_padded(disk), ("disk", id(disk)))
            if isinstance(disk, FileSource):
                runs = _data_of(disk)
            else:
                start, end = np.zeros(1, dtype=np.int64), np.array([_sectors(disk.size)], dtype=np.int64)
                runs = Runs(start, end, start.astype(np.int32), start)
            runs = Runs(runs.start, runs.end, np.full(len(runs), number, dtype=np.int32), runs.position)
        return join(fill(clip(runs, 0, size), size))

    def read(self, disk: Runs, where: Runs, buffer: "_Buffer") -> Pages:
        """The pages of ``where``, in ``buffer``."""
        return buffer.fill(self.sources, join(intersect(disk, where.start, where.end)), _total(where))

    def _number(self, source: Source, identity: object) -> int:
        if identity not in self._numbers:
            self._numbers[identity] = len(self.sources)
            self.sources.append(source)
        return self._numbers[identity]


def _unequal(one: Runs, other: Runs) -> Runs:
    """What does not come from the same place in both, which cover the same without gaps."""
    start = np.union1d(one.start, other.start)
    if not len(start):
        return one
    end = np.append(start[1:], one.end[-1])
    i, j = (np.searchsorted(runs.start, start, "right") - 1 for runs in (one, other))
    shift = one.position[i] - one.start[i] == other.position[j] - other.start[j]
    same = (one.layer[i] == other.layer[j]) & (shift | (one.layer[i] == ZERO))
    return _ranges(start[~same], end[~same])


def _ranges(start: Longs, end: Longs) -> Runs:
    """Plain ranges as runs."""
    return Runs(start, end, np.full(len(start), ZERO, dtype=np.int32), np.zeros(len(start), dtype=np.int64))


def _rounded(runs: Runs, size: int) -> Runs:
    """The whole pages that ``runs`` touch."""
    start, end = runs.start // PAGE * PAGE, np.minimum(-(-runs.end // PAGE) * PAGE, size)
    if len(start) < 2:
        return _ranges(start, end)
    first = np.flatnonzero(np.concatenate(([True], start[1:] > end[:-1])))
    return _ranges(start[first], end[np.append(first[1:] - 1, len(end) - 1)])


def _without(ranges: Runs, others: Runs) -> Runs:
    return intersect(ranges, *holes(others))


def _data_of(file: FileSource) -> Runs:
    """The parts of a file that are not holes (lseek(2), SEEK_DATA), in whole pages."""
    start, end, at = [], [], 0
    while at < file.size:
        try:
            begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # only a hole is left
                raise CorruptFileError(f"{file.path} cannot be read: {error.strerror}.") from error
            break
        at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
        start.append(begin)
        end.append(at)
    ranges = _rounded(_ranges(np.array(start, dtype=np.int64), np.array(end, dtype=np.int64)), _sectors(file.size))
    return Runs(ranges.start, ranges.end, np.zeros(len(ranges), dtype=np.int32), ranges.start)


def _write_pages(writer: LayerWriter, blobs: Sequence[Source], runs: Runs, zeroes: bool) -> None:
    """Write the pages of ``runs`` (whole pages, but for the end of the disk) that are not zero."""
    zero = runs.layer == ZERO
    if zeroes:
        _add_zeroed(writer, runs.pick(zero))
    buffer = _Buffer()
    for batch in _batches(runs.pick(~zero)):
        _add_pages(writer, batch, buffer.fill(blobs, batch, _total(batch)), zeroes)


def _add_pages(writer: LayerWriter, where: Runs, pages: Pages, zeroes: bool, old: Pages | None = None) -> None:
    """Write those pages of ``where``, whose contents are ``pages``, that differ from ``old`` and are not zero.

    Zero pages become zeroed extents when ``zeroes`` is set. Only the last page of the disk may be a short one.
    """
    length = where.end - where.start
    total = int(length.sum())
    filled = pages.any(axis=1)
    wanted = (pages != old).any(axis=1) if old is not None else np.ones(len(pages), dtype=np.bool_)
    kept = filled & wanted
    if kept.all():
        writer.add(_words(where.start), _words(length), pages.data.cast("B")[:total])
        return
    count = -(-length // PAGE)
    number = np.arange(len(pages)) - np.repeat(np.cumsum(count) - count, count)
    offset = np.repeat(where.start, count) + PAGE * number
    size = np.minimum(PAGE, np.repeat(where.end, count) - offset)
    if kept.any():
        data = pages[kept].data.cast("B")
        writer.add(_words(offset[kept]), _words(size[kept]), data[: int(size[kept].sum())])
    if zeroes:
        gone = ~filled & wanted
        writer.add_zeroed(_words(offset[gone]), _words(size[gone]))


class _Buffer:
    """Room for a batch, used again and again: fresh memory costs more than what is done with it."""

    def __init__(self) -> None:
        self._words = np.zeros(_BATCH // 8, dtype=np.uint64)
        self.bytes = self._words.data.cast("B")

    def fill(self, blobs: Sequence[Source], runs: Runs, total: int) -> Pages:
        """The contents of ``runs``, ``total`` bytes, as pages; a short last one is filled up with zeros."""
        rounded = -(-total // PAGE) * PAGE
        gather_into(blobs, _segments(runs), self.bytes[:total])
        self.bytes[total:rounded] = bytes(rounded - total)
        return self._words[: rounded // 8].reshape(-1, PAGE // 8)


def _total(runs: Runs) -> int:
    return int((runs.end - runs.start).sum())


def _add_zeroed(writer: LayerWriter, runs: Runs) -> None:
    writer.add_zeroed(_words(runs.start), _words(runs.end - runs.start))


def _batches(runs: Runs) -> Iterator[Runs]:
    """``runs`` in order, in pieces of at most 1 MiB together; long ones are cut at multiples of a page."""
    length = runs.end - runs.start
    pieces = -(-length // _BATCH)
    which = np.repeat(np.arange(len(runs)), pieces)
    skip = (np.arange(len(which)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * _BATCH
    start = runs.start[which] + skip
    end = np.minimum(start + _BATCH, runs.end[which])
    cut = Runs(start, end, runs.layer[which], runs.position[which] + skip)
    total = np.cumsum(end - start)
    first = 0
    while first < len(cut):
        before = int(total[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(total, before + _BATCH, "right")))
        yield cut.pick(slice(first, last))
        first = last


def _segments(runs: Runs) -> Iterator[Segment]:
    return map(Segment, runs.layer.tolist(), runs.position.tolist(), (runs.end - runs.start).tolist())


def _words(values: Longs) -> NDArray[np.uint64]:
    return values.astype(np.uint64)


def _sectors(size: int) -> int:
    return -(-size // SECTOR) * SECTOR
