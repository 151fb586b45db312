"""Recognising that a file is read from front to back, and how far to read ahead then. Pure; units are blocks.

Several streams are followed at once, because a stack of layers, and several guests, read a layer in several places. A
single fault never starts one: a stream must have gone on ``START`` times, by reads that begin where the last one
ended (or at most ``GAP`` behind it, since pages that a newer layer has replaced are skipped).
"""

from dataclasses import dataclass, field

STREAMS = 4
START = 3


@dataclass(slots=True)
class _Stream:
    end: int  # where the next read is expected
    length: int = 1  # reads so far
    window: int = 0
    ahead: int = 0  # up to where blocks were asked for


@dataclass(slots=True)
class ReadAhead:
    """One layer's streams. ``smallest`` and ``largest`` bound the window, which doubles as a stream goes on."""

    smallest: int
    largest: int
    gap: int
    _streams: list[_Stream] = field(default_factory=list)

    def after(self, first: int, end: int) -> tuple[int, int]:
        """Blocks ``first`` … ``end`` are read; which to fetch ahead, as (first, end), equal when none."""
        stream = self._find(first)
        if stream is None:
            self._streams.insert(0, _Stream(end))
            del self._streams[STREAMS:]
            return end, end
        if end <= stream.end:  # still in the block that the last read ended in
            return end, end
        stream.end = end
        stream.length += 1
        if stream.length < START:
            return end, end
        if stream.ahead > end + stream.window // 2:
            return end, end
        stream.window = min(max(stream.window * 2, self.smallest), self.largest)
        begin = max(stream.ahead, end)
        stream.ahead = end + stream.window
        return begin, max(begin, stream.ahead)

    def _find(self, first: int) -> _Stream | None:
        for i, stream in enumerate(self._streams):
            if stream.end - 1 <= first <= stream.end + self.gap:
                if i:
                    self._streams.insert(0, self._streams.pop(i))
                return stream
        return None
