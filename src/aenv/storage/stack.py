"""A stack of overlaybd layers as one virtual disk (or memory): newest wins, zeroed extents and holes are zeros."""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from aenv.errors import CorruptFileError, InvalidRequestError
from aenv.storage import runs as composed
from aenv.storage.extents import Extents
from aenv.storage.lsmt import read_layer
from aenv.storage.runs import ZERO, Runs
from aenv.storage.source import FileSource, Source, check_range
from aenv.storage.tarred import unwrapped
from aenv.storage.zfile import ZFileSource, is_zfile

MAX_LAYERS = 255  # overlaybd's limit
_COALESCE = 16384  # bytes between two pieces of one blob that are cheaper to read than to skip


class Segment(NamedTuple):
    """``length`` bytes at ``position`` in the uncompressed blob of ``layer`` (number in the stack, 0 at the bottom),
    or zeros when ``layer`` is ZERO (-1).
    """

    layer: int
    position: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class LayerView:
    """One layer opened for reading. ``Extents.source`` are positions in ``source``, its uncompressed bytes.

    Two views with equal ``identity`` (a digest, say) are the same bytes, which ``difference`` makes use of.
    """

    source: Source
    virtual_size: int
    extents: Extents
    identity: Hashable


def open_layer(source: Source, identity: Hashable = None) -> LayerView:
    """The layer whose stored bytes are ``source``: an overlaybd blob, plain or ZFile-compressed, perhaps in a tar.

    Raises CorruptFileError, SourceError. ``identity`` is by default that of the object ``source``.
    """
    identity = id(source) if identity is None else identity
    source = unwrapped(source)
    if is_zfile(source):
        blob: Source = ZFileSource(source)
        virtual_size, extents = read_layer(blob, source.size)
    else:
        blob = source
        virtual_size, extents = read_layer(blob)
    return LayerView(blob, virtual_size, extents, identity)


class Stack:
    """A Source of the virtual disk. Immutable, so it is read from any number of threads."""

    def __init__(self, layers: Sequence[LayerView], virtual_size: int | None = None) -> None:
        """``layers`` bottom first. ``virtual_size`` in bytes is by default that of the top layer; what layers have
        beyond it is not seen. Raises InvalidRequestError for more than 255 layers, or for none without a size.
        """
        if len(layers) > MAX_LAYERS:
            raise InvalidRequestError(
                f"A stack has at most {MAX_LAYERS} layers; this one has {len(layers)}.", "Compact some of them."
            )
        if virtual_size is None:
            if not layers:
                raise InvalidRequestError("A stack of no layers needs a size.")
            virtual_size = layers[-1].virtual_size
        self.layers = tuple(layers)
        self._size = virtual_size
        every = [composed.of_layer(layer.extents, number) for number, layer in enumerate(self.layers)]
        self.runs: Runs = composed.clip(composed.compose(every), 0, virtual_size)
        """What the layers cover; holes are not in it."""
        filled = composed.join(composed.fill(self.runs, virtual_size))
        # bisect on a memoryview beats searchsorted for one number.
        self._start, self._end = filled.start.data, filled.end.data
        self._layer, self._position = filled.layer.data, filled.position.data

    @property
    def size(self) -> int:
        return self._size

    def segments(self, offset: int, length: int) -> list[Segment]:
        """Where these bytes are, in order, without gaps. Raises CorruptFileError when they are not in the disk."""
        check_range(self, offset, length, "The virtual disk")
        if not length:
            return []
        end = offset + length
        first = bisect_right(self._start, offset) - 1
        last = bisect_left(self._start, end, first + 1)
        out = []
        for i in range(first, last):
            start, layer = max(self._start[i], offset), self._layer[i]
            position = 0 if layer == ZERO else self._position[i] + start - self._start[i]
            out.append(Segment(layer, position, min(self._end[i], end) - start))
        return out

    def read(self, offset: int, length: int) -> bytes:
        i = bisect_right(self._start, offset) - 1
        if i >= 0 <= length and offset + length <= self._end[i]:  # most reads lie within one run
            layer = self._layer[i]
            if layer == ZERO:
                return bytes(length)
            return self.layers[layer].source.read(self._position[i] + offset - self._start[i], length)
        return bytes(gather([layer.source for layer in self.layers], self.segments(offset, length), length))


def gather(blobs: Sequence[Source], segments: Iterable[Segment], total: int) -> bytearray:
    """The contents of ``segments`` of ``blobs``, ``total`` bytes, one after the other."""
    out = bytearray(total)
    gather_into(blobs, segments, memoryview(out))
    return out


def gather_into(blobs: Sequence[Source], segments: Iterable[Segment], out: memoryview) -> None:
    """Fill ``out`` with the contents of ``segments`` of ``blobs``, one after the other.

    Pieces that are near each other in one blob are read at once: scattered pages were mostly written together.
    """
    wanted = []
    at = 0
    for layer, position, length in segments:
        if layer == ZERO:
            out[at : at + length] = bytes(length)
        else:
            wanted.append((layer, position, length, at))
        at += length
    wanted.sort()
    i = 0
    while i < len(wanted):
        layer, begin, length, at = wanted[i]
        end, j = begin + length, i + 1
        while j < len(wanted) and wanted[j][0] == layer and wanted[j][1] - end <= _COALESCE:
            end, j = max(end, wanted[j][1] + wanted[j][2]), j + 1
        blob = blobs[layer]
        if j == i + 1 and isinstance(blob, FileSource):
            blob.read_into(begin, out[at : at + length])
        else:
            data = memoryview(blob.read(begin, end - begin))
            if len(data) != end - begin:
                raise CorruptFileError(f"A layer returned {len(data)} bytes instead of {end - begin}.")
            for _, position, length, at in wanted[i:j]:
                out[at : at + length] = data[position - begin : position - begin + length]
        i = j
