"""One sealed, uncompressed overlaybd layer (LSMT): reading, writing, composing over a flat file.

Format: ``docs/internals`` and containerd/overlaybd's ``specs``; all integers little-endian, sectors of 512 bytes:
``header (4096) | data | index | trailer (4096)``. A layer becomes visible by one rename of a finished file, so a
torn file can only be one that somebody else damaged; the reader checks everything it relies on.
"""

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from aenv.errors import CapacityError, CorruptFileError

SECTOR = 512
BLOCK = 4096  # header, trailer and index are padded to it
MAGIC = b"LSMT\0\1\2\0" + bytes.fromhex("657E63D29444084CA2D2C8EC4FCFAE8A")
HEADER = struct.Struct("<24sIIQQQ37s37sBBBB256s")
HEADER_SIZE = 390
FLAG_HEADER, FLAG_DATA, FLAG_SEALED, FLAG_VALID = 1, 2, 4, 16
MAX_LENGTH = 16376  # sectors: the largest multiple of a page that fits in the 14 bits of ``length``
INVALID_OFFSET = (1 << 50) - 1
FICLONE = 0x40049409  # ioctl_ficlone(2)

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Extents:
    """Parallel arrays, in bytes, sorted by ``offset`` and disjoint. ``source`` is a position in the layer's file."""

    offset: Words
    length: Words
    source: Words
    zeroed: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.offset)


def _header(flags: int, index_offset: int, index_size: int, virtual_size: int, ident: bytes) -> bytes:
    packed = HEADER.pack(
        MAGIC, HEADER_SIZE, flags, index_offset, index_size, virtual_size, ident, b"", 0, 0, 1, 1, b""
    )
    return packed.ljust(BLOCK, b"\0")


def encode_index(offset: Words, length: Words, source: Words, zeroed: NDArray[np.bool_]) -> bytes:
    """Extents (bytes; any length, sector-aligned) as a padded on-disk index, long ones split."""
    limit = MAX_LENGTH * SECTOR
    pieces = (length + np.uint64(limit - 1)) // np.uint64(limit)
    which = np.repeat(np.arange(len(offset)), pieces.astype(np.int64))
    first = np.repeat(np.cumsum(pieces) - pieces, pieces.astype(np.int64))
    skip = (np.arange(len(which), dtype=np.uint64) - first) * np.uint64(limit)
    size = np.minimum(length[which] - skip, np.uint64(limit))
    count = -(-len(which) // 256) * 256
    words = np.zeros((count, 2), dtype="<u8")
    words[:, 0] = INVALID_OFFSET
    sectors = np.uint64(SECTOR)
    words[: len(which), 0] = (offset[which] + skip) // sectors | (size // sectors) << np.uint64(50)
    moffset = np.where(zeroed[which], np.uint64(0), (source[which] + skip) // sectors)
    words[: len(which), 1] = moffset | zeroed[which].astype(np.uint64) << np.uint64(55)
    return words.tobytes()


class LayerWriter:
    """Writes a layer at ``path`` through a temporary neighbour; nothing is visible before ``commit``.

    Extents must come in ascending order and not overlap. Raises CapacityError when the disk is full, and removes
    the temporary file whenever it is left without ``commit``. Nothing is synced: see ``commit``.
    """

    def __init__(self, path: Path, virtual_size: int) -> None:
        self._path = path
        self._size = virtual_size
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        self._position = BLOCK
        self._parts: list[tuple[Words, Words, Words, NDArray[np.bool_]]] = []
        self._fd = -1

    def __enter__(self) -> Self:
        with disk_errors(self._path):
            self._fd = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._temporary.unlink(missing_ok=True)

    @property
    def bytes_written(self) -> int:
        """Data bytes so far, without header and index."""
        return self._position - BLOCK

    def add(self, offset: Words, length: Words, data: memoryview | bytes) -> None:
        """Append extents whose contents are ``data``, back to back."""
        self._write(data, self._position)
        ends = np.cumsum(length, dtype=np.uint64)
        source = np.uint64(self._position) + ends - length
        self._parts.append((offset, length, source, np.zeros(len(offset), dtype=np.bool_)))
        self._position += len(data)

    def add_zeroed(self, offset: Words, length: Words) -> None:
        """Append extents that read as zeros."""
        if len(offset):
            self._parts.append((offset, length, np.zeros_like(offset), np.ones(len(offset), dtype=np.bool_)))

    def commit(self, durable: bool = False) -> None:
        """Write index, trailer and header and rename into place; ``durable`` syncs the file before that."""
        empty = np.zeros(0, dtype=np.uint64)
        parts = self._parts or [(empty, empty, empty, empty.astype(np.bool_))]
        offset, length, source = (np.concatenate([part[i] for part in parts]) for i in range(3))
        zeroed = np.concatenate([part[3] for part in parts])
        order = np.argsort(offset, kind="stable")
        offset, length, source, zeroed = merge(offset[order], length[order], source[order], zeroed[order])
        index = encode_index(offset, length, source, zeroed)
        ident = str(uuid.uuid4()).encode()
        sealed = FLAG_DATA | FLAG_SEALED | FLAG_VALID
        trailer = _header(sealed, self._position, len(index) // 16, self._size, ident)
        self._write(index + trailer, self._position)
        self._write(_header(sealed | FLAG_HEADER, 0, 0, self._size, ident), 0)
        with disk_errors(self._path):
            if durable:
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._temporary.replace(self._path)

    def _write(self, data: memoryview | bytes, position: int) -> None:
        with disk_errors(self._path):
            view = memoryview(data)
            while view:
                written = os.pwrite(self._fd, view, position)
                view, position = view[written:], position + written


def merge(
    offset: Words, length: Words, source: Words, zeroed: NDArray[np.bool_]
) -> tuple[Words, Words, Words, NDArray[np.bool_]]:
    """Join neighbours that continue each other both on the virtual disk and in the file."""
    if len(offset) < 2:
        return offset, length, source, zeroed
    joins = (offset[:-1] + length[:-1] == offset[1:]) & (zeroed[:-1] == zeroed[1:])
    joins &= zeroed[1:] | (source[:-1] + length[:-1] == source[1:])
    starts = np.flatnonzero(np.concatenate(([True], ~joins)))
    return offset[starts], np.add.reduceat(length, starts), source[starts], zeroed[starts]


class Layer:
    """A sealed layer opened for reading. Raises CorruptFileError on anything that is not a whole layer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.file_size = os.fstat(self._fd).st_size
            self.virtual_size, self.extents = self._load()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def fileno(self) -> int:
        return self._fd

    @contextlib.contextmanager
    def mapped(self) -> Iterator[mmap.mmap]:
        """The whole file, mapped read-only; ``Extents.source`` are positions in it."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        with mmap.mmap(self._fd, self.file_size, flags, mmap.PROT_READ) as data:
            yield data

    def read(self, offset: int, length: int, base: bytes | None = None) -> bytes:
        """``length`` bytes of the virtual disk; what the layer does not cover is ``base`` or zeros."""
        out = bytearray(base if base is not None else length)
        for at, size, source, zeroed in zip(*self._columns(), strict=True):
            start, end = max(at, offset), min(at + size, offset + length)
            if start < end:
                piece = bytes(end - start) if zeroed else os.pread(self._fd, end - start, source + start - at)
                out[start - offset : end - offset] = piece
        return bytes(out)

    def _columns(self) -> tuple[list[int], list[int], list[int], list[bool]]:
        e = self.extents
        return e.offset.tolist(), e.length.tolist(), e.source.tolist(), e.zeroed.tolist()

    def _bad(self, why: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path} is not a whole overlaybd layer: {why}.")

    def _load(self) -> tuple[int, Extents]:
        if self.file_size < 2 * BLOCK:
            raise self._bad("too short")
        head = self._parse(os.pread(self._fd, BLOCK, 0), header=True)
        tail = self._parse(os.pread(self._fd, BLOCK, self.file_size - BLOCK), header=False)
        index_offset, index_size, virtual_size = tail
        if head[2] != virtual_size:
            raise self._bad("header and trailer disagree")
        end = self.file_size - BLOCK
        if index_offset < BLOCK or index_offset % SECTOR or index_offset + index_size * 16 > end:
            raise self._bad("the index is outside the file")
        raw = os.pread(self._fd, index_size * 16, index_offset)
        if len(raw) != index_size * 16:
            raise self._bad("the index is cut off")
        words = np.frombuffer(raw, dtype="<u8").astype(np.uint64).reshape(-1, 2)
        first, second = words[:, 0], words[:, 1]
        offset, length = first & np.uint64(INVALID_OFFSET), first >> np.uint64(50)
        used = (length > 0) & (offset != np.uint64(INVALID_OFFSET))
        offset, length, second = offset[used], length[used], second[used]
        source, zeroed = second & np.uint64((1 << 55) - 1), (second >> np.uint64(55)) & np.uint64(1) != 0
        if len(offset):
            if np.any(offset[1:] < offset[:-1] + length[:-1]):
                raise self._bad("index entries overlap or are not sorted")
            if int((offset[-1] + length[-1]) * np.uint64(SECTOR)) > virtual_size:
                raise self._bad("an index entry is outside the virtual disk")
            data = ~zeroed
            sector = np.uint64(SECTOR)
            inside = (source >= np.uint64(BLOCK // SECTOR)) & ((source + length) <= np.uint64(index_offset // SECTOR))
            if np.any(data & ~inside):
                raise self._bad("an index entry points outside the data")
            offset, length, source = offset * sector, length * sector, source * sector
        return virtual_size, Extents(offset, length, source, zeroed)

    def _parse(self, block: bytes, header: bool) -> tuple[int, int, int]:
        magic, size, flags, index_offset, index_size, virtual_size, *_ = HEADER.unpack_from(block)
        if magic != MAGIC or size != HEADER_SIZE:
            raise self._bad("wrong magic")
        if not flags & FLAG_DATA or bool(flags & FLAG_HEADER) is not header:
            raise self._bad("it is not a data file")
        if not header and not flags & FLAG_SEALED:
            raise self._bad("it is not sealed")
        return index_offset, index_size, virtual_size


def compose(base: Path | None, delta: Path, out: Path, durable: bool = True) -> None:
    """Write ``out``: a sparse flat file with ``base``'s contents and the layer's over them.

    The base is cloned where the filesystem can (ioctl_ficlone(2)), else only its data extents are copied. ``out``
    appears by rename when complete, and is synced before that unless ``durable`` is false. Raises CapacityError.
    """
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        with Layer(delta) as layer, disk_errors(out):
            fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                if base is not None:
                    _clone(base, fd)
                os.ftruncate(fd, layer.virtual_size)
                _apply(layer, fd)
                if durable:
                    os.fsync(fd)
            finally:
                os.close(fd)
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _apply(layer: Layer, fd: int) -> None:
    for at, size, source, zeroed in zip(*layer._columns(), strict=True):
        if zeroed:
            _punch(fd, at, size)
        else:
            _copy(layer.fileno(), source, fd, at, size)


def _clone(base: Path, fd: int) -> None:
    source = os.open(base, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.ioctl(fd, FICLONE, source)
            return
        except OSError:
            pass  # another filesystem, or one without reflinks
        size = os.fstat(source).st_size
        os.ftruncate(fd, size)
        at = 0
        while at < size:
            try:
                start = os.lseek(source, at, os.SEEK_DATA)
            except OSError:  # ENXIO: only a hole is left
                break
            at = os.lseek(source, start, os.SEEK_HOLE)
            _copy(source, start, fd, start, at - start)
    finally:
        os.close(source)


def _copy(source: int, position: int, target: int, at: int, size: int) -> None:
    while size:
        copied = os.copy_file_range(source, target, size, position, at)
        if not copied:
            raise CorruptFileError("A file became shorter while it was copied.")
        position, at, size = position + copied, at + copied, size - copied


_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def _punch(fd: int, at: int, size: int) -> None:
    # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE: fallocate(2)
    if _libc.fallocate(fd, 3, at, size):
        zeros = bytes(1 << 20)
        while size:
            written = os.pwrite(fd, zeros[: min(size, len(zeros))], at)
            at, size = at + written, size - written


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn "no space" and "quota exceeded" into CapacityError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"No room left to write {path}.", "Delete sandboxes or snapshots, or enlarge the disk."
            ) from error
        raise
