"""What the repository relies on, of a folder and of a real S3 server alike."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aenv.errors import CorruptFileError, SourceError
from aenv.snapshot.objects import ObjectMissingError, ObjectStore, PreconditionError
from aenv.snapshot.posix import PosixStore


def test_objects_are_written_read_listed_and_deleted(store: ObjectStore) -> None:
    etag = store.put("a/b c.json", b"one")
    data, info = store.get("a/b c.json")
    assert (data, info.size, info.etag) == (b"one", 3, etag)
    assert abs(datetime.now(UTC) - info.modified) < timedelta(minutes=5)
    store.put("a/d/e", b"")
    store.put("ab", b"not in the folder a")
    assert sorted(info.key for info in store.list("a/")) == ["a/b c.json", "a/d/e"]
    store.delete("a/b c.json", "a/never", "a/d/e")
    assert not list(store.list("a/"))
    assert store.head("a/d/e") is None
    with pytest.raises(ObjectMissingError):
        store.get("a/d/e")


def test_of_many_that_create_an_object_one_does(store: ObjectStore) -> None:
    def create(number: int) -> bool:
        try:
            store.put("key", str(number).encode() * 100, if_absent=True)
            return True
        except PreconditionError:
            return False

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(create, range(8)))
    assert sum(made) == 1
    assert store.get("key")[0] == str(made.index(True)).encode() * 100


def test_of_many_that_replace_an_object_one_does(store: ObjectStore) -> None:
    for _ in range(5):
        etag = store.put("key", os.urandom(8))

        def replace(number: int, etag: str = etag) -> bool:
            try:
                store.put_if_match("key", b"%8d" % number, etag)
                return True
            except PreconditionError:
                return False

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(replace, range(8))) == 1
    with pytest.raises(PreconditionError):
        store.put_if_match("absent", b"", etag)


def test_etags_differ_however_fast_an_object_changes(store: ObjectStore) -> None:
    etags = [store.put("key", b"0")]
    for number in range(1, 10):
        etags.append(store.put_if_match("key", str(number).encode(), etags[-1]))
    assert len(set(etags)) == 10


def test_a_large_file_is_read_by_range(store: ObjectStore, tmp_path: Path) -> None:
    content = os.urandom(20 << 20)
    (tmp_path / "file").write_bytes(content)
    steps: list[int] = []
    store.put_file("layers/aa/x", tmp_path / "file", hashlib.sha256(content).hexdigest(), steps.append)
    assert sum(steps) == len(content)
    source = store.open("layers/aa/x", len(content))
    for offset, length in ((0, 10), (12345, 1 << 20), (len(content) - 1, 1), (7, 0)):
        assert source.read(offset, length) == content[offset : offset + length]
    with pytest.raises(CorruptFileError):
        source.read(len(content) - 1, 2)
    source.close()


def test_an_empty_file(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store.put_file("layers/aa/x", tmp_path / "file", hashlib.sha256().hexdigest())
    info = store.head("layers/aa/x")
    assert info is not None and info.size == 0
    assert store.open("layers/aa/x", 0).read(0, 0) == b""


def test_a_file_of_another_digest_is_not_stored(store: ObjectStore, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(os.urandom(9 << 20))
    with pytest.raises(CorruptFileError):
        store.put_file("layers/aa/x", tmp_path / "file", "00" * 32)
    assert store.head("layers/aa/x") is None
    if isinstance(store, PosixStore):
        assert not list((store.root / "tmp").iterdir())


def test_an_object_that_is_gone_or_short(store: ObjectStore) -> None:
    with pytest.raises(SourceError):
        store.open("layers/aa/absent", 10).read(0, 10)
    store.put("layers/aa/short", b"12345")
    with pytest.raises(CorruptFileError):
        store.open("layers/aa/short", 10).read(0, 10)


def test_refreshing_moves_the_time_on_and_recreates(store: ObjectStore) -> None:
    store.put("claims/a", b"x")
    first = store.head("claims/a")
    store.refresh("claims/a", b"x")
    second = store.head("claims/a")
    assert first and second and second.modified >= first.modified
    store.delete("claims/a")
    store.refresh("claims/a", b"x")
    assert store.get("claims/a")[0] == b"x"


def test_sweeping_removes_what_crashed_writers_left(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.put("key", b"")
    (tmp_path / "tmp/torn").write_bytes(b"half")
    assert store.sweep(datetime.now(UTC) - timedelta(hours=1)) == 0
    assert store.sweep(datetime.now(UTC) + timedelta(hours=1)) == 1
    assert not list((tmp_path / "tmp").iterdir())
