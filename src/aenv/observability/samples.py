"""Metrics of sandboxes over time: bounded, in memory, 72 bytes a sample. No I/O.

They are lost when the server ends, which is fine for what they are: the next sample is seconds away.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

CAPACITY = 720  # samples kept of each sandbox: an hour at one in 5 s, 52 kB


@dataclass(frozen=True, slots=True)
class Sample:
    """One reading. Sizes are bytes, ``time`` is Unix seconds of the node's clock."""

    time: float
    cpu_count: float
    cpu_used_pct: float
    mem_used: float
    mem_total: float
    mem_cache: float
    disk_used: float
    disk_total: float


_WIDTH = len(Sample.__dataclass_fields__)


def parse(body: Mapping[str, object], time: float) -> Sample:
    """A sample from envd's ``GET /metrics``. ValueError for anything else."""

    def number(name: str) -> float:
        value = body.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"no number {name!r} among the metrics")
        return float(value)

    fields = ("cpu_count", "cpu_used_pct", "mem_used", "mem_total", "mem_cache", "disk_used", "disk_total")
    return Sample(time, *map(number, fields))


class History:
    """The latest samples of one sandbox, in order of time."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._times = array("d")
        self._rows = array("d")

    def add(self, sample: Sample) -> None:
        if self._times and sample.time <= self._times[-1]:
            return  # the clock was set back; what is known stays in order
        self._times.append(sample.time)
        self._rows.extend(astuple(sample))
        # Dropped in blocks, so that adding stays cheap.
        if len(self._times) >= self._capacity + self._capacity // 8:
            surplus = len(self._times) - self._capacity
            del self._times[:surplus]
            del self._rows[: surplus * _WIDTH]

    def between(self, start: float | None, end: float | None) -> Sequence[Sample]:
        """Samples from ``start`` to ``end`` (Unix seconds, whole second of ``end`` included), oldest first."""
        first = 0 if start is None else bisect_left(self._times, start)
        last = len(self._times) if end is None else bisect_right(self._times, end + 0.999)
        first = max(first, last - self._capacity) if end is None else first
        return [self._sample(index) for index in range(first, last)]

    @property
    def latest(self) -> Sample | None:
        return self._sample(len(self._times) - 1) if self._times else None

    def _sample(self, index: int) -> Sample:
        return Sample(*self._rows[index * _WIDTH : (index + 1) * _WIDTH])
