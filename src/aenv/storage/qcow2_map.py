"""Which clusters one qcow2 file itself holds, read from its tables (QEMU's ``docs/interop/qcow2.txt``).

The file must be frozen: nothing writes it, and QEMU has flushed it (``blockdev-snapshot`` does). Whatever is below it
in the backing chain is not looked at. Big-endian. An L1 entry names an L2 table, an L2 entry a cluster: bits 9-55 are
its position, bit 0 says that it reads as zeros, bit 62 that it is compressed.
"""

import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aenv.errors import CorruptFileError
from aenv.storage.extents import MAX_VIRTUAL_SIZE
from aenv.storage.qcow2 import MAGIC
from aenv.storage.runs import ZERO, Longs, Runs, clip, join
from aenv.storage.source import Source

_FIELDS = struct.Struct(">4sI12xIQIIQ")  # magic, version, cluster_bits, size, encryption, L1 entries, L1 position
_INCOMPATIBLE = 72
_DIRTY, _CORRUPT, _EXTERNAL_DATA, _COMPRESSION, _EXTENDED_L2 = 1, 2, 4, 8, 16
_OFFSET = np.uint64((1 << 56) - (1 << 9))
_COMPRESSED, _ZERO = np.uint64(1 << 62), np.uint64(1)
MIN_CLUSTER_BITS, MAX_CLUSTER_BITS = 12, 21  # a page; the format's limit

Entries = NDArray[np.uint64]


def allocated(file: Source, name: object = "The file") -> tuple[int, Runs]:
    """Virtual size in bytes, and what the file itself holds: data at ``position`` of the file, or zeros.

    The file may end within its last cluster; what is missing reads as zeros, as in QEMU. Raises CorruptFileError for
    a damaged or absurd image and for one with features that overlays of a node do not have, SourceError.
    """

    def bad(why: str) -> CorruptFileError:
        return CorruptFileError(f"{name} is not a usable qcow2 overlay: {why}.")

    if file.size < 104:
        raise bad("it is too short")
    header = file.read(0, 104)
    magic, version, cluster_bits, size, encryption, l1_entries, l1_position = _FIELDS.unpack_from(header)
    (incompatible,) = struct.unpack_from(">Q", header, _INCOMPATIBLE)
    if magic != MAGIC or version != 3:
        raise bad("only version 3 is read")
    if encryption:
        raise bad("it is encrypted")
    if incompatible & ~_DIRTY:  # dirty: its reference counts may be wrong, its tables are right
        raise bad(f"it has {_describe(incompatible)}")
    if not MIN_CLUSTER_BITS <= cluster_bits <= MAX_CLUSTER_BITS:
        raise bad(f"clusters of 2^{cluster_bits} bytes are not supported")
    if size > MAX_VIRTUAL_SIZE or size % 512:
        raise bad(f"a disk of {size} bytes cannot be")
    cluster = 1 << cluster_bits
    per_table = cluster // 8
    needed = -(-size // (cluster * per_table))
    if l1_entries < needed:
        raise bad("its L1 table is too small")
    if l1_position % cluster or l1_position + needed * 8 > file.size:
        raise bad("its L1 table is outside the file")
    l1 = np.frombuffer(file.read(l1_position, needed * 8), dtype=">u8").astype(np.uint64)
    which = np.flatnonzero(l1 & _OFFSET)
    tables = _positions(l1[which], cluster, file.size, bad)
    guests, hosts = [], []
    for first, table in zip((which * per_table).tolist(), tables.tolist(), strict=True):
        if table + cluster > file.size:
            raise bad("an L2 table is outside the file")
        entries = np.frombuffer(file.read(table, cluster), dtype=">u8")
        used = np.flatnonzero(entries)
        guests.append(used + first)
        hosts.append(entries[used].astype(np.uint64))
    guest = np.concatenate(guests) if guests else np.zeros(0, dtype=np.int64)
    host = np.concatenate(hosts) if hosts else np.zeros(0, dtype=np.uint64)
    return size, _runs(guest.astype(np.int64), host, cluster, size, file.size, bad)


def _runs(
    guest: Longs, host: Entries, cluster: int, size: int, file_size: int, bad: Callable[[str], CorruptFileError]
) -> Runs:
    if np.any(host & _COMPRESSED):
        raise bad("it has compressed clusters")
    zero = host & _ZERO != 0
    known = zero | (host & _OFFSET != 0)
    guest, host, zero = guest[known], host[known], zero[known]
    position = np.zeros(len(guest), dtype=np.int64)
    position[~zero] = _positions(host[~zero], cluster, file_size, bad)
    start = guest * cluster
    runs = Runs(start, start + cluster, np.where(zero, np.int32(ZERO), np.int32(0)), position)
    return clip(join(runs), 0, size)


def _positions(entries: Entries, cluster: int, file_size: int, bad: Callable[[str], CorruptFileError]) -> Longs:
    """Where tables or clusters are. Each is used once: otherwise a small file could claim to hold any amount."""
    position = (entries & _OFFSET).astype(np.int64)
    if np.any(position % cluster) or np.any(position >= file_size) or np.any(position == 0):
        raise bad("a table points outside the file")
    if len(np.unique(position)) != len(position):
        raise bad("a cluster is used twice")
    return position


def _describe(incompatible: int) -> str:
    names = {
        _CORRUPT: "been marked corrupt",
        _EXTERNAL_DATA: "an external data file",
        _COMPRESSION: "another compression type",
        _EXTENDED_L2: "subclusters",
    }
    return " and ".join(text for bit, text in names.items() if incompatible & bit) or "features that are not known"
