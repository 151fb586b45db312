"""ZFiles against the second implementation in ``spec.py``, both ways, and against damage."""

import os
import random
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import CapacityError, CorruptFileError
from aenv.storage.source import FileSource
from aenv.storage.zfile import SPACE, ZFileSource, checksum, is_zfile, write_zfile
from tests.storage import spec
from tests.storage.sources import Bytes

algorithms = st.sampled_from(["lz4", "zstd"])
blocks = st.sampled_from([512, 4096, 65536])


@st.composite
def plains(draw: st.DrawFn) -> bytes:
    """Compressible and not, of any length."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    parts = draw(st.lists(st.tuples(st.booleans(), st.integers(0, 20_000)), max_size=4))
    return b"".join(rng.randbytes(length) if noise else bytes([length % 251]) * length for noise, length in parts)


@given(plains(), algorithms, blocks)
@settings(max_examples=40, deadline=None)
def test_what_we_write_the_other_reads(
    tmp_path_factory: pytest.TempPathFactory, plain: bytes, algorithm: str, block: int
) -> None:
    path = tmp_path_factory.mktemp("zfile") / "out"
    write_zfile(Bytes(plain), path, algo=algorithm, block_size=block)  # type: ignore[arg-type]
    assert spec.read_zfile(path.read_bytes()) == plain


@given(plains(), algorithms, blocks, st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_what_the_other_writes_we_read(
    plain: bytes, algorithm: str, block: int, checksums: bool, data: st.DataObject
) -> None:
    blob = Bytes(spec.write_zfile(plain, algorithm, block, checksums))
    assert is_zfile(blob)
    file = ZFileSource(blob)
    assert file.size == len(plain)
    assert file.read(0, len(plain)) == plain
    for _ in range(5):
        at = data.draw(st.integers(0, len(plain)))
        length = data.draw(st.integers(0, len(plain) - at))
        assert file.read(at, length) == plain[at : at + length]
        start, stored = file.stored_range(at, length)
        assert SPACE <= start <= start + stored <= blob.size - SPACE
    with pytest.raises(CorruptFileError):
        file.read(1, len(plain))


def test_checksum_is_the_bare_register() -> None:
    assert checksum(b"123456789", 0xFFFFFFFF) ^ 0xFFFFFFFF == 0xE3069283  # RFC 3720's check value
    assert checksum(b"123456789", 100007) == spec.crc32c(b"123456789", 100007)


def test_many_blocks_take_one_read_and_threads_do_not_change_the_output(tmp_path: Path) -> None:
    plain = os.urandom(1 << 20) + bytes(3 << 20) + os.urandom(12345)
    for threads in (1, 3):
        write_zfile(Bytes(plain), tmp_path / f"z{threads}", threads=threads)
    assert (tmp_path / "z1").read_bytes() == (tmp_path / "z3").read_bytes()
    source = Bytes((tmp_path / "z1").read_bytes())
    file = ZFileSource(source)
    source.reads.clear()
    assert file.read(100, 2 << 20) == plain[100 : 100 + (2 << 20)]
    assert len(source.reads) == 1
    assert file.read(50, 40) == plain[50:90]
    assert len(source.reads) == 1, "the block that was read in part is at hand"


@given(st.integers(0, 1 << 30), st.integers(1, 255), algorithms)
@settings(max_examples=150, deadline=None)
def test_a_flipped_byte_is_never_served(position: int, flip: int, algorithm: str) -> None:
    plain = bytes(range(256)) * 64
    blob = bytearray(spec.write_zfile(plain, algorithm, 4096, checksums=True))
    blob[position % len(blob)] ^= flip
    try:
        file = ZFileSource(Bytes(bytes(blob)))
        assert file.read(0, file.size) == plain
    except CorruptFileError:
        pass


def _with(blob: bytes, at: int, form: str, value: int) -> bytes:
    """A field changed in header and trailer, with right checksums."""
    out = bytearray(blob)
    for start in (0, len(blob) - SPACE):
        struct.pack_into(form, out, start + at, value)
        struct.pack_into("<I", out, start + 28, 0)
        struct.pack_into("<I", out, start + 28, spec.crc32c(bytes(out[start : start + SPACE])))
    return bytes(out)


@pytest.mark.parametrize(
    ("at", "form", "value", "why"),
    [
        (48, "<Q", 1 << 60, "blocks cannot hold"),
        (56, "<Q", 1 << 62, "blocks cannot hold"),
        (40, "<Q", 1 << 63, "outside the file"),
        (40, "<Q", 100, "outside the file"),
        (72, "<I", 1 << 31, "blocks of"),
        (72, "<I", 5000, "blocks of"),
        (72, "<I", 0, "blocks of"),
        (76, "<B", 9, "compression 9"),
        (78, "<B", 1, "dictionary"),
        (84, "<I", 4096, "dictionary"),
        (32, "<Q", 0b111111, "index is compressed"),
        (24, "<I", 97, "wrong magic"),
    ],
)
def test_absurd_fields(at: int, form: str, value: int, why: str) -> None:
    blob = spec.write_zfile(bytes(20_000), "lz4", 4096, checksums=True)
    with pytest.raises(CorruptFileError, match=why):
        ZFileSource(Bytes(_with(blob, at, form, value)))


def test_a_frame_that_claims_too_much_is_not_believed() -> None:
    """A block of 24 bytes whose zstd header announces 1 TiB."""
    plain = bytes(4096)
    blob = spec.write_zfile(plain, "zstd", 4096, checksums=False)
    bomb = bytes.fromhex("28b52ffd") + bytes([0b11100000]) + struct.pack("<Q", 1 << 40) + bytes(11)
    head, trailer = blob[:SPACE], blob[-SPACE:]
    index = struct.pack("<I", len(bomb))
    out = bytearray(head + bomb + index + trailer)
    struct.pack_into("<Q", out, len(out) - SPACE + 40, SPACE + len(bomb))
    struct.pack_into("<I", out, len(out) - SPACE + 64, spec.crc32c(index))
    struct.pack_into("<I", out, len(out) - SPACE + 28, 0)
    struct.pack_into("<I", out, len(out) - SPACE + 28, spec.crc32c(bytes(out[-SPACE:])))
    with pytest.raises(CorruptFileError, match="another size is claimed"):
        ZFileSource(Bytes(bytes(out))).read(0, 1)


def test_every_truncation_is_refused() -> None:
    blob = spec.write_zfile(bytes(range(256)) * 40, "lz4", 4096, checksums=True)
    for length in range(len(blob)):
        with pytest.raises(CorruptFileError):
            ZFileSource(Bytes(blob[:length]))


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], check=True)
    try:
        with pytest.raises(CapacityError):
            write_zfile(Bytes(os.urandom(4 << 20)), tmp_path / "out")
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    with FileSource(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", 3)
        with pytest.raises(CorruptFileError, match="became shorter"):
            file.read(0, 5)
