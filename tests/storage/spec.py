"""overlaybd layers and ZFiles written and read a second time, from the description of the formats alone.

It shares nothing with ``aenv.storage`` (no numpy, no crc32c package): what one writes the other must read.
"""

import struct
from dataclasses import dataclass

import lz4.block
import zstandard

LSMT_MAGIC = bytes.fromhex("4c534d5400010200 657e63d2 9444084c a2d2c8ec 4fcfae8a")
ZFILE_MAGIC = bytes.fromhex("5a46696c65000100 74756a69 2e797966 40416c69 62616261")


@dataclass
class Piece:
    """Sectors of a virtual disk; ``data`` None: zeroed."""

    sector: int
    count: int
    data: bytes | None


def write_layer(pieces: list[Piece], virtual_size: int, uuid: bytes = b"") -> bytes:
    data, index = b"", b""
    for piece in sorted(pieces, key=lambda piece: piece.sector):
        first = piece.sector | piece.count << 50
        second = 1 << 55 | 8 if piece.data is None else (4096 + len(data)) // 512
        index += struct.pack("<QQ", first, second)
        data += piece.data or b""
    while len(index) % 4096:
        index += struct.pack("<QQ", (1 << 50) - 1, 0)

    def header(flags: int, offset: int, entries: int) -> bytes:
        out = bytearray(4096)
        out[0:24] = LSMT_MAGIC
        struct.pack_into("<II", out, 24, 390, flags)
        struct.pack_into("<QQQ", out, 32, offset, entries, virtual_size)
        out[56 : 56 + len(uuid)] = uuid
        out[132] = out[133] = 1
        return bytes(out)

    return header(0b111, 0, 0) + data + index + header(0b110, 4096 + len(data), len(index) // 16)


def read_layers(blobs: list[bytes]) -> bytes:
    """The virtual disk of a stack, bottom first."""
    (size,) = struct.unpack_from("<Q", blobs[-1], len(blobs[-1]) - 4096 + 48)
    disk = bytearray(size)
    for blob in blobs:
        trailer = blob[-4096:]
        assert trailer[:24] == blob[:24] == LSMT_MAGIC
        assert struct.unpack_from("<I", trailer, 24) == (390,)
        offset, entries = struct.unpack_from("<QQ", trailer, 32)
        for number in range(entries):
            first, second = struct.unpack_from("<QQ", blob, offset + 16 * number)
            at, length = (first & (1 << 50) - 1) * 512, (first >> 50) * 512
            if not length:
                continue
            source = (second & (1 << 55) - 1) * 512
            disk[at : at + length] = bytes(length) if second >> 55 & 1 else blob[source : source + length]
    return bytes(disk)


_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def crc32c(data: bytes, start: int = 0) -> int:
    """The bare register: neither inverted before nor after."""
    crc = start
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc


def write_zfile(plain: bytes, algorithm: str, block_size: int, checksums: bool) -> bytes:
    blocks, sizes = b"", []
    for at in range(0, len(plain), block_size):
        block = plain[at : at + block_size]
        stored = (
            lz4.block.compress(block, store_size=False)
            if algorithm == "lz4"
            else zstandard.ZstdCompressor(level=3).compress(block)
        )
        if checksums:
            stored += struct.pack("<I", crc32c(stored, 100007))
        blocks += stored
        sizes.append(len(stored))
    index = struct.pack(f"<{len(sizes)}I", *sizes)

    def header(flags: int) -> bytes:
        out = bytearray(512)
        out[0:24] = ZFILE_MAGIC
        struct.pack_into("<IIQ", out, 24, 96, 0, flags)
        struct.pack_into("<QQQI", out, 40, 512 + len(blocks), len(sizes), len(plain), crc32c(index))
        struct.pack_into("<I", out, 72, block_size)
        out[76] = 1 if algorithm == "lz4" else 2
        out[88] = checksums
        struct.pack_into("<I", out, 28, crc32c(bytes(out)))
        return bytes(out)

    return header(0b11011) + blocks + index + header(0b10110)


def read_zfile(blob: bytes) -> bytes:
    trailer = blob[-512:]
    assert trailer[:24] == blob[:24] == ZFILE_MAGIC
    for header in (trailer, blob[:512]):
        size, digest, flags = struct.unpack_from("<IIQ", header, 24)
        assert size == 96
        assert digest == crc32c(header[:28] + bytes(4) + header[32:])
        assert flags & 0b10010 == 0b10010
    offset, entries, size, index_checksum = struct.unpack_from("<QQQI", trailer, 40)
    (block_size,) = struct.unpack_from("<I", trailer, 72)
    index = blob[offset : offset + 4 * entries]
    assert crc32c(index) == index_checksum
    at, plain = 512, b""
    for stored in struct.unpack(f"<{entries}I", index):
        data = blob[at : at + stored]
        at += stored
        if trailer[88]:
            data, checksum = data[:-4], data[-4:]
            assert struct.pack("<I", crc32c(data, 100007)) == checksum
        length = min(block_size, size - len(plain))
        if trailer[76] == 1:
            plain += lz4.block.decompress(data, uncompressed_size=length)
        else:
            plain += zstandard.ZstdDecompressor().decompress(data, max_output_size=length)
    assert len(plain) == size
    return plain
