"""Where every part of a stacked virtual disk is: the indexes of many layers composed into one. Pure.

Overlaying is associative, so a stack is composed pairwise as a tree: n entries in k layers cost O(n log k), in numpy,
and afterwards a read costs one binary search whatever the depth.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aenv.storage.extents import Extents

ZERO = -1  # the ``layer`` of a run that reads as zeros
_END = np.iinfo(np.int64).max

Longs = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Runs:
    """Parallel arrays sorted by ``start`` and disjoint, in bytes: ``start`` … ``end`` of the virtual disk is at
    ``position`` of blob number ``layer``, or zeros where ``layer`` is ZERO. What no run covers is a hole.
    """

    start: Longs
    end: Longs
    layer: NDArray[np.int32]
    position: Longs

    def __len__(self) -> int:
        return len(self.start)

    def pick(self, which: NDArray[np.bool_] | NDArray[np.intp] | slice) -> "Runs":
        return Runs(self.start[which], self.end[which], self.layer[which], self.position[which])


def empty() -> Runs:
    nothing = np.zeros(0, dtype=np.int64)
    return Runs(nothing, nothing, nothing.astype(np.int32), nothing)


def of_layer(extents: Extents, number: int) -> Runs:
    """The runs of one layer alone, which is blob ``number``."""
    start = extents.offset.astype(np.int64)
    layer = np.where(extents.zeroed, np.int32(ZERO), np.int32(number))
    return Runs(start, start + extents.length.astype(np.int64), layer, extents.source.astype(np.int64))


def clip(runs: Runs, begin: int, end: int) -> Runs:
    """The part of ``runs`` within ``begin`` … ``end``."""
    first = int(np.searchsorted(runs.end, begin, "right"))
    last = int(np.searchsorted(runs.start, end, "left"))
    part = runs.pick(slice(first, max(first, last)))
    start = np.maximum(part.start, begin)
    position = part.position + np.where(part.layer == ZERO, 0, start - part.start)
    return Runs(start, np.minimum(part.end, end), part.layer, position)


def intersect(runs: Runs, begin: Longs, end: Longs) -> Runs:
    """The parts of ``runs`` within the ranges ``begin`` … ``end``: sorted, disjoint, perhaps empty."""
    first = np.searchsorted(end, runs.start, "right")
    last = np.searchsorted(begin, runs.end, "left")
    count = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(runs)), count)
    window = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + first[which]
    start, stop = np.maximum(runs.start[which], begin[window]), np.minimum(runs.end[which], end[window])
    real = start < stop
    which, start, stop = which[real], start[real], stop[real]
    layer = runs.layer[which]
    position = runs.position[which] + np.where(layer == ZERO, 0, start - runs.start[which])
    return Runs(start, stop, layer, position)


def overlay(upper: Runs, lower: Runs) -> Runs:
    """``upper``, and ``lower`` where it has holes."""
    if not len(upper) or not len(lower):
        return upper if len(upper) else lower
    begin, end = holes(upper)
    pieces = intersect(lower, begin, end)
    return union(upper, pieces)


def union(one: Runs, other: Runs) -> Runs:
    """Both in one; they must not overlap."""
    at = np.arange(len(other)) + np.searchsorted(one.start, other.start)
    rest = np.ones(len(one) + len(other), dtype=np.bool_)
    rest[at] = False

    def weave(a: NDArray[T], b: NDArray[T]) -> NDArray[T]:
        out = np.empty(len(rest), dtype=a.dtype)
        out[rest], out[at] = a, b
        return out

    return Runs(
        weave(one.start, other.start), weave(one.end, other.end),
        weave(one.layer, other.layer), weave(one.position, other.position),
    )  # fmt: skip


def holes(runs: Runs, size: int = _END) -> tuple[Longs, Longs]:
    """Begin and end of what no run covers, up to ``size``; some of them may be empty."""
    return np.concatenate(([0], runs.end)), np.concatenate((runs.start, [size]))


def fill(runs: Runs, size: int) -> Runs:
    """``runs``, with zeros in the holes: it covers 0 … ``size`` without gaps."""
    begin, end = holes(runs, size)
    gap = begin < end
    nothing = np.zeros(int(gap.sum()), dtype=np.int64)
    return union(runs, Runs(begin[gap], end[gap], np.full(len(nothing), ZERO, dtype=np.int32), nothing))


def join(runs: Runs) -> Runs:
    """Neighbours that continue each other as one."""
    if len(runs) < 2:
        return runs
    same = (runs.end[:-1] == runs.start[1:]) & (runs.layer[:-1] == runs.layer[1:])
    same &= (runs.layer[1:] == ZERO) | (runs.position[:-1] + (runs.end - runs.start)[:-1] == runs.position[1:])
    first = np.flatnonzero(np.concatenate(([True], ~same)))
    last = np.concatenate((first[1:] - 1, [len(runs) - 1]))
    return Runs(runs.start[first], runs.end[last], runs.layer[first], runs.position[first])


def compose(layers: Sequence[Runs]) -> Runs:
    """All of them over each other, the last one on top."""
    if not layers:
        return empty()
    level = list(layers)
    while len(level) > 1:
        pairs = [overlay(level[i + 1], level[i]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return join(level[0])
