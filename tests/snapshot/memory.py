"""An object store in memory whose operations an explorer can hold up, one by one."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aenv.errors import CorruptFileError
from aenv.snapshot.objects import ObjectInfo, ObjectMissingError, PreconditionError, Step
from aenv.storage.source import check_range

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Operation:
    """One request: what it reads or writes. A listing reads all keys that begin with its prefix."""

    name: str
    keys: tuple[str, ...]
    writes: bool

    def conflicts(self, other: "Operation") -> bool:
        """Whether the order of the two can matter."""
        if not (self.writes or other.writes):
            return False
        return any(_overlap(self, mine, other, theirs) for mine in self.keys for theirs in other.keys)


def _overlap(one: Operation, a: str, two: Operation, b: str) -> bool:
    if one.name == "list":
        return b.startswith(a)
    if two.name == "list":
        return a.startswith(b)
    return a == b


def _free(operation: Operation) -> None:
    pass


@dataclass
class MemoryStore:
    """``before`` is called before each operation and may raise; then the operation does not happen.

    ``seconds`` is the clock of the store and of its users.
    """

    before: Callable[[Operation], None] = _free
    seconds: float = 0.0
    objects: dict[str, tuple[bytes, int, datetime]] = field(default_factory=dict)
    parallel: int = 1
    _etag: int = 0

    def now(self) -> float:
        return self.seconds

    def describe(self) -> str:
        return "memory"

    def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        self.before(Operation("get", (key,), False))
        if key not in self.objects:
            raise ObjectMissingError(key)
        return self.objects[key][0], self._info(key)

    def open(self, key: str, size: int) -> "MemorySource":
        return MemorySource(self, key, size)

    def head(self, key: str) -> ObjectInfo | None:
        self.before(Operation("head", (key,), False))
        return self._info(key) if key in self.objects else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.before(Operation("list", (prefix,), False))
        return iter([self._info(key) for key in list(self.objects) if key.startswith(prefix)])

    def put(self, key: str, data: bytes, *, if_absent: bool = False) -> str:
        self.before(Operation("put", (key,), True))
        if if_absent and key in self.objects:
            raise PreconditionError(key)
        return self._store(key, data)

    def put_if_match(self, key: str, data: bytes, etag: str) -> str:
        self.before(Operation("put_if_match", (key,), True))
        if key not in self.objects or self._info(key).etag != etag:
            raise PreconditionError(key)
        return self._store(key, data)

    def put_file(self, key: str, path: Path, sha256: str, progress: Step | None = None) -> None:
        self.before(Operation("put_file", (key,), True))
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != sha256:
            raise CorruptFileError(str(path))
        self._store(key, data)

    def refresh(self, key: str, data: bytes) -> None:
        self.before(Operation("refresh", (key,), True))
        self._store(key, data)

    def delete(self, *keys: str) -> None:
        self.before(Operation("delete", keys, True))
        for key in keys:
            self.objects.pop(key, None)

    def delete_once(self, *keys: str) -> None:
        self.delete(*keys)

    def sweep(self, before: datetime) -> int:
        return 0

    def _store(self, key: str, data: bytes) -> str:
        self._etag += 1
        self.objects[key] = data, self._etag, EPOCH + timedelta(seconds=self.seconds)
        return str(self._etag)

    def _info(self, key: str) -> ObjectInfo:
        data, etag, modified = self.objects[key]
        return ObjectInfo(key, len(data), str(etag), modified)


@dataclass
class MemorySource:
    store: MemoryStore
    key: str
    size: int

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, self.key)
        return self.store.get(self.key)[0][offset : offset + length]

    def close(self) -> None:
        pass
