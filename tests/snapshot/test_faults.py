"""An S3 server that misbehaves, a folder that is full or read-only: errors are typed, and nothing half is seen."""

import subprocess
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from aenv.errors import AenvError, CapacityError, InvalidRequestError, SourceError
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.s3 import S3Store
from aenv.snapshot.shared import SharedRepository
from tests.snapshot.proxy import FaultyProxy
from tests.snapshot.s3_server import ACCESS, SECRET, S3Server
from tests.snapshot.things import commit_files, make_file

ID, OTHER = "ab" * 10, "cd" * 10
SIZE = 3 << 20


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultyProxy]:
    made = FaultyProxy(s3.port)
    yield made
    made.close()


class Remote:
    """A repository behind the proxy, with one snapshot in it, and the same without the proxy."""

    def __init__(self, server: S3Server, proxy: FaultyProxy, folder: Path, deadline: float) -> None:
        self.prefix = uuid.uuid4().hex
        self.folder = folder
        self.direct = SharedRepository(S3Store(server.settings(self.prefix)))
        self.faulty = SharedRepository(S3Store(server.settings(self.prefix, proxy.port), deadline=deadline))
        self.file = folder / "file"
        make_file(self.file, SIZE)
        self.ref = commit_files(self.faulty, ID, [self.file]).disk.layers[0]
        make_file(folder / "new", SIZE)

    def read_all(self) -> None:
        self.faulty.fetch(self.ref, self.folder / "copy")
        assert (self.folder / "copy").read_bytes() == self.file.read_bytes()

    def commit(self) -> None:
        commit_files(self.faulty, OTHER, [self.file, self.folder / "new"])

    def check(self, committed: set[str]) -> None:
        assert {value.id for value in self.direct.list()} == committed
        assert self.direct.verify().clean
        self.direct.drop_claims("node")
        for snapshot in committed:
            self.direct.delete(snapshot)
        self.direct.gc(timedelta(0))
        assert not [*self.direct.store.list("layers/"), *self.direct.store.list("claims/")]


@pytest.mark.parametrize("fault", ["unavailable", "reset", "truncate"])
def test_a_fault_that_passes_is_not_noticed(s3: S3Server, proxy: FaultyProxy, tmp_path: Path, fault: str) -> None:
    remote = Remote(s3, proxy, tmp_path, deadline=60)
    for action in (remote.read_all, remote.commit):
        proxy.set(fault, times=3)
        action()
        assert proxy.met or (fault == "truncate" and action == remote.commit)
    remote.check({ID, OTHER})


def test_a_slow_server_is_waited_for(s3: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    remote = Remote(s3, proxy, tmp_path, deadline=60)
    proxy.set("slow")
    remote.read_all()
    remote.commit()
    remote.check({ID, OTHER})


@pytest.mark.parametrize("fault", ["unavailable", "reset", "stall", "gone"])
def test_a_fault_that_stays_is_a_typed_error(s3: S3Server, proxy: FaultyProxy, tmp_path: Path, fault: str) -> None:
    remote = Remote(s3, proxy, tmp_path, deadline=1.5)
    if fault == "gone":
        proxy.close()
    else:
        proxy.set(fault)
    for action in (remote.read_all, remote.commit, lambda: remote.faulty.gc(timedelta(0))):
        with pytest.raises(SourceError) as caught:
            action()
        assert "Debug source" not in str(caught.value) and SECRET not in str(caught.value)
    assert not (tmp_path / "copy").exists()
    remote.check({ID})


def test_a_repeated_request_that_meets_itself_is_no_failure(s3: S3Server, proxy: FaultyProxy, tmp_path: Path) -> None:
    """The server did what it was asked and its answer was lost: the conditional put comes a second time."""
    remote = Remote(s3, proxy, tmp_path, deadline=60)

    class Losing(S3Store):
        lost = 0

        def _put(self, key: str, data: bytes, mode: object) -> str:
            etag = super()._put(key, data, mode)
            if mode != "overwrite" and not key.startswith("probe/") and not self.lost:
                self.lost += 1
                return super()._put(key, data, mode)
            return etag

    store = Losing(s3.settings(remote.prefix))
    repository = SharedRepository(store)
    commit_files(repository, OTHER, [remote.file])
    assert store.lost == 1
    actions: list[Callable[[], None]] = [
        lambda: repository.set_name("a", "b", OTHER),
        lambda: repository.set_name("a", "b", ID),
        lambda: repository.delete_name("a", "b"),
    ]
    for action in actions:
        store.lost = 0
        action()
        assert store.lost == 1
    assert not list(repository.names())


@pytest.mark.parametrize(
    ("wrong", "word"), [({"secret_access_key": "wrong"}, "keys"), ({"bucket": "absent"}, "bucket")]
)
def test_wrong_settings_say_what_to_correct(s3: S3Server, wrong: dict[str, object], word: str) -> None:
    repository = SharedRepository(S3Store(s3.settings("x", None, **wrong), deadline=30))
    with pytest.raises(SourceError, match=word):
        repository.gc(timedelta(0))


def test_keys_from_a_credential_process(s3: S3Server, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    expires = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    keys.write_text(
        f'{{"Version": 1, "AccessKeyId": "{ACCESS}", "SecretAccessKey": "{SECRET}", "Expiration": "{expires}"}}'
    )
    plain: dict[str, object] = {"access_key_id": None, "secret_access_key": None}
    store = S3Store(s3.settings("process", None, credential_process=f"cat {keys}", **plain))
    store.put("key", b"value")
    assert store.get("key")[0] == b"value"
    keys.write_text("{}")
    with pytest.raises(AenvError):
        S3Store(s3.settings("process", None, credential_process=f"cat {keys}", **plain), deadline=2).put("key", b"")


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_conditions_is_refused(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    """Played by a store that leaves the condition out of the request, which comes to the same."""
    store = S3Store(s3.settings("unsafe"))
    put = store._put

    def careless(key: str, data: bytes, mode: object) -> str:
        ignored = mode == "create" if header == "If-None-Match" else isinstance(mode, dict)
        return put(key, data, "overwrite" if ignored else mode)

    monkeypatch.setattr(store, "_put", careless)
    with pytest.raises(InvalidRequestError, match=header):
        store.put("key", b"")
    assert not list(S3Store(s3.settings("unsafe")).list("probe/"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    repository = SharedRepository(PosixStore(small_disk / "repository"))
    make_file(tmp_path / "x", SIZE)
    make_file(tmp_path / "large", 10 << 20)
    kept = commit_files(repository, ID, [tmp_path / "x"])
    with pytest.raises(CapacityError):
        commit_files(repository, OTHER, [tmp_path / "large"])
    assert not list((small_disk / "repository/tmp").iterdir())
    # Not one byte is left: not even a claim can be written.
    with (small_disk / "ballast").open("wb", buffering=0) as ballast, pytest.raises(OSError):
        while True:
            ballast.write(bytes(4096))
    with pytest.raises(CapacityError):
        commit_files(repository, OTHER, [tmp_path / "x"])
    with pytest.raises(CapacityError):
        repository.set_name("a", "b", ID)
    repository.fetch(kept.disk.layers[0], tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "x").read_bytes()
    assert repository.verify().clean and [value.id for value in repository.list()] == [ID]
    repository.delete(ID)
    (small_disk / "ballast").unlink()
    assert repository.gc(timedelta(0)).bytes_freed == SIZE
    assert repository.usage().layers == 0


def test_a_folder_that_is_read_only(small_disk: Path, tmp_path: Path) -> None:
    repository = SharedRepository(PosixStore(small_disk / "repository"))
    make_file(tmp_path / "x", SIZE)
    kept = commit_files(repository, ID, [tmp_path / "x"])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for action in (
        lambda: commit_files(repository, OTHER, [tmp_path / "x"]),
        lambda: repository.set_name("a", "b", ID),
        lambda: repository.delete(ID),
        lambda: repository.gc(timedelta(0)),
    ):
        with pytest.raises(SourceError, match="writable"):
            action()
    repository.fetch(kept.disk.layers[0], tmp_path / "copy")
    assert repository.verify().clean and repository.get(ID) == kept
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    commit_files(repository, OTHER, [tmp_path / "x"])
    assert repository.verify().clean
