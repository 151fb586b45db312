"""Kills a process at every step of what it does with a repository, and looks at what is left. Run by ``test_kill``.

    python -m tests.snapshot.killed SCENARIO FOLDER [S3-SETTINGS-AS-JSON]

Each run is a forked process that kills itself: in a folder before every call that touches a file of the repository
and in the middle of every write; in a bucket before every request and in the middle of every upload.
"""

import json
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from aenv.config import RepositorySettings
from aenv.errors import SnapshotNotFoundError
from aenv.snapshot import posix
from aenv.snapshot.collector import layer_key
from aenv.snapshot.objects import ObjectStore
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.s3 import S3Store
from aenv.snapshot.shared import SharedRepository
from tests.snapshot.things import commit_files

OLD, NEW = "0" * 20, "a" * 20
EVENTS = {
    "open",
    "os.rename",
    "os.link",
    "os.remove",
    "os.mkdir",
    "os.utime",
    "os.scandir",
    "os.listdir",
    "fcntl.flock",
}
NOW = timedelta(0)


class Fuse:
    """Kills this process at the step of that number."""

    def __init__(self, number: int) -> None:
        self.left = number

    def step(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def watch_files(root: Path, fuse: Fuse) -> None:
    """Every call of Python's that touches a file below ``root`` is a step, and the middle of every write."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and (event == "fcntl.flock" or any(str(word).startswith(str(root)) for word in arguments)):
            fuse.step()

    whole = posix._write

    def in_two(fd: int, data: bytes | memoryview) -> None:
        half = len(data) // 2
        whole(fd, data[:half])
        fuse.step()
        whole(fd, data[half:])

    posix._write = in_two
    sys.addaudithook(hook)


class Watched:
    """A store each of whose requests is a step, and each block of an upload."""

    def __init__(self, store: ObjectStore, fuse: Fuse) -> None:
        self._store = store
        self._fuse = fuse
        self.parallel = 1

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def request(*arguments: Any, **named: Any) -> Any:
            self._fuse.step()
            if name == "put_file":
                arguments = (*arguments[:3], lambda _: self._fuse.step())
            return call(*arguments, **named)

        return request


class Scenario:
    def __init__(self, name: str, folder: Path, settings: dict[str, Any] | None) -> None:
        self.name = name
        self.files = folder / "files"
        self.folder = folder
        self.settings = settings
        self.prefix = uuid.uuid4().hex

    def store(self) -> ObjectStore:
        if self.settings is None:
            return PosixStore(self.folder / self.prefix)
        return S3Store(RepositorySettings.model_validate(self.settings | {"prefix": self.prefix}))

    def begin(self) -> None:
        repository = SharedRepository(self.store())
        commit_files(repository, OLD, [self.files / "shared", self.files / "old"])
        repository.set_name("name", "default", OLD)

    def act(self, number: int) -> None:
        fuse = Fuse(number)
        store = self.store()
        if isinstance(store, PosixStore):
            watch_files(store.root, fuse)
            repository = SharedRepository(store)
        else:
            repository = SharedRepository(Watched(store, fuse))
        if self.name == "commit":
            commit_files(repository, NEW, [self.files / "shared", self.files / "new"], "victim")
            repository.set_name("name", "default", NEW)
        else:
            repository.delete(OLD)
            repository.gc(NOW)

    def look(self) -> None:
        """What was reported, or was there before, is whole; nothing half is seen; the node's next life goes on."""
        store = self.store()
        repository = SharedRepository(store)
        self.restore(repository)
        assert repository.verify().clean, repository.verify()
        if self.name == "commit":
            assert {value.id for value in repository.list()} in ({OLD}, {OLD, NEW})
            assert repository.resolve("name", "default") in (OLD, NEW)
        # The next life: what the last one held is let go, and what it was about is done again.
        repository.drop_claims("victim")
        self.let_tombs_grow_old(store)
        commit_files(
            repository,
            NEW,
            [self.files / "shared", self.files / "new", self.files / "old"][: 2 + (self.name != "commit")],
        )
        try:
            repository.delete(OLD)
        except SnapshotNotFoundError:
            assert self.name == "delete"
        repository.gc(NOW)
        store.sweep(datetime.now(UTC) + timedelta(days=1))
        self.restore(repository)
        assert [value.id for value in repository.list()] == [NEW]
        assert repository.verify().clean
        named = {layer_key(digest) for value in repository.list() for digest in value.digests()}
        assert {info.key for info in store.list("layers/")} == named, "space is not reclaimed"
        assert not [*store.list("claims/"), *store.list("tombs/"), *store.list("tmp/")]

    def restore(self, repository: SharedRepository) -> None:
        for value in repository.list():
            wanted = [self.files / "shared", self.files / ("old" if value.id == OLD else "new")]
            for ref, path in zip(value.disk.layers, wanted, strict=False):
                repository.fetch(ref, self.folder / "copy")
                assert (self.folder / "copy").read_bytes() == path.read_bytes()

    def let_tombs_grow_old(self, store: ObjectStore) -> None:
        root = store.root if isinstance(store, PosixStore) else Path(os.environ["S3_FOLDER"]) / self.prefix
        for tomb in (root / "tombs").glob("*.json"):
            os.utime(tomb, (0, 0))


def run(function: Callable[[], None]) -> int:
    """The wait status of a forked process that does it."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    try:
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(name: str, folder: Path, settings: dict[str, Any] | None) -> int:
    """How many steps there were."""
    for number in range(1000):
        scenario = Scenario(name, folder, settings)
        assert run(scenario.begin) == 0
        status = run(lambda scenario=scenario, number=number: scenario.act(number))  # type: ignore[misc]
        assert status in (0, signal.SIGKILL), f"step {number}: status {status}"
        assert run(scenario.look) == 0, f"after step {number}"
        if status == 0:
            return number
    raise AssertionError("it does not end")


if __name__ == "__main__":
    print(main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]) if len(sys.argv) > 3 else None))
