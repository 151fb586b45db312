"""The index of one overlaybd layer: where each piece of its virtual disk is in its file. Pure; nothing is read here.

Format: ``docs/internals/layers.md``. An entry on disk is 128 bits, little-endian, in sectors of 512 bytes: word 0 is
``offset:50 | length:14``, word 1 is ``moffset:55 | zeroed:1 | tag:8``.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aenv.errors import CorruptFileError

SECTOR = 512
ENTRY = 16  # bytes
ENTRIES_PER_BLOCK = 256  # the index is padded to whole blocks of 4096 bytes
MAX_LENGTH = 16376  # sectors: the largest multiple of a page that fits in the 14 bits of ``length``
INVALID_OFFSET = (1 << 50) - 1  # marks padding
FIRST_SECTOR = 8  # of the data; overlaybd refuses a layer whose zeroed entries point outside the data
MAX_VIRTUAL_SIZE = INVALID_OFFSET * SECTOR  # bytes: what ``offset`` can address

Words = NDArray[np.uint64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Extents:
    """Parallel arrays, in bytes, sorted by ``offset`` and disjoint. ``source`` is a position in the layer's file."""

    offset: Words
    length: Words
    source: Words
    zeroed: Flags

    def __len__(self) -> int:
        return len(self.offset)


def merge(offset: Words, length: Words, source: Words, zeroed: Flags) -> tuple[Words, Words, Words, Flags]:
    """Join neighbours that continue each other both on the virtual disk and in the file."""
    if len(offset) < 2:
        return offset, length, source, zeroed
    joins = (offset[:-1] + length[:-1] == offset[1:]) & (zeroed[:-1] == zeroed[1:])
    joins &= zeroed[1:] | (source[:-1] + length[:-1] == source[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    return offset[starts], np.add.reduceat(length, starts), source[starts], zeroed[starts]


def encode_index(offset: Words, length: Words, source: Words, zeroed: Flags) -> bytes:
    """Extents (bytes; any length, sector-aligned) as a padded on-disk index, long ones split."""
    limit = MAX_LENGTH * SECTOR
    pieces = (length + np.uint64(limit - 1)) // np.uint64(limit)
    which = np.repeat(np.arange(len(offset)), pieces.astype(np.int64))
    first = np.repeat(np.cumsum(pieces) - pieces, pieces.astype(np.int64))
    skip = (np.arange(len(which), dtype=np.uint64) - first) * np.uint64(limit)
    size = np.minimum(length[which] - skip, np.uint64(limit))
    count = -(-len(which) // ENTRIES_PER_BLOCK) * ENTRIES_PER_BLOCK
    words = np.zeros((count, 2), dtype="<u8")
    words[:, 0] = INVALID_OFFSET
    sectors = np.uint64(SECTOR)
    words[: len(which), 0] = (offset[which] + skip) // sectors | (size // sectors) << np.uint64(50)
    moffset = np.where(zeroed[which], np.uint64(FIRST_SECTOR), (source[which] + skip) // sectors)
    words[: len(which), 1] = moffset | zeroed[which].astype(np.uint64) << np.uint64(55)
    return words.tobytes()


def decode_index(raw: bytes, virtual_size: int, data_start: int, data_end: int) -> Extents:
    """The entries of an index; padding is dropped and neighbours that continue each other are joined.

    Raises CorruptFileError unless entries are sorted and disjoint, lie within ``virtual_size``, and point into
    ``data_start`` … ``data_end`` of the file (all in bytes).
    """
    words = np.frombuffer(raw, dtype="<u8").astype(np.uint64).reshape(-1, 2)
    first, second = words[:, 0], words[:, 1]
    offset, length = first & np.uint64(INVALID_OFFSET), first >> np.uint64(50)
    used = (length > 0) & (offset != np.uint64(INVALID_OFFSET))
    if not used.all():
        offset, length, second = offset[used], length[used], second[used]
    source, zeroed = second & np.uint64((1 << 55) - 1), (second >> np.uint64(55)) & np.uint64(1) != 0
    if not len(offset):
        return Extents(offset, length, source, zeroed)
    if np.any(offset[1:] < offset[:-1] + length[:-1]):
        raise CorruptFileError("Index entries overlap or are not sorted.")
    sector = np.uint64(SECTOR)
    if int((offset[-1] + length[-1]) * sector) > virtual_size:
        raise CorruptFileError("An index entry is outside the virtual disk.")
    # Compared in sectors: in bytes an absurd position would overflow 64 bits.
    inside = (source >= np.uint64(data_start // SECTOR)) & ((source + length) <= np.uint64(data_end // SECTOR))
    if np.any(~zeroed & ~inside):
        raise CorruptFileError("An index entry points outside the data.")
    source = np.where(zeroed, np.uint64(0), source)
    return Extents(*merge(offset * sector, length * sector, source * sector, zeroed))
