"""The blob cache: content-addressed files under ``$AENV_HOME/images/blobs``, shared between images.

``<algorithm>/<hex>`` is a whole, verified blob: it was written under ``partial/``, checked, synced and renamed, so a
crash leaves a whole blob, or a partial file that a later download continues. Who uses a blob holds a shared lock on
it (a lease); removal takes the exclusive one, so nothing in use is removed, also across processes and crashes.
A blob's modification time is the time of its last use.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from aenv.image.errors import DigestMismatchError
from aenv.image.locks import locked, names, try_lock
from aenv.image.reference import is_digest

_CHUNK = 1 << 20
_PARTIAL = "partial"
_STALE_PARTIAL_S = 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Blob:
    """One cached blob: ``size`` in bytes, ``used`` in seconds since the epoch."""

    digest: str
    size: int
    used: float


class Lease:
    """A blob that stays in the cache until the lease is closed."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Partial:
    """A blob that is being written. Blocking: call it in a thread."""

    def __init__(self, digest: str, path: Path, descriptor: int) -> None:
        self.digest = digest
        self.path = path
        self.descriptor = descriptor
        self._hash = hashlib.new(digest.partition(":")[0])
        self.size = 0

    def resume(self) -> None:
        """Count what a former attempt wrote; the next byte to write is ``size``."""
        self._hash = hashlib.new(self.digest.partition(":")[0])
        self.size = 0
        os.lseek(self.descriptor, 0, os.SEEK_SET)
        while data := os.read(self.descriptor, _CHUNK):
            self._hash.update(data)
            self.size += len(data)

    def restart(self) -> None:
        os.ftruncate(self.descriptor, 0)
        self.resume()

    def append(self, data: bytes | bytearray) -> None:
        view = memoryview(data)
        while view:
            written = os.write(self.descriptor, view)
            self._hash.update(view[:written])
            self.size += written
            view = view[written:]

    def verify(self) -> None:
        """Raises DigestMismatchError, after discarding the content."""
        found = f"{self.digest.partition(':')[0]}:{self._hash.hexdigest()}"
        if found != self.digest:
            self.restart()
            raise DigestMismatchError(
                f"A download that should be {self.digest} is {found}.",
                "It was damaged on the way, or the registry or mirror is damaged: try again, then tell its operator.",
            )


class BlobStore:
    def __init__(self, home: Path) -> None:
        self.root = home / "images" / "blobs"

    def path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise ValueError(f"not a digest: {digest!r}")
        algorithm, _, name = digest.partition(":")
        return self.root / algorithm / name

    def lease(self, digest: str) -> Lease | None:
        """Hold a blob and mark it as used. None where it is not cached."""
        path = self.path(digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        # Where the exclusive lock is held, or was, the blob is being removed.
        if not try_lock(descriptor, shared=True) or not os.fstat(descriptor).st_nlink:
            os.close(descriptor)
            return None
        os.utime(descriptor)
        return Lease(path, descriptor)

    @contextlib.asynccontextmanager
    async def writing(self, digest: str) -> AsyncIterator[Partial]:
        """Write a blob, alone: others who want the same one wait here, and should then look for it again."""
        path = self.root / _PARTIAL / self.path(digest).name
        async with locked(path) as descriptor:
            yield Partial(digest, path, descriptor)

    def commit(self, partial: Partial) -> Lease:
        """Verify what was written and make it a blob. Blocking. Raises DigestMismatchError."""
        partial.verify()
        target = self.path(partial.digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        os.fsync(partial.descriptor)
        # A duplicate shares the writer's lock, which therefore becomes the lease's without a gap.
        fcntl.flock(partial.descriptor, fcntl.LOCK_SH)
        descriptor = os.dup(partial.descriptor)
        try:
            partial.path.rename(target)
            _sync_directory(target.parent)
        except BaseException:
            os.close(descriptor)
            raise
        return Lease(target, descriptor)

    def put(self, data: bytes, digest: str) -> None:
        """Store a small document whose digest was verified."""
        target = self.path(digest)
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.root / _PARTIAL / f"{target.name}.{os.getpid()}.{time.monotonic_ns()}"
        temporary.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)

    def get(self, digest: str) -> bytes | None:
        """A small document, verified again. None where it is not cached or is damaged (it is removed then)."""
        lease = self.lease(digest)
        if lease is None:
            return None
        with lease:
            data = lease.path.read_bytes()
        if hashlib.new(digest.partition(":")[0], data).hexdigest() == digest.partition(":")[2]:
            return data
        self.remove(digest)
        return None

    def blobs(self) -> list[Blob]:
        """Every blob, the longest unused first."""
        found = []
        for directory in (self.root / "sha256", self.root / "sha512"):
            for path in directory.glob("*"):
                digest = f"{directory.name}:{path.name}"
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if is_digest(digest):
                        found.append(Blob(digest, status.st_size, status.st_mtime))
        return sorted(found, key=lambda blob: blob.used)

    def remove(self, digest: str) -> bool:
        """Whether the blob is gone: False where somebody uses it."""
        return remove_unused(self.path(digest))

    def remove_stale_partials(self, now: float) -> None:
        """Remove what downloads left behind a day ago and nobody continued."""
        for path in (self.root / _PARTIAL).glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if now - path.stat().st_mtime > _STALE_PARTIAL_S:
                    remove_unused(path)


def remove_unused(path: Path, *, since: float | None = None) -> bool:
    """Remove a file unless somebody holds a lock on it, or has used it after ``since``. Whether it is gone."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(descriptor) or not names(path, descriptor):
            return False
        if since is not None and os.fstat(descriptor).st_mtime > since:
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
