"""LSMT layers: what is written is what is read, and nothing else is."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import CorruptFileError
from aenv.storage import lsmt

PAGE = 4096
PAGES = 64

# Each page of a small virtual disk: not in the layer, zeroed, or data (its fill byte).
pages = st.lists(st.one_of(st.none(), st.just(0), st.integers(1, 255)), min_size=PAGES, max_size=PAGES)


def write(path: Path, content: list[int | None]) -> None:
    with lsmt.LayerWriter(path, PAGES * PAGE) as writer:
        for number, fill in enumerate(content):
            at, size = np.array([number * PAGE], dtype=np.uint64), np.array([PAGE], dtype=np.uint64)
            if fill == 0:
                writer.add_zeroed(at, size)
            elif fill is not None:
                writer.add(at, size, bytes([fill]) * PAGE)
        writer.commit()


def expected(content: list[int | None], base: bytes) -> bytes:
    out = bytearray(base)
    for number, fill in enumerate(content):
        if fill is not None:
            out[number * PAGE : (number + 1) * PAGE] = bytes([fill]) * PAGE
    return bytes(out)


@given(pages)
@settings(max_examples=40, deadline=None)
def test_round_trip_and_compose(tmp_path_factory: pytest.TempPathFactory, content: list[int | None]) -> None:
    directory = tmp_path_factory.mktemp("layer")
    base = os.urandom(PAGES * PAGE)
    (directory / "base").write_bytes(base)
    write(directory / "layer", content)
    with lsmt.Layer(directory / "layer") as layer:
        assert layer.virtual_size == PAGES * PAGE
        assert layer.read(0, PAGES * PAGE) == expected(content, bytes(PAGES * PAGE))
        assert layer.read(PAGE // 2, PAGE, b"x" * PAGE)[:1] == (b"x" if content[0] is None else bytes([content[0]]))
    lsmt.compose(directory / "base", directory / "layer", directory / "out", durable=False)
    assert (directory / "out").read_bytes() == expected(content, base)
    lsmt.compose(None, directory / "layer", directory / "out0", durable=False)
    assert (directory / "out0").read_bytes() == expected(content, bytes(PAGES * PAGE))
    assert sorted(p.name for p in directory.iterdir()) == ["base", "layer", "out", "out0"]


def test_the_bytes_of_a_layer(tmp_path: Path) -> None:
    """Field by field against the format's description, not against our own reader."""
    write(tmp_path / "layer", [None, 7, 7, 0] + [None] * (PAGES - 4))
    blob = (tmp_path / "layer").read_bytes()
    assert blob[:8] == b"LSMT\0\1\2\0"
    assert blob[8:24].hex() == "657e63d29444084ca2d2c8ec4fcfae8a"
    size, flags, index_offset, index_size, virtual = struct.unpack_from("<IIQQQ", blob, 24)
    assert (size, flags & 0b111, index_offset, index_size, virtual) == (390, 0b111, 0, 0, PAGES * PAGE)
    size, flags, index_offset, index_size, virtual = struct.unpack_from("<IIQQQ", blob, len(blob) - PAGE + 24)
    assert (size, flags & 0b111, index_offset, index_size) == (390, 0b110, PAGE + 2 * PAGE, 256)
    assert blob[-PAGE + 132 : -PAGE + 134] == b"\1\1"
    first = struct.unpack_from("<QQ", blob, index_offset)
    assert first == (8 | 16 << 50, 8), "pages 1 and 2 are one entry"
    second = struct.unpack_from("<QQ", blob, index_offset + 16)
    assert second == (24 | 8 << 50, 1 << 55 | 8), "overlaybd wants zeroed entries to point at the data too"
    assert struct.unpack_from("<QQ", blob, index_offset + 32) == ((1 << 50) - 1, 0)
    assert len(blob) == index_offset + 256 * 16 + PAGE


def entries_on_disk(path: Path) -> int:
    blob = path.read_bytes()
    offset, size = struct.unpack_from("<QQ", blob, len(blob) - PAGE + 32)
    words = struct.unpack_from(f"<{2 * size}Q", blob, offset)
    return sum(word >> 50 > 0 for word in words[::2])


def test_long_runs_are_split(tmp_path: Path) -> None:
    size = 40 << 20
    data = os.urandom(1 << 20) * 20
    with lsmt.LayerWriter(tmp_path / "layer", size) as writer:
        writer.add(np.array([0], dtype=np.uint64), np.array([20 << 20], dtype=np.uint64), data)
        writer.add_zeroed(np.array([20 << 20], dtype=np.uint64), np.array([20 << 20], dtype=np.uint64))
        writer.commit()
    with lsmt.Layer(tmp_path / "layer") as layer:
        assert layer.extents.length.tolist() == [20 << 20, 20 << 20]  # joined again by the reader
        assert layer.read(0, size) == data + bytes(20 << 20)
    assert entries_on_disk(tmp_path / "layer") == 6


def test_an_empty_layer(tmp_path: Path) -> None:
    write(tmp_path / "layer", [None] * PAGES)
    with lsmt.Layer(tmp_path / "layer") as layer:
        assert len(layer.extents) == 0
    lsmt.compose(None, tmp_path / "layer", tmp_path / "out")
    assert (tmp_path / "out").stat().st_size == PAGES * PAGE
    assert (tmp_path / "out").stat().st_blocks == 0


def test_nothing_is_left_without_commit(tmp_path: Path) -> None:
    with lsmt.LayerWriter(tmp_path / "layer", PAGE) as writer:
        writer.add(np.array([0], dtype=np.uint64), np.array([PAGE], dtype=np.uint64), bytes(PAGE))
    assert list(tmp_path.iterdir()) == []


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_an_error_or_harmless(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("layer") / "layer"
    write(path, [None, 3, 0, 4] + [None] * (PAGES - 4))
    blob = bytearray(path.read_bytes())
    index = len(blob) - PAGE - 4096
    position = data.draw(
        st.one_of(
            st.integers(0, 60), st.integers(index, index + 64), st.integers(len(blob) - PAGE, len(blob) - PAGE + 60)
        )
    )
    blob[position] = data.draw(st.integers(0, 255))
    path.write_bytes(blob)
    try:
        with lsmt.Layer(path) as layer:
            e = layer.extents
            assert not len(e) or int((e.offset + e.length).max()) <= layer.virtual_size
            assert all(int(s + n) <= len(blob) for s, n, z in zip(e.source, e.length, e.zeroed, strict=True) if not z)
    except CorruptFileError:
        pass


@given(st.binary(max_size=10000))
@settings(max_examples=50, deadline=None)
def test_junk_is_an_error(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.mktemp("layer") / "layer"
    path.write_bytes(junk)
    with pytest.raises(CorruptFileError):
        lsmt.Layer(path)


def test_a_torn_layer_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "layer", [1] * PAGES)
    whole = (tmp_path / "layer").read_bytes()
    for size in (0, 100, PAGE, len(whole) - PAGE, len(whole) - 1):
        (tmp_path / "torn").write_bytes(whole[:size])
        with pytest.raises(CorruptFileError):
            lsmt.Layer(tmp_path / "torn")
