"""What the repository asks of the place that keeps its objects: a folder or a bucket. No I/O here.

Keys are relative paths with ``/``. A store is strongly consistent: what a ``put`` or ``delete`` that has returned did
is seen by every ``get``, ``head`` and ``list`` that begins afterwards, from any node (S3 since December 2020; POSIX).
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol, TypeVar

from aenv.errors import AenvError
from aenv.storage.source import Source

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_DELETE = 1000  # keys of one request: DeleteObjects of S3

Step = Callable[[int], None]  # called with the number of bytes just done


def in_parallel(count: int, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in order, ``count`` at once. The first error is raised when those under way have ended."""
    if count <= 1:
        return [function(item) for item in items]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, items))


class OpenObject(Source, Protocol):
    """A source that holds a descriptor, perhaps, until it is closed."""

    def close(self) -> None: ...


class ObjectMissingError(AenvError):
    """There is no object of that key."""


class PreconditionError(AenvError):
    """A conditional put was refused: the object exists already, or is no longer the one that was read."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """``modified`` is by the store's own clock. Two contents of one key never have the same ``etag``."""

    key: str
    size: int
    etag: str
    modified: datetime


class ObjectStore(Protocol):
    """Blocking and usable from any thread.

    Methods raise SourceError when the store cannot be used now (after retries of their own), CapacityError when it is
    full, and what is said at each.
    """

    @property
    def parallel(self) -> int:
        """How many requests at once it is worth making."""

    def describe(self) -> str:
        """For people: where it is."""

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """A small object whole. Raises ObjectMissingError."""

    def open(self, key: str, size: int) -> OpenObject:
        """An object of ``size`` bytes, to be read by range. It need not be asked for before the first read."""

    def head(self, key: str) -> ObjectInfo | None:
        """None: there is no such object."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects of the folder ``prefix`` (ends with ``/``) and below it, in any order."""

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        """Write a small object, atomically and durably; its etag. Raises PreconditionError when it is there."""

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        """Replace the object with that etag; the new one's. Raises PreconditionError when it is another, or gone."""

    def put_file(self, key: str, path: Path, sha256: str, progress: Step | None = None) -> None:
        """Write a large object from a file, atomically and durably.

        Raises CorruptFileError, and writes nothing, when the bytes do not have that digest.
        """

    def refresh(self, key: str, data: bytes) -> None:
        """Set ``modified`` of the object, which has these bytes, to now; written anew when it is gone.

        Not ``put``: a folder that is listed meanwhile may lack a file that is replaced (tmpfs, btrfs), not this one.
        """

    def delete(self, *keys: str) -> None:
        """Durably, without error when there is no such object. At most ``MAX_DELETE`` at once."""

    def delete_once(self, *keys: str) -> None:
        """As ``delete``, with one request that is never repeated: a repetition may have a twin, still on its way,
        that deletes what was written after the answer. After an error it may yet happen, a little later.
        """

    def sweep(self, before: datetime) -> int:
        """Remove what crashed writers left that no key names and nobody has touched since; how many things."""
