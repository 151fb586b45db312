"""The block cache: what it returns is right whatever the disk and the source do, and it stays within its bounds."""

import errno
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import CorruptFileError, SourceError
from aenv.storage import cachefile
from aenv.storage.blockcache import HIGH, LOW, BlockCache, choose
from aenv.storage.cacheaccount import Account, charge
from aenv.storage.fetching import FetchPolicy, fetch

BLOCK = 4096
DIGEST = "sha256:" + "ab" * 32
OTHER = "sha256:" + "cd" * 32
QUICK = FetchPolicy(attempts=3, first_wait=0.001, longest_wait=0.002, deadline=20)


class Far:
    """A source in memory that counts its reads and does what a test says."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.reads: list[tuple[int, int]] = []
        self.before: Callable[[int, int], None] = lambda offset, length: None
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        with self._lock:
            self.reads.append((offset, length))
        self.before(offset, length)
        return self.data[offset : offset + length]

    @property
    def fetched(self) -> int:
        return sum(length for _, length in self.reads)


def cache(folder: Path | None, blocks: int = 1000, **more: object) -> BlockCache:
    values: dict[str, object] = {"memory": 0, "block": BLOCK, "policy": QUICK, **more}
    return BlockCache(folder, capacity=blocks * BLOCK, **values)  # type: ignore[arg-type]


def wait(gate: threading.Event) -> None:
    gate.wait()


def settle(cache: BlockCache) -> None:
    """Wait until what was fetched is on the disk."""
    cache.pool.shutdown(wait=True)
    cache.pool = type(cache.pool)(32)


@given(st.integers(0, 9 * BLOCK + 1), st.lists(st.tuples(st.integers(0, 10 * BLOCK), st.integers(0, 3 * BLOCK))))
@settings(max_examples=50, deadline=None)
def test_any_range_of_any_size(
    tmp_path_factory: pytest.TempPathFactory, size: int, reads: list[tuple[int, int]]
) -> None:
    data = random.Random(size).randbytes(size)
    with cache(tmp_path_factory.mktemp("cache")) as blocks:
        source = blocks.open(DIGEST, Far(data))
        for offset, length in reads * 2:
            if offset + length > size:
                with pytest.raises(CorruptFileError):
                    source.read(offset, length)
            else:
                assert source.read(offset, length) == data[offset : offset + length]


def test_a_block_is_fetched_once_for_any_number_of_readers(tmp_path: Path) -> None:
    data = os.urandom(64 * BLOCK)
    far = Far(data)
    gate = threading.Event()
    far.before = lambda *_: wait(gate)
    with cache(tmp_path) as blocks:
        source = blocks.open(DIGEST, far)
        got: list[bytes] = []
        threads = [threading.Thread(target=lambda: got.append(source.read(BLOCK, 20 * BLOCK))) for _ in range(16)]
        threads += [threading.Thread(target=lambda: got.append(source.read(5 * BLOCK, BLOCK))) for _ in range(16)]
        for thread in threads:
            thread.start()
        while not far.reads:
            time.sleep(0.001)
        gate.set()
        for thread in threads:
            thread.join()
        assert sorted(set(got)) == sorted({data[BLOCK : 21 * BLOCK], data[5 * BLOCK : 6 * BLOCK]})
        assert far.fetched == 20 * BLOCK
        assert len(far.reads) <= 2  # neighbours in one


def test_it_survives_its_process(tmp_path: Path) -> None:
    data = os.urandom(10 * BLOCK + 100)
    far = Far(data)
    with cache(tmp_path) as blocks:
        assert blocks.open(DIGEST, far).read(0, len(data)) == data
    assert far.fetched == len(data)
    with cache(tmp_path) as blocks:
        account = Account()
        charge(account)
        assert blocks.open(DIGEST, far).read(0, len(data)) == data
        charge(None)
        assert blocks.stats().used == 11 * BLOCK
        assert account.values()["hits"] == 11
    assert far.fetched == len(data)
    with cache(tmp_path, block=2 * BLOCK) as blocks:  # another block size: begun anew
        assert blocks.open(DIGEST, far).read(5, 5 * BLOCK) == data[5 : 5 + 5 * BLOCK]
    assert len(list(tmp_path.glob("*.map"))) == 1


@pytest.mark.parametrize("what", ["flip", "tear", "zero map", "flip map", "truncate", "cut map", "foreign map"])
def test_a_damaged_cache_is_fetched_anew(tmp_path: Path, what: str) -> None:
    data = os.urandom(10 * BLOCK)
    with cache(tmp_path) as blocks:
        blocks.open(DIGEST, Far(data)).read(0, len(data))
    contents, entries = cachefile.paths(tmp_path, DIGEST)
    with (contents if what in ("flip", "tear", "truncate") else entries).open("r+b") as file:
        match what:
            case "flip" | "flip map":
                file.seek(5 * BLOCK + 77 if what == "flip" else cachefile.HEADER_SIZE + 5 * 8)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 4]))
            case "tear":
                file.seek(3 * BLOCK + 512)
                file.write(bytes(4 * BLOCK))
            case "zero map":
                file.write(bytes(cachefile.HEADER_SIZE + 80))
            case "truncate" | "cut map":
                file.truncate(6 * BLOCK + 3 if what == "truncate" else cachefile.HEADER_SIZE + 17)
            case "foreign map":
                file.write(os.urandom(500))
    far = Far(data)
    with cache(tmp_path) as blocks:
        source = blocks.open(DIGEST, far)
        assert [source.read(i * BLOCK, BLOCK) for i in range(10)] == [data[i * BLOCK :][:BLOCK] for i in range(10)]
        assert source.read(0, len(data)) == data
        settle(blocks)
        assert far.reads
        before = far.fetched
        assert source.read(0, len(data)) == data
        assert far.fetched == before  # it is whole again


def contents() -> bytes:
    return random.Random(7).randbytes(200 * BLOCK)


def fill_until(folder: Path, step: int, how: str, report: int) -> None:
    """In a child: fill a small cache; the ``step``-th system call that changes the disk is the last one, or half."""
    count = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if count == step:
                if how == "torn" and call is pwrite:
                    fd, data, position = arguments
                    call(fd, memoryview(data)[: len(data) // 2], position)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments)

        return wrapped

    pwrite = os.pwrite
    os.pwrite, os.ftruncate = counted(pwrite), counted(os.ftruncate)
    vars(cachefile._libc)["fallocate"] = counted(cachefile._libc.fallocate)
    blocks = cache(folder, 40)
    source = blocks.open(DIGEST, Far(contents()))
    for i in range(0, 200, 3):
        source.read(i * BLOCK, 2 * BLOCK)
        settle(blocks)
    os.write(report, str(count).encode())


def run_and_kill(folder: Path, step: int, how: str) -> int:
    """The steps that were made; 0 when it was killed."""
    folder.mkdir(exist_ok=True)
    out, report = os.pipe()
    child = os.fork()
    if not child:
        try:
            fill_until(folder, step, how, report)
        finally:
            os._exit(1)
    os.close(report)
    os.waitpid(child, 0)
    with os.fdopen(out) as file:
        return int(file.read() or 0)


def test_killed_at_every_step_of_writing_and_eviction(tmp_path: Path) -> None:
    """Each system call that changes the disk is the last one of a process once, and is half done once."""
    steps = run_and_kill(tmp_path / "whole", 0, "")
    assert steps > 130
    data = contents()
    middle = steps // 2  # the cache is full there: writes and evictions alternate
    killed = 0
    for step in [*range(1, 7), *range(middle, middle + 14)]:
        for how in ("before", "torn"):
            folder = tmp_path / "killed"  # each goes on with what the last one left
            killed += run_and_kill(folder, step, how) == 0
            with cache(folder, 40) as blocks:
                source = blocks.open(DIGEST, Far(data))
                for i in range(0, 200, 2):
                    assert source.read(i * BLOCK, 2 * BLOCK) == data[i * BLOCK :][: 2 * BLOCK]
                settle(blocks)
                assert blocks.stats().used <= 40 * BLOCK
            allocated = sum(path.stat().st_blocks * 512 for path in folder.glob("*.data"))
            assert allocated <= 40 * BLOCK + (1 << 20)
    assert killed == 40


def test_watermarks_and_what_is_evicted(tmp_path: Path) -> None:
    data = os.urandom(3000 * BLOCK)
    far = Far(data)
    with cache(tmp_path, 200) as blocks:
        hot, cold = blocks.open(DIGEST, far), blocks.open(OTHER, Far(data))
        for i in range(20):
            hot.read(i * 7 * BLOCK, BLOCK)
        settle(blocks)
        for i in range(100):
            cold.read(i * 8 * BLOCK, BLOCK)
        settle(blocks)
        for i in range(20):
            hot.read(i * 7 * BLOCK, BLOCK)  # used again
        fetched = far.fetched
        for i in range(100, 330):
            cold.read(i * 8 * BLOCK, BLOCK)
            if i % 10 == 0:
                settle(blocks)
            assert blocks.stats().used <= 200 * BLOCK
        settle(blocks)
        stats = blocks.stats()
        assert stats.evictions > 100
        assert LOW * 200 * BLOCK - BLOCK <= stats.used <= HIGH * 200 * BLOCK
        allocated = sum(path.stat().st_blocks * 512 for path in tmp_path.glob("*.data"))
        assert allocated <= 200 * BLOCK
        for i in range(10):
            hot.read(i * 7 * BLOCK, BLOCK)
        assert far.fetched == fetched  # still there: the least recently used would be gone


@given(
    st.lists(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=30), max_size=4),
    st.integers(-1, 200),
)
@settings(deadline=None)
def test_choosing_is_by_age(layers: list[list[tuple[bool, int]]], count: int) -> None:
    entries = []
    for n, blocks in enumerate(layers):
        entries.append((str(n), np.array([(int(here), used) for here, used in blocks], dtype=cachefile.ENTRY)))
    chosen = choose(entries, count)
    ages = {(n, i): used for n, blocks in enumerate(layers) for i, (here, used) in enumerate(blocks) if here}
    picked = {(int(n), int(i)) for n, numbers in chosen.items() for i in numbers}
    assert picked <= set(ages)
    assert len(picked) == min(max(count, 0), len(ages))
    left = [used for key, used in ages.items() if key not in picked]
    assert not picked or not left or max(ages[key] for key in picked) <= min(left)


def full(*_: object) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(100 * BLOCK)
    with cache(tmp_path) as blocks:
        source = blocks.open(DIGEST, Far(data))
        source.read(0, 10 * BLOCK)
        settle(blocks)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            assert source.read(50 * BLOCK, 10 * BLOCK) == data[50 * BLOCK : 60 * BLOCK]
            settle(blocks)
            assert not blocks.stats().writing
            assert source.read(0, len(data)) == data
        assert blocks.stats().used >= 10 * BLOCK


def test_a_really_full_disk(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("mounting needs root")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], check=True)
    try:
        data = os.urandom(200 * BLOCK)
        with cache(tmp_path) as blocks:
            source = blocks.open(DIGEST, Far(data))
            for i in range(0, 200, 5):
                assert source.read(i * BLOCK, 5 * BLOCK) == data[i * BLOCK :][: 5 * BLOCK]
                settle(blocks)
            assert source.read(0, len(data)) == data
            assert 0 < blocks.stats().used < 64 * BLOCK
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_room_that_others_need(tmp_path: Path) -> None:
    """Below the reserve nothing is kept, and some is given back."""
    free = [100]
    data = os.urandom(400 * BLOCK)
    with cache(tmp_path, reserve=50, free_space=lambda _: free[0]) as blocks:
        source = blocks.open(DIGEST, Far(data))
        source.read(0, 100 * BLOCK)
        settle(blocks)
        before = blocks.stats().used
        free[0] = 10
        blocks._room_checked = 0.0  # it is measured once per second
        assert source.read(200 * BLOCK, 3 * BLOCK) == data[200 * BLOCK : 203 * BLOCK]
        settle(blocks)
        assert 0 < blocks.stats().used < before


@pytest.mark.parametrize("folder", ["file", "readonly", None])
def test_without_a_disk(tmp_path: Path, folder: str | None) -> None:
    data = os.urandom(100 * BLOCK)
    path = tmp_path / "cache" if folder else None
    if folder == "file":
        (tmp_path / "cache").write_text("in the way")
    elif folder == "readonly":
        if os.getuid():
            pytest.skip("mounting needs root")
        (tmp_path / "cache").mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(path)], check=True)
    try:
        far = Far(data)
        with cache(path, memory=50 * BLOCK) as blocks:
            source = blocks.open(DIGEST, far)
            assert source.read(0, len(data)) == data
            assert source.read(95 * BLOCK, BLOCK) == data[95 * BLOCK : 96 * BLOCK]
            assert far.fetched == len(data)  # the last ones are in memory
            assert blocks.stats().memory <= 50 * BLOCK
    finally:
        if folder == "readonly":
            subprocess.run(["umount", str(path)], check=True)


def test_failures_are_retried_and_then_reported(tmp_path: Path) -> None:
    data = os.urandom(100 * BLOCK)
    far = Far(data)
    failures = [2]

    def fail(offset: int, length: int) -> None:
        if failures[0]:
            failures[0] -= 1
            raise (SourceError if failures[0] % 2 else ConnectionResetError)("no")

    far.before = fail
    with cache(tmp_path) as blocks:
        source = blocks.open(DIGEST, far)
        assert source.read(0, BLOCK) == data[:BLOCK]
        failures[0] = 3
        with pytest.raises(SourceError, match="cannot be fetched"):
            source.read(50 * BLOCK, BLOCK)
        assert source.read(50 * BLOCK, BLOCK) == data[50 * BLOCK : 51 * BLOCK]


def test_a_source_that_hangs_keeps_one_reader(tmp_path: Path) -> None:
    data = os.urandom(100 * BLOCK)
    gate = threading.Event()
    far = Far(data)
    far.before = lambda *_: wait(gate)
    policy = FetchPolicy(attempts=2, first_wait=0.001, deadline=0.2)
    blocks = cache(tmp_path, policy=policy)
    try:
        hung, fine = blocks.open(DIGEST, far), blocks.open(OTHER, Far(data))
        with pytest.raises(SourceError, match="in time"):
            hung.read(0, BLOCK)
        assert fine.read(0, BLOCK) == data[:BLOCK]
        gate.set()
        assert hung.read(0, BLOCK) == data[:BLOCK]  # another fetch, not the one that hung
    finally:
        gate.set()
        blocks.close()


def test_waits_between_tries() -> None:
    now, waits = [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    far = Far(b"")
    policy = FetchPolicy(attempts=8, first_wait=1, longest_wait=8, deadline=20)
    with pytest.raises(SourceError):
        fetch(far, 0, 10, policy, clock=lambda: now[0], sleep=sleep)
    assert 2 < len(waits) < 8
    assert sum(waits) < 20
    assert all(2**n / 2 <= wait <= 2**n for n, wait in enumerate(waits[:4]))


def test_reading_ahead(tmp_path: Path) -> None:
    """A scan fetches in large pieces before it is asked; scattered reads fetch what they need."""
    data = os.urandom(4000 * BLOCK)
    far = Far(data)
    with cache(tmp_path, 5000) as blocks:
        source = blocks.open(DIGEST, far)
        numbers = random.Random(3).sample(range(2000), 200)
        for i in numbers:
            assert source.read(i * BLOCK, BLOCK) == data[i * BLOCK :][:BLOCK]
        assert far.fetched <= 210 * BLOCK
        before = len(far.reads)
        for i in range(2000, 4000):
            assert source.read(i * BLOCK, BLOCK) == data[i * BLOCK :][:BLOCK]
        settle(blocks)
        assert len(far.reads) - before < 200
        assert far.fetched <= 2210 * BLOCK


def test_closing_a_layer_that_two_use(tmp_path: Path) -> None:
    data = os.urandom(10 * BLOCK)
    with cache(tmp_path) as blocks:
        one, two = blocks.open(DIGEST, Far(data)), blocks.open(DIGEST, Far(data))
        assert one is two
        one.close()
        assert two.read(0, BLOCK) == data[:BLOCK]
        two.close()
        assert blocks.open(DIGEST, Far(data)) is not two
