"""ZFile: a compressed file that is read by range (containerd/overlaybd, ``docs/specs/zfile.md``).

``header (512) | compressed blocks | index | trailer (512)``, little-endian. The index is one u32 per block: its
stored size. A block is followed by a checksum when ``verify`` is set. The trailer wins over the header.
"""

import os
import struct
import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import crc32c
import lz4.block
import numpy as np
import zstandard

from aenv.errors import CorruptFileError
from aenv.storage.lsmt import disk_errors
from aenv.storage.source import FileSource, Source, check_range

SPACE = 512  # header and trailer
MAGIC = b"ZFile\0\1\0" + bytes.fromhex("74756A692E79796640416C6962616261")
HEADER = struct.Struct("<24sIIQQQQII IBBB5xIB7x")
HEADER_SIZE = 96
FLAG_HEADER, FLAG_DATA, FLAG_SEALED, FLAG_VALID, FLAG_DIGEST, FLAG_INDEX_COMPRESSED = 1, 2, 4, 8, 16, 32
ALGORITHMS = {"lz4": 1, "zstd": 2}
LZ4, ZSTD = 1, 2
CHECKSUM = 4  # bytes after each block
CHECKSUM_START = 100007  # overlaybd continues the checksum of every block from this value
# overlaybd's reader packs the offsets of 64 KiB into 16 bits, and takes whole powers of two only.
MIN_BLOCK, MAX_BLOCK = 512, 65536
DEFAULT_BLOCK = 16384  # docs/internals/layers.md: nearly the ratio of larger ones, half their cost to read a page
DEFAULT_LEVEL = 1

Algorithm = Literal["zstd", "lz4"]


def checksum(data: bytes | memoryview, start: int = 0) -> int:
    """overlaybd's CRC32C: the bare register, which is inverted neither before nor after (unlike RFC 3720's)."""
    return crc32c.crc32c(data, start ^ 0xFFFFFFFF) ^ 0xFFFFFFFF


def is_zfile(source: Source) -> bool:
    return source.size >= 2 * SPACE and source.read(0, len(MAGIC)) == MAGIC


@dataclass(frozen=True, slots=True)
class Header:
    """What a reader needs of header and trailer; sizes in bytes."""

    flags: int
    index_offset: int
    index_size: int  # entries
    original_size: int
    index_checksum: int
    block_size: int
    algorithm: int
    level: int
    dictionary_size: int
    checksums: bool

    def encode(self) -> bytes:
        def pack(digest: int) -> bytes:
            return HEADER.pack(
                MAGIC, HEADER_SIZE, digest, self.flags, self.index_offset, self.index_size, self.original_size,
                self.index_checksum, 0, self.block_size, self.algorithm, self.level, 0, 0, self.checksums,
            ).ljust(SPACE, b"\0")  # fmt: skip

        return pack(checksum(pack(0)))


def parse_header(block: bytes) -> Header:
    """Header or trailer from its 512 bytes. Raises CorruptFileError."""
    (
        magic, size, digest, flags, index_offset, index_size, original_size, index_checksum, _,
        block_size, algorithm, level, use_dictionary, dictionary_size, checksums,
    ) = HEADER.unpack_from(block)  # fmt: skip
    if magic != MAGIC or size != HEADER_SIZE:
        raise _bad("wrong magic")
    if flags & FLAG_DIGEST and checksum(block[:28] + bytes(4) + block[32:]) != digest:
        raise _bad("a header's checksum is wrong")
    if not flags & FLAG_DATA:
        raise _bad("it is not a data file")
    if use_dictionary or dictionary_size:
        raise _bad("it needs a dictionary, which no overlaybd tool writes and this reader does not know")
    if flags & FLAG_INDEX_COMPRESSED:
        raise _bad("its index is compressed, which no overlaybd tool writes and this reader does not know")
    if algorithm not in (LZ4, ZSTD):
        raise _bad(f"compression {algorithm} is not known")
    if not MIN_BLOCK <= block_size <= MAX_BLOCK or block_size & (block_size - 1):
        raise _bad(f"blocks of {block_size} bytes are not possible")
    return Header(
        flags, index_offset, index_size, original_size, index_checksum,
        block_size, algorithm, level, dictionary_size, bool(checksums),
    )  # fmt: skip


class ZFileSource:
    """The uncompressed bytes of a ZFile. Raises CorruptFileError for a damaged one, at once or when read.

    A read takes one read of ``source`` for any number of blocks (up to 4 MiB at once). Memory: 8 bytes per block, and
    the last few blocks of which only a part was wanted: what follows is mostly wanted next.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        if source.size < 2 * SPACE:
            raise _bad("it is too short")
        head = parse_header(source.read(0, SPACE))
        end = source.size - SPACE
        self.header = trailer = parse_header(source.read(end, SPACE))
        if not head.flags & FLAG_HEADER or trailer.flags & FLAG_HEADER or not trailer.flags & FLAG_SEALED:
            raise _bad("it is not complete")
        if head.block_size != trailer.block_size or head.algorithm != trailer.algorithm:
            raise _bad("header and trailer disagree")
        if trailer.index_size != -(-trailer.original_size // trailer.block_size):
            raise _bad(f"{trailer.index_size} blocks cannot hold {trailer.original_size} bytes")
        if trailer.index_offset < SPACE or trailer.index_offset + trailer.index_size * 4 > end:
            raise _bad("the index is outside the file")
        raw = source.read(trailer.index_offset, trailer.index_size * 4)
        if trailer.flags & FLAG_DIGEST and checksum(raw) != trailer.index_checksum:
            raise _bad("the index's checksum is wrong")
        sizes = np.frombuffer(raw, dtype="<u4").astype(np.int64)
        smallest = CHECKSUM if trailer.checksums else 0
        if np.any(sizes <= smallest) or np.any(sizes > 2 * trailer.block_size + SPACE):
            raise _bad("a block's size is not possible")
        offsets = np.concatenate(([0], np.cumsum(sizes))) + SPACE
        if offsets[-1] > trailer.index_offset:
            raise _bad("blocks reach into the index")
        self._offsets: memoryview[int] = offsets.data
        self._decode = _decode_lz4 if trailer.algorithm == LZ4 else _decode_zstd
        self._recent: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self.header.original_size

    def stored_range(self, offset: int, length: int) -> tuple[int, int]:
        """Which bytes of the stored file (offset, length) a read of these uncompressed bytes needs."""
        check_range(self, offset, length, "A ZFile")
        if not length:
            return SPACE, 0
        first, last = self._blocks(offset, length)
        return self._offsets[first], self._offsets[last] - self._offsets[first]

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, "A ZFile")
        if not length:
            return b""
        first, last = self._blocks(offset, length)
        skip = offset - first * self.header.block_size
        parts: list[bytes] = []
        head = self._recall(first)
        tail = self._recall(last - 1) if last - 1 > first else None
        begin, end = first + (head is not None), last - (tail is not None)
        if head is not None:
            parts.append(head)
        while begin < end:
            stop = min(end, begin + max(1, _READ // self.header.block_size))
            parts += self._load(begin, stop)
            begin = stop
        if tail is not None:
            parts.append(tail)
        if skip:
            self._remember(first, parts[0])
        if (offset + length) % self.header.block_size and offset + length < self.size:
            self._remember(last - 1, parts[-1])
        if len(parts) == 1:
            return parts[0][skip : skip + length]
        parts[0] = parts[0][skip:]
        parts[-1] = parts[-1][: offset + length - (last - 1) * self.header.block_size]
        return b"".join(parts)

    def _blocks(self, offset: int, length: int) -> tuple[int, int]:
        block = self.header.block_size
        return offset // block, (offset + length - 1) // block + 1

    def _load(self, first: int, last: int) -> list[bytes]:
        base = self._offsets[first]
        stored = memoryview(self._source.read(base, self._offsets[last] - base))
        block, checksums = self.header.block_size, self.header.checksums
        out = []
        for number in range(first, last):
            data = stored[self._offsets[number] - base : self._offsets[number + 1] - base]
            if checksums:
                (expected,) = _CHECKSUM.unpack(data[-CHECKSUM:])
                data = data[:-CHECKSUM]
                if checksum(data, CHECKSUM_START) != expected:
                    raise _bad(f"the checksum of block {number} is wrong")
            length = min(block, self.size - number * block)
            try:
                plain = self._decode(data, length)
            except (lz4.block.LZ4BlockError, zstandard.ZstdError, ValueError) as error:
                raise _bad(f"block {number} cannot be decompressed ({error})") from error
            if len(plain) != length:
                raise _bad(f"block {number} has {len(plain)} bytes instead of {length}")
            out.append(plain)
        return out

    def _recall(self, number: int) -> bytes | None:
        with self._lock:
            return self._recent.get(number)

    def _remember(self, number: int, data: bytes) -> None:
        with self._lock:
            self._recent[number] = data
            self._recent.move_to_end(number)
            while len(self._recent) > _RECENT:
                self._recent.popitem(last=False)


_READ = 4 << 20  # uncompressed bytes
_RECENT = 4  # blocks
_CHECKSUM = struct.Struct("<I")
_threads = threading.local()  # zstandard's objects are not for several threads at once


def _decode_lz4(data: memoryview, length: int) -> bytes:
    out: bytes = lz4.block.decompress(data, uncompressed_size=length)
    return out


def _decode_zstd(data: memoryview, length: int) -> bytes:
    # The library allocates what a frame claims: look at the claim first.
    if zstandard.frame_content_size(data) not in (-1, length):
        raise ValueError("another size is claimed")
    decompressor = getattr(_threads, "decompressor", None)
    if decompressor is None:
        decompressor = _threads.decompressor = zstandard.ZstdDecompressor()
    return decompressor.decompress(data, max_output_size=length)


def _bad(why: str) -> CorruptFileError:
    return CorruptFileError(f"This is not a readable ZFile: {why}.")


def write_zfile(
    source: Source | Path,
    out: Path,
    algo: Algorithm = "zstd",
    level: int | None = None,
    block_size: int = DEFAULT_BLOCK,
    threads: int | None = None,
    durable: bool = False,
) -> None:
    """Compress ``source`` (bytes, mostly an overlaybd layer) to ``out``, which appears by rename when complete.

    ``level`` is zstd's (1-19); LZ4 has none. ``block_size`` (a power of two, 512 to 65536 bytes) is what a reader
    must decompress at least; overlaybd's own reader takes incompressible blocks up to 32768 only. ``threads`` is by
    default the number of CPUs, and does not change the output. Raises CapacityError, SourceError.
    """
    if not MIN_BLOCK <= block_size <= MAX_BLOCK or block_size & (block_size - 1):
        raise ValueError(f"A block of {block_size} bytes is not possible.")
    if isinstance(source, Path):
        with FileSource(source) as file:
            write_zfile(file, out, algo, level, block_size, threads, durable)
        return
    level = 0 if algo == "lz4" else DEFAULT_LEVEL if level is None else level
    flags = FLAG_DATA | FLAG_DIGEST
    header = Header(flags | FLAG_HEADER, 0, 0, 0, 0, block_size, ALGORITHMS[algo], level, 0, True)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex[:8]}")
    try:
        with disk_errors(out), temporary.open("xb") as target:
            target.write(header.encode())
            sizes: list[int] = []
            for stored, lengths in _compressed(source, algo, level, block_size, threads or os.cpu_count() or 1):
                target.write(stored)
                sizes += lengths
            index = np.array(sizes, dtype="<u4").tobytes()
            trailer = Header(
                flags | FLAG_SEALED, SPACE + sum(sizes), len(sizes), source.size, checksum(index),
                block_size, ALGORITHMS[algo], level, 0, True,
            )  # fmt: skip
            target.write(index + trailer.encode())
            target.flush()
            if durable:
                os.fsync(target.fileno())
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)


def _compressed(
    source: Source, algorithm: Algorithm, level: int, block_size: int, threads: int
) -> Iterator[tuple[bytes, list[int]]]:
    """Stored blocks in order, in pieces: bytes, and the sizes of the blocks in them. Memory is bounded."""
    step = 1 << 20

    def job(at: int) -> tuple[bytes, list[int]]:
        plain = memoryview(source.read(at, min(step, source.size - at)))
        encode = _encoder(algorithm, level)
        parts: list[bytes] = []
        sizes: list[int] = []
        for start in range(0, len(plain), block_size):
            data = encode(plain[start : start + block_size])
            parts += (data, _CHECKSUM.pack(checksum(data, CHECKSUM_START)))
            sizes.append(len(data) + CHECKSUM)
        return b"".join(parts), sizes

    with ThreadPoolExecutor(threads, thread_name_prefix="zfile") as pool:
        pending: deque[Future[tuple[bytes, list[int]]]] = deque()
        for at in range(0, source.size, step):
            pending.append(pool.submit(job, at))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _encoder(algorithm: Algorithm, level: int) -> Callable[[memoryview], bytes]:
    if algorithm == "lz4":
        return lambda block: lz4.block.compress(block, store_size=False)
    made = getattr(_threads, "compressor", None)
    if made is None or made[0] != level:
        made = _threads.compressor = (level, zstandard.ZstdCompressor(level=level))
    compressor: zstandard.ZstdCompressor = made[1]
    return compressor.compress
