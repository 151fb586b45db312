"""Where guest memory is in a process: on this process's own mappings, made as Firecracker makes them."""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.errors import CorruptFileError, VmmError
from aenv.storage import lsmt
from aenv.vmm import memory as ram
from aenv.vmm.firecracker import guest_memory

PAGE = 4096
LOW, HIGH = 300 * PAGE, 200 * PAGE  # sizes of two pieces
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@pytest.fixture
def two_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guest_memory, "piece_sizes", lambda size: [LOW, size - LOW] if size > LOW else [size])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(LOW + HIGH)
        for page in [*range(10, 20), *range(295, 310)]:  # over the end of the first piece
            file.seek(page * PAGE)
            file.write(bytes([page % 200 + 1]) * PAGE)
    return path


@pytest.fixture
def guest(base: Path) -> Iterator[tuple[int, int]]:
    """Addresses of two private mappings of the file, apart from each other."""
    fd = os.open(base, os.O_RDONLY)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    low = _libc.mmap(None, LOW, protection, mmap.MAP_PRIVATE, fd, 0)
    gap = _libc.mmap(None, 5 * PAGE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    high = _libc.mmap(None, HIGH, protection, mmap.MAP_PRIVATE, fd, LOW)
    os.close(fd)
    yield low, high
    for start, size in ((low, LOW), (gap, 5 * PAGE), (high, HIGH)):
        _libc.munmap(start, size)


def test_there_is_a_gap_below_4_gib_on_x86_alone() -> None:
    assert guest_memory.piece_sizes(512 << 20, "x86_64") == [512 << 20]
    assert guest_memory.piece_sizes(3 << 30, "x86_64") == [3 << 30]
    assert guest_memory.piece_sizes(8 << 30, "x86_64") == [3 << 30, 5 << 30]
    assert guest_memory.piece_sizes(8 << 30, "aarch64") == [8 << 30]


def test_both_pieces_are_found_captured_and_filled(
    two_pieces: None, base: Path, guest: tuple[int, int], tmp_path: Path
) -> None:
    low, high = guest
    pieces = guest_memory.find_mapped(os.getpid(), base, LOW + HIGH)
    assert [(piece.start, piece.size, piece.offset) for piece in pieces] == [(low, LOW, 0), (high, HIGH, LOW)]
    written = {0: b"a", LOW - PAGE: b"b", LOW: b"c", LOW + HIGH - PAGE: b"d"}
    for offset, letter in written.items():
        place = low + offset if offset < LOW else high + offset - LOW
        ctypes.memset(place, ord(letter), PAGE)
    ctypes.memset(low + 12 * PAGE, 0, PAGE)  # hides data of the base
    captured = ram.capture_pieces(pieces, tmp_path / "delta", ram.data_of(base), guest_memory.cleared(pieces))
    assert (captured.data, captured.zero) == (4 * PAGE, PAGE)
    with lsmt.Layer(tmp_path / "delta") as layer:
        expected = layer.read(0, LOW + HIGH, base.read_bytes())
        assert layer.virtual_size == LOW + HIGH
    assert all(expected[offset : offset + PAGE] == letter * PAGE for offset, letter in written.items())
    assert expected[12 * PAGE : 13 * PAGE] == bytes(PAGE)

    for start, size, offset in ((low, LOW, 0), (high, HIGH, LOW)):  # as a VM that was just restored
        with base.open("rb") as file:
            _libc.mmap(start, size, 3, mmap.MAP_PRIVATE | MAP_FIXED, file.fileno(), offset)
    ram.inject_pieces(pieces, tmp_path / "delta")
    assert ctypes.string_at(low, LOW) + ctypes.string_at(high, HIGH) == expected


def test_a_delta_for_another_memory_is_refused(
    two_pieces: None, base: Path, guest: tuple[int, int], tmp_path: Path
) -> None:
    pieces = guest_memory.find_mapped(os.getpid(), base, LOW + HIGH)
    with lsmt.LayerWriter(tmp_path / "delta", LOW) as writer:
        writer.commit()
    with pytest.raises(CorruptFileError, match="for 1228800 bytes"):
        ram.inject_pieces(pieces, tmp_path / "delta")


def test_memory_that_is_not_mapped_whole_is_refused(
    two_pieces: None, base: Path, guest: tuple[int, int], tmp_path: Path
) -> None:
    _libc.munmap(guest[1] + 50 * PAGE, PAGE)
    with pytest.raises(VmmError, match="maps 815104 of 819200"):
        guest_memory.find_mapped(os.getpid(), base, LOW + HIGH)
    (other := tmp_path / "other").write_bytes(bytes(PAGE))
    with pytest.raises(VmmError, match="does not map"):
        guest_memory.find_mapped(os.getpid(), other, PAGE)
    with pytest.raises(VmmError, match="gone"):
        guest_memory.find_mapped(1 << 22, base, LOW + HIGH)


def test_what_a_balloon_took_is_zero_until_it_is_used_again(
    two_pieces: None, base: Path, guest: tuple[int, int], tmp_path: Path
) -> None:
    """Pages 11 to 14 and 298 to 304 of the base have data; 12 is used again, 100 had none to hide."""
    low, high = guest
    pieces = guest_memory.find_mapped(os.getpid(), base, LOW + HIGH)
    assert len(guest_memory.cleared(pieces)[0]) == 0
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    for start, pages in ((low + 11 * PAGE, 4), (low + 100 * PAGE, 1), (low + 298 * PAGE, 2), (high, 5)):
        assert _libc.mmap(start, pages * PAGE, 3, anonymous, -1, 0) == start
    ctypes.memset(low + 12 * PAGE, 7, PAGE)
    first, length = guest_memory.cleared(pieces)
    assert list(zip(first.tolist(), length.tolist(), strict=True)) == [(11, 1), (13, 2), (100, 1), (298, 7)]
    ram.capture_pieces(pieces, tmp_path / "delta", ram.data_of(base), (first, length))
    with lsmt.Layer(tmp_path / "delta") as layer:
        content = layer.read(0, LOW + HIGH, base.read_bytes())
        named = int(layer.extents.length[layer.extents.zeroed].sum()) // PAGE
    assert content == ctypes.string_at(low, LOW) + ctypes.string_at(high, HIGH)
    assert named == 10, "a hole of the base needs no words"


BOOTED = """
import mmap, sys
low, high, line = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].encode()
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
pieces = [mmap.mmap(-1, low, flags)] + ([mmap.mmap(-1, high, flags)] if high else [])
pieces[0][0x20000 : 0x20000 + len(line)] = line
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("high", "machine"), [(0, "x86_64"), (200, "x86_64"), (300, "x86_64"), (0, "aarch64")])
def test_the_memory_of_a_booted_guest_is_told_from_other_memory(
    monkeypatch: pytest.MonkeyPatch, high: int, machine: str
) -> None:
    """The kernel joins the pieces of one process, the second below the first."""
    sizes = [LOW, high * PAGE] if high else [LOW]
    monkeypatch.setattr(guest_memory, "piece_sizes", lambda size, machine: sizes)
    line = "console=ttyS0 aenv.test"
    argv = [sys.executable, "-c", BOOTED, str(LOW), str(high * PAGE), line]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        pieces = guest_memory.find_anonymous(process.pid, line, sum(sizes), machine)
        assert [piece.size for piece in pieces] == sizes
        assert [piece.offset for piece in pieces] == [0, LOW][: len(sizes)]
        with open(f"/proc/{process.pid}/mem", "rb") as memory:
            memory.seek(pieces[0].start + guest_memory.COMMAND_LINE)
            assert memory.read(len(line)) == line.encode()
        if machine == "x86_64":
            with pytest.raises(VmmError, match="cannot be told"):
                guest_memory.find_anonymous(process.pid, "another line", sum(sizes), machine)
        process.stdin.close()
