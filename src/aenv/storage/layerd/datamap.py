"""Where a stack has data and where zeros: the answer to lseek(2) with SEEK_DATA and SEEK_HOLE. Pure."""

import numpy as np

from aenv.storage.runs import ZERO, Runs


class DataMap:
    def __init__(self, runs: Runs, size: int) -> None:
        """``size`` of the disk in bytes; its end counts as a hole."""
        data = runs.pick(runs.layer != ZERO)
        # Runs of different layers that touch each other are one piece of data.
        begins = (
            np.concatenate(([True], data.start[1:] != data.end[:-1])) if len(data) else np.zeros(0, dtype=np.bool_)
        )
        ends = np.concatenate((begins[1:], [True])) if len(data) else begins
        self._start, self._end = data.start[begins], data.end[ends]
        self._size = size

    def seek(self, offset: int, *, data: bool) -> int | None:
        """The first byte of data, or of a hole, at or after ``offset``. None: there is no data any more."""
        at = int(np.searchsorted(self._end, offset, "right"))
        inside = at < len(self._start) and self._start[at] <= offset
        if data:
            if at == len(self._start):
                return None
            return max(int(self._start[at]), offset)
        return min(int(self._end[at]), self._size) if inside else offset
