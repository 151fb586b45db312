"""Objects in a folder: of one host, or shared between hosts by a network file system.

What survives a crash: an object is written under ``tmp/``, synced, and moved to its name, and the folder of the name
is synced. So a name is absent or has all of its bytes, also after a loss of power. What a crash leaves under ``tmp/``
is removed by ``sweep``. Conditional replacement is guarded by a lock on ``lock`` (``flock``, which Linux's NFS client
passes on to the server).
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from aenv.errors import CapacityError, CorruptFileError, SourceError
from aenv.snapshot.objects import ObjectInfo, ObjectMissingError, OpenObject, PreconditionError, Step
from aenv.storage.source import FileSource, check_range

_CHUNK = 1 << 20
_FULL = {errno.ENOSPC, errno.EDQUOT}


class PosixStore:
    """``ObjectStore`` in ``root``, which is made with mode 0700 by the first write: snapshots hold guests' memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.parallel = 1  # the work of a request is Python's own
        self._tmp = root / "tmp"

    def describe(self) -> str:
        return str(self.root)

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        with self._errors(key), self._path(key).open("rb") as file:
            return file.read(), _info(key, os.fstat(file.fileno()))

    def open(self, key: str, size: int) -> OpenObject:
        return LazyFileSource(self._path(key), size)

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors(key):
                return _info(key, self._path(key).stat())
        except ObjectMissingError:
            return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        pending = [prefix.rstrip("/")]
        while pending:
            folder = pending.pop()
            try:
                with self._errors(folder), os.scandir(self.root / folder) as entries:
                    # Read to its end before anybody acts on it: an entry that moves while it is read may be missed.
                    found = list(entries)
            except ObjectMissingError:
                continue
            for entry in found:
                key = f"{folder}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(key)
                    continue
                if not entry.is_file(follow_symlinks=False):
                    continue  # nobody's object, and a FIFO would make its reader wait for ever
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    yield _info(key, entry.stat(follow_symlinks=False))

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        with self._errors(key), self._temporary() as (part, fd):
            _write(fd, data)
            os.fsync(fd)
            self._publish(part, key, if_absent=if_absent)
            return _etag(os.fstat(fd))

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        with self._errors(key), self._temporary() as (part, fd):
            _write(fd, data)
            os.fsync(fd)
            with self._lock():
                old = self._path(key).stat() if self._path(key).exists() else None
                if old is None or _etag(old) != etag:
                    raise PreconditionError(f"{key} was changed by somebody else.")
                # Clocks of files tick in milliseconds and inodes are used again: etags differ because times rise.
                if (new := os.fstat(fd)).st_mtime_ns <= old.st_mtime_ns:
                    os.utime(fd, ns=(new.st_atime_ns, old.st_mtime_ns + 1))
                self._publish(part, key, if_absent=False)
            return _etag(os.fstat(fd))

    def put_file(self, key: str, path: Path, sha256: str, progress: Step | None = None) -> None:
        with self._errors(key), path.open("rb", buffering=0) as source, self._temporary() as (part, fd):
            digest = hashlib.sha256()
            buffer = memoryview(bytearray(_CHUNK))
            while count := source.readinto(buffer):
                digest.update(buffer[:count])
                _write(fd, buffer[:count])
                if progress:
                    progress(count)
            if digest.hexdigest() != sha256:
                raise CorruptFileError(
                    f"{path} does not have the digest sha256:{sha256}.", "It changed, or is damaged."
                )
            os.fsync(fd)
            self._publish(part, key, if_absent=False)

    def refresh(self, key: str, data: bytes) -> None:
        try:
            with self._errors(key):
                os.utime(self._path(key))
        except ObjectMissingError:
            self.put(key, data)

    def delete(self, *keys: str) -> None:
        folders = set()
        with self._errors(keys[0] if keys else ""):
            for key in keys:
                with contextlib.suppress(FileNotFoundError):
                    self._path(key).unlink()
                    folders.add(self._path(key).parent)
            for folder in folders:
                _sync_folder(folder)

    def delete_once(self, *keys: str) -> None:
        self.delete(*keys)

    def sweep(self, before: datetime) -> int:
        count = 0
        try:
            with self._errors("tmp"):
                for part in self._tmp.iterdir():
                    with contextlib.suppress(FileNotFoundError):
                        # Who writes still, however slowly, moves its time of modification on.
                        if part.stat().st_mtime < before.timestamp():
                            part.unlink()
                            count += 1
        except ObjectMissingError:
            pass
        return count

    def _path(self, key: str) -> Path:
        return self.root / key

    @contextlib.contextmanager
    def _temporary(self) -> Iterator[tuple[Path, int]]:
        """A new file under ``tmp/`` that is gone afterwards, unless it was moved away."""
        if not self._tmp.is_dir():
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._tmp.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(self.root)
        part = self._tmp / uuid.uuid4().hex
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            yield part, fd
        finally:
            os.close(fd)
            part.unlink(missing_ok=True)

    def _publish(self, part: Path, key: str, *, if_absent: bool) -> None:
        target = self._path(key)
        self._make_folder(target.parent)
        if if_absent:
            try:
                os.link(part, target)
            except FileExistsError:
                raise PreconditionError(f"{key} exists already.") from None
        else:
            part.replace(target)
        _sync_folder(target.parent)

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folder(folder.parent)
            folder.mkdir(mode=0o700, exist_ok=True)
            _sync_folder(folder.parent)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.root / "lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectMissingError(f"{error.filename or key} does not exist.") from error
        except OSError as error:
            if error.errno in _FULL:
                raise CapacityError(
                    f"The repository {self.root} is full.", "Make room: delete snapshots, then run aenv-store gc."
                ) from error
            raise SourceError(f"{key} in {self.root} cannot be used: {error.strerror}.", _advice(error)) from error


class LazyFileSource:
    """A file of the repository that is opened by its first read, and then stays open: it may be deleted meanwhile."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._size = size
        self._file: FileSource | None = None
        self._opening = threading.Lock()

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, self.path)
        return (self._file or self._open()).read(offset, length)

    def close(self) -> None:
        with self._opening:
            if self._file:
                self._file.close()
                self._file = None

    def _open(self) -> FileSource:
        with self._opening:
            if self._file is None:
                file = FileSource(self.path)
                if file.size != self._size:
                    file.close()
                    raise CorruptFileError(f"{self.path} has {file.size} bytes and was stored with {self._size}.")
                self._file = file
            return self._file


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, stat.st_size, _etag(stat), datetime.fromtimestamp(stat.st_mtime, UTC))


def _etag(stat: os.stat_result) -> str:
    return f"{stat.st_mtime_ns:x}-{stat.st_ino:x}-{stat.st_size:x}"


def _write(fd: int, data: bytes | memoryview) -> None:
    """All of it: ``write(2)`` may stop before the end, on a disk that is nearly full."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _advice(error: OSError) -> str:
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return "The repository must be writable by the node: check its mount and its permissions."
    return "Check the disk or the network file system that it is on."
