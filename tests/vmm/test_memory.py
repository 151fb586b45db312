"""Finding, reading and writing private pages; on this process's own memory, as QEMU would have it."""

import mmap
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import CorruptFileError, VmmError
from aenv.storage import lsmt
from aenv.vmm import memory as ram

PAGES = 5000
SIZE = PAGES * ram.PAGE


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(SIZE)
        for page in range(0, PAGES, 3):
            file.seek(page * ram.PAGE)
            file.write(bytes([1 + page % 200]) * ram.PAGE)
    return path


@pytest.fixture
def guest(base: Path) -> Iterator[mmap.mmap]:
    fd = os.open(base, os.O_RDONLY)
    yield (mapped := mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    mapped.close()
    os.close(fd)


def dirty(guest: mmap.mmap, seed: int) -> set[int]:
    rng = random.Random(seed)
    touched = set(rng.sample(range(PAGES), 700)) | set(range(1000, 2500))
    for page in touched:
        fill = rng.choice([b"\0", b"q", b"r"])
        guest[page * ram.PAGE : (page + 1) * ram.PAGE] = fill * ram.PAGE
    _ = [guest[page * ram.PAGE] for page in range(PAGES)]  # mapped and clean is not private
    return touched


def expand(first: np.ndarray[tuple[int], np.dtype[np.uint64]], length: object) -> set[int]:
    return {p for s, n in zip(first.tolist(), length.tolist(), strict=True) for p in range(s, s + n)}  # type: ignore[attr-defined]


@pytest.mark.parametrize("regions", [1, 512, 513, 600, 1025, 2499])
def test_each_run_is_found_once_however_many_there_are(base: Path, guest: mmap.mmap, regions: int) -> None:
    """The kernel collects 512 at a time; a run reported twice would make a layer that cannot be read."""
    for number in range(regions):
        guest[2 * number * ram.PAGE] = 1
    first, length = ram.private_runs(ram.find_mapping(os.getpid(), base, SIZE))
    assert first.tolist() == [2 * number for number in range(regions)]
    assert set(length.tolist()) == {1}


def test_both_ways_find_exactly_what_was_written(base: Path, guest: mmap.mmap) -> None:
    mapping = ram.find_mapping(os.getpid(), base, SIZE)
    assert len(ram.private_runs(mapping)[0]) == 0
    touched = dirty(guest, 1)
    assert expand(*ram.private_runs(mapping)) == touched
    fd = os.open("/proc/self/pagemap", os.O_RDONLY)
    assert expand(*ram._runs_by_pagemap(fd, mapping, True)) == touched
    assert expand(*ram._runs_by_pagemap(fd, mapping, False)) == expand(*ram.touched_runs(mapping)) >= touched
    os.close(fd)


@pytest.mark.parametrize("filled", [SIZE, SIZE // 2, 0])
def test_capture_then_inject(base: Path, guest: mmap.mmap, tmp_path: Path, filled: int) -> None:
    """Over a base with as many bytes of data, then a hole: zero pages are stored where they hide something."""
    guest.close()
    content = base.read_bytes()[:filled]
    base.unlink()
    with base.open("wb") as file:
        file.write(content)
        file.truncate(SIZE)
    fd = os.open(base, os.O_RDONLY)
    source = mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    mapping = ram.find_mapping(os.getpid(), base, SIZE)
    touched = dirty(source, 2)
    stats = ram.capture(mapping, tmp_path / "delta", ram.data_of(base))
    assert stats.data + stats.zero == len(touched) * ram.PAGE
    content = source[:]
    hiding = [
        page for page in touched if page < filled // ram.PAGE and not any(content[page * ram.PAGE :][: ram.PAGE])
    ]
    source.close()
    target = mmap.mmap(fd, SIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    mapping = ram.find_mapping(os.getpid(), base, SIZE)
    assert ram.inject(mapping, tmp_path / "delta") == stats.data + len(hiding) * ram.PAGE
    assert target[:] == content
    target.close()
    os.close(fd)
    lsmt.compose(base, tmp_path / "delta", tmp_path / "composed", durable=False)
    assert (tmp_path / "composed").read_bytes() == content


def test_a_delta_of_another_size_is_refused(base: Path, guest: mmap.mmap, tmp_path: Path) -> None:
    with lsmt.LayerWriter(tmp_path / "delta", SIZE * 2) as writer:
        writer.commit()
    with pytest.raises(CorruptFileError, match="memory"):
        ram.inject(ram.find_mapping(os.getpid(), base, SIZE), tmp_path / "delta")


def test_no_mapping(base: Path, tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="maps 0 bytes"):
        ram.find_mapping(os.getpid(), base, SIZE)
    with pytest.raises(VmmError, match="gone"):
        ram.find_mapping(1 << 22, base, SIZE)
    with pytest.raises(VmmError):
        ram.private_runs(ram.Mapping(1 << 22, 0, SIZE))


@given(st.sets(st.integers(0, 3000)))
def test_runs_and_chunks(pages: set[int]) -> None:
    numbers = np.array(sorted(pages), dtype=np.uint64)
    first, length = ram.runs(numbers)
    assert expand(first, length) == pages
    assert len(first) <= 1 or bool(np.all(first[1:] > first[:-1] + length[:-1]))
    parts = list(ram.chunks(first, length, 100))
    assert all(int(n.sum()) <= 100 and len(n) <= ram.IOV_MAX for _, n in parts)
    assert [p for s, n in parts for p in sorted(expand(s, n))] == sorted(pages)
