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
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np

from aenv.errors import CapacityError, CorruptFileError
from aenv.storage.extents import (
    ENTRY,
    MAX_VIRTUAL_SIZE,
    SECTOR,
    Extents,
    Flags,
    Words,
    decode_index,
    encode_index,
    merge,
)
from aenv.storage.source import FileSource, Source

BLOCK = 4096  # header, trailer and index are padded to it
MAGIC = b"LSMT\0\1\2\0" + bytes.fromhex("657E63D29444084CA2D2C8EC4FCFAE8A")
HEADER = struct.Struct("<24sIIQQQ37s37sBBBB256s")
HEADER_SIZE = 390
FLAG_HEADER, FLAG_DATA, FLAG_SEALED, FLAG_VALID = 1, 2, 4, 32
MAX_INDEX_RATIO = 64  # measured: indexes of scattered pages shrink 7 to 20 times, a bomb of nothing 600 times
FICLONE = 0x40049409  # ioctl_ficlone(2)

# Every layer carries the nil UUID: the digest of its bytes is its name, and equal contents are equal bytes.
NIL_UUID = b"00000000-0000-0000-0000-000000000000"


def _header(flags: int, index_offset: int, index_size: int, virtual_size: int) -> bytes:
    packed = HEADER.pack(
        MAGIC, HEADER_SIZE, flags, index_offset, index_size, virtual_size, NIL_UUID, b"", 0, 0, 1, 1, b""
    )
    return packed.ljust(BLOCK, b"\0")


def frame(
    offset: Words, length: Words, source: Words, zeroed: Flags, data_end: int, virtual_size: int
) -> tuple[bytes, bytes]:
    """What a layer has before its data, and what it has behind it, from byte ``data_end`` on.

    The extents (bytes) are sorted by ``offset`` and disjoint; ``source`` is their position in the file.
    """
    index = encode_index(*merge(offset, length, source, zeroed))
    sealed = FLAG_DATA | FLAG_SEALED
    trailer = _header(sealed | FLAG_VALID, data_end, len(index) // ENTRY, virtual_size)
    return _header(sealed | FLAG_HEADER, 0, 0, virtual_size), index + trailer


class LayerWriter:
    """Writes a layer at ``path`` through a temporary neighbour; nothing is visible before ``commit``.

    Extents must not overlap; the index is sorted at the end. Raises CapacityError when the disk is full, and removes
    the temporary file whenever it is left without ``commit``. Nothing is synced: see ``commit``.
    """

    def __init__(self, path: Path, virtual_size: int) -> None:
        self._path = path
        self._size = virtual_size
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        self._lock = threading.Lock()
        self._position = BLOCK
        self._parts: list[tuple[Words, Words, Words, Flags]] = []
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

    def add(self, offset: Words, length: Words, data: memoryview | bytes | bytearray) -> None:
        """Append extents whose contents are ``data``, back to back. Threads may do so side by side."""
        with self._lock:
            position = self._position
            self._position += len(data)
        source = np.uint64(position) + np.cumsum(length, dtype=np.uint64) - length
        self._parts.append((offset, length, source, np.zeros(len(offset), dtype=np.bool_)))
        self._write(data, position)

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
        head, tail = frame(offset[order], length[order], source[order], zeroed[order], self._position, self._size)
        self._write(tail, self._position)
        self._write(head, 0)
        with disk_errors(self._path):
            if durable:
                os.fsync(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._temporary.replace(self._path)

    def _write(self, data: memoryview | bytes | bytearray, position: int) -> None:
        with disk_errors(self._path):
            view = memoryview(data)
            while view:
                written = os.pwrite(self._fd, view, position)
                view, position = view[written:], position + written


def read_layer(source: Source, stored: int | None = None) -> tuple[int, Extents]:
    """Virtual size in bytes and extents of the plain layer whose bytes are ``source``.

    ``stored`` is what these bytes take when they are compressed. Raises CorruptFileError on anything that is not a
    whole layer, SourceError when it cannot be read now. Memory is in proportion to what is stored.
    """
    if source.size < 2 * BLOCK:
        raise _bad("it is too short")
    head = _parse(source.read(0, BLOCK), header=True)
    end = source.size - BLOCK
    index_offset, index_size, virtual_size = _parse(source.read(end, BLOCK), header=False)
    if head[2] != virtual_size:
        raise _bad("header and trailer disagree")
    if virtual_size > MAX_VIRTUAL_SIZE:
        raise _bad(f"a virtual disk of {virtual_size} bytes cannot be")
    if index_offset < BLOCK or index_offset % SECTOR or index_offset + index_size * ENTRY > end:
        raise _bad("the index is outside the file")
    if stored is not None and index_size * ENTRY > MAX_INDEX_RATIO * stored + (1 << 20):
        raise _bad("the index is out of proportion to the file")
    raw = source.read(index_offset, index_size * ENTRY)
    return virtual_size, decode_index(raw, virtual_size, BLOCK, index_offset)


def _parse(block: bytes, header: bool) -> tuple[int, int, int]:
    magic, size, flags, index_offset, index_size, virtual_size, *_ = HEADER.unpack_from(block)
    if magic != MAGIC or size != HEADER_SIZE:
        raise _bad("wrong magic")
    if not flags & FLAG_DATA or bool(flags & FLAG_HEADER) is not header:
        raise _bad("it is not a data file")
    if not header and not flags & FLAG_SEALED:
        raise _bad("it is not sealed")
    return index_offset, index_size, virtual_size


def _bad(why: str) -> CorruptFileError:
    return CorruptFileError(f"This is not a whole overlaybd layer: {why}.")


class Layer:
    """A sealed, plain layer in a file of this host. Raises CorruptFileError on anything that is not a whole layer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = FileSource(path)
        try:
            self.file_size = self._file.size
            self.virtual_size, self.extents = read_layer(self._file)
        except CorruptFileError as error:
            self._file.close()
            raise CorruptFileError(f"{path}: {error.message}") from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fileno(self) -> int:
        return self._file.fileno()

    @contextlib.contextmanager
    def mapped(self) -> Iterator[mmap.mmap]:
        """The whole file, mapped read-only; ``Extents.source`` are positions in it."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        with mmap.mmap(self.fileno(), self.file_size, flags, mmap.PROT_READ) as data:
            yield data

    def read(self, offset: int, length: int, base: bytes | None = None) -> bytes:
        """``length`` bytes of the virtual disk; what the layer does not cover is ``base`` or zeros."""
        out = bytearray(base if base is not None else length)
        e = self.extents
        first = int(np.searchsorted(e.offset + e.length, np.uint64(offset), "right"))
        last = int(np.searchsorted(e.offset, np.uint64(offset + length), "left"))
        for at, size, source, zeroed in columns(e, slice(first, max(first, last))):
            start, end = max(at, offset), min(at + size, offset + length)
            piece = bytes(end - start) if zeroed else self._file.read(source + start - at, end - start)
            out[start - offset : end - offset] = piece
        return bytes(out)


def columns(extents: Extents, which: slice = slice(None)) -> Iterator[tuple[int, int, int, bool]]:
    """Extents one by one: offset, length, source, zeroed."""
    e = extents
    return zip(
        e.offset[which].tolist(), e.length[which].tolist(), e.source[which].tolist(), e.zeroed[which].tolist(),
        strict=True,
    )  # fmt: skip


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
    for at, size, source, zeroed in columns(layer.extents):
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
