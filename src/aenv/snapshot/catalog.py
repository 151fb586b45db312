"""Names of snapshots: ``name:tag`` to id, with conditional updates.

A name stands in one of 256 documents ``names/<2 hex>.json``, chosen by the SHA-256 of the name. So resolving is one
read, listing all is at most 256, and removing a name is a conditional update like any other: object stores in general
have no conditional deletion, so with one object for each name a removal could take away what another node just wrote.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from random import random

import structlog
from pydantic import TypeAdapter, ValidationError

from aenv.errors import ConflictError, CorruptFileError, InvalidRequestError, SnapshotNotFoundError, SourceError
from aenv.snapshot.clock import Clock
from aenv.snapshot.manifest import check_id
from aenv.snapshot.objects import ObjectMissingError, ObjectStore, PreconditionError
from aenv.snapshot.repository import ANY, Anything, NameEntry
from aenv.snapshot.sealed import seal, unseal

_TRIES = 50  # of a conditional update against others; the pauses between them sum up to some 20 seconds
_MAX_WORD = 256
_KEY = re.compile(r"names/[0-9a-f]{2}\.json")

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Value:
    id: str
    at: datetime


Shard = dict[str, dict[str, _Value]]  # name, tag
_SHARD = TypeAdapter(Shard)


def check_word(word: str, what: str) -> str:
    """Raises InvalidRequestError for an empty or long text, or one with control characters or a colon."""
    if not 0 < len(word) <= _MAX_WORD or ":" in word or not word.isprintable():
        raise InvalidRequestError(
            f"{word[:80]!r} is no {what}.", f"It has 1 to {_MAX_WORD} printable characters, no ':'."
        )
    return word


def shard_key(name: str) -> str:
    return f"names/{hashlib.sha256(name.encode()).hexdigest()[:2]}.json"


def load_shard(data: bytes, key: str) -> Shard:
    """Raises CorruptFileError."""
    try:
        return _SHARD.validate_json(unseal(data, key))
    except ValidationError as error:
        raise CorruptFileError(
            f"{key} is no list of names: {error}.", "A newer version may have written it."
        ) from error


def dump_shard(shard: Shard) -> bytes:
    value = _SHARD.dump_python({name: tags for name, tags in shard.items() if tags}, mode="json")
    return seal(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())


class Catalog:
    """What is asked of one name raises CorruptFileError when its document is damaged."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._cache: dict[str, tuple[str, Shard]] = {}  # key: etag and content

    def resolve(self, name: str, tag: str) -> str:
        shard, _ = self._read(shard_key(name))
        value = shard.get(name, {}).get(tag)
        if value is None:
            raise SnapshotNotFoundError(f"{name}:{tag}")
        return value.id

    def entries(self, damaged: dict[str, CorruptFileError] | None = None) -> Iterator[NameEntry]:
        """All names that can be read. Documents that cannot be are put into ``damaged``, by key: names in them are
        out of use until they are set again, and others must not suffer for it.
        """
        for info in self._store.list("names/"):
            if not _KEY.fullmatch(info.key):
                continue
            cached = self._cache.get(info.key)
            try:
                shard = cached[1] if cached and cached[0] == info.etag else self._read(info.key)[0]
            except CorruptFileError as error:
                log.error("names of the repository cannot be read", error=str(error))
                if damaged is not None:
                    damaged[info.key] = error
                continue
            for name, tags in shard.items():
                for tag, value in tags.items():
                    yield NameEntry(name, tag, value.id, value.at)

    def set(self, name: str, tag: str, snapshot_id: str, expected: str | Anything | None) -> None:
        """Raises ConflictError unless the name has the ``expected`` id, or already the new one."""
        check_word(name, "name"), check_word(tag, "tag"), check_id(snapshot_id)

        def change(shard: Shard) -> bool:
            tags = shard.setdefault(name, {})
            now = tags[tag].id if tag in tags else None
            if now == snapshot_id:
                return False
            _check_expected(name, tag, now, expected)
            tags[tag] = _Value(snapshot_id, datetime.now(UTC))
            return True

        self._update(shard_key(name), change)

    def remove(self, name: str, tag: str, expected: str | Anything) -> None:
        tried = False

        def change(shard: Shard) -> bool:
            nonlocal tried
            value = shard.get(name, {}).get(tag)
            if value is None:
                if tried:  # by an update whose answer was lost, or by somebody else since
                    return False
                raise SnapshotNotFoundError(f"{name}:{tag}")
            tried = True
            _check_expected(name, tag, value.id, expected)
            del shard[name][tag]
            return True

        self._update(shard_key(name), change)

    def remove_all(self, dead: Callable[[str], bool]) -> int:
        """Remove every name of an id for which ``dead``, asked after the name was read, says so; how many."""
        removed = 0
        for entry in list(self.entries()):
            if dead(entry.snapshot):

                def change(shard: Shard, entry: NameEntry = entry) -> bool:
                    # Not when somebody has removed it or set it again since.
                    same = shard.get(entry.name, {}).get(entry.tag) == _Value(entry.snapshot, entry.updated_at)
                    if same:
                        del shard[entry.name][entry.tag]
                    return same

                removed += self._update(shard_key(entry.name), change)
        return removed

    def _read(self, key: str) -> tuple[Shard, str | None]:
        try:
            data, info = self._store.get(key)
        except ObjectMissingError:
            return {}, None
        shard = load_shard(data, key)
        self._cache[key] = info.etag, shard
        return shard, info.etag

    def _update(self, key: str, change: Callable[[Shard], bool]) -> bool:
        """Apply ``change`` to the newest content, as often as others come in between; whether it changed anything."""
        for attempt in range(_TRIES):
            shard, etag = self._read(key)
            shard = {name: dict(tags) for name, tags in shard.items()}
            if not change(shard):
                return False
            try:
                if etag is None:
                    self._store.put(key, dump_shard(shard), if_absent=True)
                else:
                    self._store.put_if_match(key, dump_shard(shard), etag)
                return True
            except PreconditionError:
                self._clock.sleep(min(0.01 * 2**attempt, 0.5) * (0.5 + random()))
        raise SourceError(f"{key} was changed by others {_TRIES} times while a name was set.", "Try again.")


def _check_expected(name: str, tag: str, now: str | None, expected: str | Anything | None) -> None:
    if expected is not ANY and now != expected:
        raise ConflictError(
            f"{name}:{tag} names {now or 'nothing'} and not {expected or 'nothing'}.", "Read it again, then decide."
        )
