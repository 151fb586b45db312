"""Which parts of a guest's memory it used: what a VM that starts from a snapshot will most probably read first. Pure.

At a capture the pages that the VM has mapped are those that it touched since it was started, and its children will
touch most of them again. A node that has the memory elsewhere reads those ahead, many at a time, instead of waiting
for the guest to ask for one after the other.
"""

import base64
import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aenv.errors import CorruptFileError

UNIT = 32 << 10  # bytes that one bit stands for: what the kernel reads around a fault
MAX_BITS = (1 << 46) // UNIT  # of a memory of 64 TiB

Units = NDArray[np.bool_]


def of_runs(first: NDArray[np.uint64], length: NDArray[np.uint64], page: int, size: int) -> Units:
    """The units of ``size`` bytes that runs of pages touch."""
    units = np.zeros(-(-size // UNIT), dtype=np.int64)
    per = UNIT // page
    starts, ends = first // np.uint64(per), -(-(first + length).astype(np.int64) // per)
    np.add.at(units, starts.astype(np.int64), 1)
    np.add.at(units, ends[ends < len(units)], -1)
    return np.cumsum(units) > 0


def encode(units: Units) -> str:
    """As text: the number of units, then their bits, compressed."""
    return f"{len(units)}:{base64.b64encode(zlib.compress(np.packbits(units).tobytes(), 9)).decode()}"


def decode(text: str) -> Units:
    """Raises CorruptFileError for anything else than what ``encode`` makes."""
    count, _, rest = text.partition(":")
    try:
        bits = int(count)
        if not 0 <= bits <= MAX_BITS:
            raise ValueError(f"{bits} units")
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(rest, validate=True), bits // 8 + 2)
        if len(data) != -(-bits // 8) or unpacker.unconsumed_tail:
            raise ValueError("another number of bits")
        return np.unpackbits(np.frombuffer(data, dtype=np.uint8), count=bits).astype(np.bool_)
    except (ValueError, zlib.error) as error:
        raise CorruptFileError(f"This does not say which memory is in use: {error}.") from error


def ranges(units: Units, longest: int) -> Iterator[tuple[int, int]]:
    """Offset and length in bytes of what is set, in order, in pieces of at most ``longest`` bytes."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], units, [False]))))
    for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        for at in range(start * UNIT, end * UNIT, longest):
            yield at, min(longest, end * UNIT - at)
