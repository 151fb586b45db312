"""Stacks of layers: every byte from the newest layer that has it, whatever the depth."""

import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import CorruptFileError, InvalidRequestError
from aenv.storage.lsmt import read_layer
from aenv.storage.runs import ZERO
from aenv.storage.stack import LayerView, Stack, open_layer
from aenv.storage.zfile import ZFileSource, write_zfile
from tests.storage import spec
from tests.storage.sources import Bytes

SECTORS = 64
SIZE = SECTORS * 512


@st.composite
def pieces(draw: st.DrawFn) -> list[spec.Piece]:
    """Some extents, at any sector."""
    out: list[spec.Piece] = []
    at = 0
    while (at := at + draw(st.integers(0, 30))) < SECTORS:
        count = draw(st.integers(1, SECTORS - at))
        fill = draw(st.integers(0, 255))
        data = None if fill == 0 else bytes((fill + i) % 256 for i in range(count) for _ in range(512))
        out.append(spec.Piece(at, count, data))
        at += count
    return out


def check(blobs: list[bytes], stored: list[bytes], ranges: list[tuple[int, int]]) -> None:
    stack = Stack([open_layer(Bytes(blob)) for blob in stored])
    disk = spec.read_layers(blobs)
    assert stack.size == len(disk)
    assert stack.read(0, len(disk)) == disk
    for at, length in ranges:
        length = min(length, SIZE - at)
        assert stack.read(at, length) == disk[at : at + length]
        parts = b""
        for segment in stack.segments(at, length):
            if segment.layer == ZERO:
                parts += bytes(segment.length)
            else:
                parts += stack.layers[segment.layer].source.read(segment.position, segment.length)
        assert parts == disk[at : at + length]


@given(
    st.lists(st.tuples(pieces(), st.sampled_from([None, "lz4", "zstd"])), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8),
)
@settings(max_examples=100, deadline=None)
def test_stack(layers: list[tuple[list[spec.Piece], str | None]], ranges: list[tuple[int, int]]) -> None:
    blobs = [spec.write_layer(content, SIZE) for content, _ in layers]
    stored = [
        spec.write_zfile(blob, algorithm, 4096, checksums=False) if algorithm else blob
        for blob, (_, algorithm) in zip(blobs, layers, strict=True)
    ]
    check(blobs, stored, ranges)


def test_255_layers() -> None:
    rng = random.Random(5)
    blobs = []
    for number in range(255):
        at = rng.randrange(SECTORS - 4)
        fill = None if number % 5 == 0 else bytes([number]) * 512 * 3
        blobs.append(spec.write_layer([spec.Piece(at, 3, fill)], SIZE))
    check(blobs, blobs, [(i * 512, 700) for i in range(SECTORS - 1)])
    with pytest.raises(InvalidRequestError, match="at most 255"):
        Stack([open_layer(Bytes(blobs[0]))] * 256)


def test_a_stack_has_the_size_that_its_volume_has() -> None:
    small = spec.write_layer([spec.Piece(0, 4, bytes([1]) * 2048)], 2048)
    large = spec.write_layer([spec.Piece(2, 8, bytes([2]) * 4096)], 8192)
    grown = Stack([open_layer(Bytes(small)), open_layer(Bytes(large))])
    assert grown.read(0, 8192) == bytes([1]) * 1024 + bytes([2]) * 4096 + bytes(3072)
    cut = Stack([open_layer(Bytes(large))], virtual_size=2048)
    assert cut.read(0, 2048) == bytes(1024) + bytes([2]) * 1024
    with pytest.raises(CorruptFileError):
        cut.read(2047, 2)
    assert Stack([], virtual_size=512).read(0, 512) == bytes(512)


def test_many_threads_read_one_stack() -> None:
    rng = random.Random(6)
    blobs = [
        spec.write_layer([spec.Piece(at, 9, rng.randbytes(9 * 512)) for at in range(i, 500, 17)], 1 << 18)
        for i in (0, 5)
    ]
    disk = spec.read_layers(blobs)
    stack = Stack([open_layer(Bytes(spec.write_zfile(blob, "zstd", 4096, checksums=True))) for blob in blobs])
    ranges = [(rng.randrange(1 << 18), rng.randrange(20_000)) for _ in range(600)]
    with ThreadPoolExecutor(8) as pool:
        for (at, _), data in zip(
            ranges, pool.map(lambda r: stack.read(r[0], min(r[1], len(disk) - r[0])), ranges), strict=True
        ):
            assert data == disk[at : at + len(data)]


def test_scattered_pieces_of_a_blob_are_read_at_once() -> None:
    """Every other page of the disk, written together: one read."""
    source = Bytes(spec.write_layer([spec.Piece(i * 16, 8, bytes([i + 1]) * 4096) for i in range(32)], 1 << 20))
    stack = Stack([open_layer(source)])
    source.reads.clear()
    data = stack.read(0, 32 * 8192)
    assert data == b"".join(bytes([i + 1]) * 4096 + bytes(4096) for i in range(32))
    assert source.reads == [(4096, 32 * 4096)]


def test_zfile_is_recognised() -> None:
    blob = spec.write_layer([spec.Piece(0, 1, bytes(512))], 512)
    assert isinstance(open_layer(Bytes(spec.write_zfile(blob, "lz4", 4096, checksums=True))).source, ZFileSource)
    assert isinstance(open_layer(Bytes(blob)), LayerView)


def entry(offset: int, length: int, moffset: int, zeroed: bool = False) -> bytes:
    return struct.pack("<QQ", offset | length << 50, moffset | zeroed << 55)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (entry(0, 2, 8) + entry(1, 2, 8), "overlap"),
        (entry(2, 1, 8) + entry(0, 1, 8), "overlap"),
        (entry(63, 2, 8), "outside the virtual disk"),
        (entry((1 << 50) - 2, 1, 8), "outside the virtual disk"),
        (entry(0, 2, 7), "outside the data"),
        (entry(0, 9, 8), "outside the data"),
        (entry(0, 1, (1 << 55) - 1), "outside the data"),
    ],
)
def test_absurd_entries(entries: bytes, why: str) -> None:
    blob = bytearray(spec.write_layer([spec.Piece(0, 8, bytes(4096))], SIZE))
    blob[8192 : 8192 + len(entries)] = entries
    with pytest.raises(CorruptFileError, match=why):
        read_layer(Bytes(bytes(blob)))


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (32, 1 << 62, "outside the file"),
        (32, 0, "outside the file"),
        (32, 4097, "outside the file"),
        (40, 1 << 61, "outside the file"),
        (40, (1 << 64) - 1, "outside the file"),
        (48, 1 << 63, "disagree"),
    ],
)
def test_absurd_trailers(at: int, value: int, why: str) -> None:
    blob = bytearray(spec.write_layer([spec.Piece(0, 8, bytes(4096))], SIZE))
    struct.pack_into("<Q", blob, len(blob) - 4096 + at, value)
    with pytest.raises(CorruptFileError, match=why):
        read_layer(Bytes(bytes(blob)))


def test_an_index_that_is_a_decompression_bomb(tmp_path: Path) -> None:
    """64 MiB of empty entries in a ZFile of 100 kB: refused before they are decompressed."""
    blob = spec.write_layer([], SIZE)
    entries = (64 << 20) // 16
    trailer = bytearray(blob[-4096:])
    struct.pack_into("<QQ", trailer, 32, 4096, entries)
    write_zfile(Bytes(blob[:4096] + bytes(entries * 16) + trailer), tmp_path / "bomb")
    source = Bytes((tmp_path / "bomb").read_bytes())
    assert source.size < 1 << 18
    with pytest.raises(CorruptFileError, match="out of proportion"):
        open_layer(source)
    assert sum(length for _, length in source.reads) < 1 << 16


def test_an_absurd_disk() -> None:
    with pytest.raises(CorruptFileError, match="cannot be"):
        read_layer(Bytes(spec.write_layer([], 1 << 60)))


def test_a_huge_disk_takes_no_memory() -> None:
    stack = Stack([open_layer(Bytes(spec.write_layer([spec.Piece(1 << 40, 1, bytes([3]) * 512)], 1 << 55)))])
    assert stack.read((1 << 49) + 500, 100) == bytes([3]) * 12 + bytes(88)
    assert len(stack.segments(0, 1 << 55)) == 3
