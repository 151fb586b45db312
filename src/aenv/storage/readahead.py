"""Recognising that a file is read from front to back, and how far to read ahead then. Pure; units are bytes.

Several streams are followed at once, because a stack of layers, and several guests, read a layer in several places. A
read belongs to a stream when it begins where the stream's last one ended, or little behind it (pages that a newer
layer has replaced are skipped). Scattered page faults never make one: a stream must have read ``START`` bytes, and
what is read ahead is in proportion to what it has read, so at most that share is fetched in vain.
"""

from dataclasses import dataclass, field

STREAMS = 8
START = 512 << 10
SHARE = 2  # half of what the stream has read so far
LARGEST = 8 << 20  # at 100 ms to the source, 80 MB/s; at 10 ms, more than a disk gives
GAP = 16 << 10  # that a stream may skip
BACK = 64 << 10  # that it may read again


@dataclass(slots=True)
class _Stream:
    end: int  # where the next read is expected
    length: int  # of the stream so far
    ahead: int = 0  # up to where it was fetched ahead


@dataclass(slots=True)
class ReadAhead:
    """The streams of one layer."""

    _streams: list[_Stream] = field(default_factory=list)

    def after(self, begin: int, end: int) -> tuple[int, int]:
        """``begin`` … ``end`` is read; what to fetch ahead, as (begin, end), equal when nothing."""
        stream = self._find(begin)
        if stream is None:
            self._streams.insert(0, _Stream(end, end - begin))
            del self._streams[STREAMS:]
            return end, end
        if end <= stream.end:
            return end, end
        stream.length += end - stream.end
        stream.end = end
        window = min(stream.length // SHARE, LARGEST)
        if stream.length < START or stream.ahead >= end + window // 2:
            return end, end
        start, stream.ahead = max(stream.ahead, end), end + window
        return start, stream.ahead

    def _find(self, begin: int) -> _Stream | None:
        for i, stream in enumerate(self._streams):
            if stream.end - BACK <= begin <= stream.end + GAP:
                if i:
                    self._streams.insert(0, self._streams.pop(i))
                return stream
        return None
