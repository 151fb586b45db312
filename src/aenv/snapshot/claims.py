"""Claims and tombstones: why a layer that is about to be named is never deleted (docs/internals/repository.md).

Who will name layers writes a claim, *then* looks for tombstones and for the layers. Who deletes writes a tombstone,
*then* looks for claims and manifests. So one of the two sees the other, and it is always the claim that wins.

Both are sealed documents and are never changed, only refreshed and deleted:
``claims/<owner>/<uuid>.json`` lists digests; ``tombs/<uuid>.json`` lists those that one collector may be deleting.
"""

import contextlib
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Self

import structlog

from aenv.errors import AenvError, CorruptFileError, InvalidRequestError
from aenv.snapshot.clock import Clock
from aenv.snapshot.manifest import digest_hex
from aenv.snapshot.objects import ObjectInfo, ObjectMissingError, ObjectStore
from aenv.snapshot.sealed import seal, unseal

CLAIM_LIFE = timedelta(hours=6)  # after its last renewal, by the store's clock
CLAIM_RENEWAL = CLAIM_LIFE / 6
CLAIM_TRUST = CLAIM_LIFE / 2  # after this, by its own clock, the owner no longer believes that the claim holds
TOMB_LIFE = timedelta(minutes=5)  # after this, by the store's clock, a tombstone's collector has crashed
TOMB_TRUST = TOMB_LIFE / 2  # after this, by its own clock, a collector deletes nothing more under a tombstone

_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_POLL = 0.05, 2.0  # seconds between two looks at a tombstone, first and at most

log = structlog.get_logger()


def dump_digests(digests: Iterable[str]) -> bytes:
    return seal(json.dumps(sorted(digest_hex(digest) for digest in digests), separators=(",", ":")).encode())


def load_digests(data: bytes, name: str) -> frozenset[str]:
    """Raises CorruptFileError."""
    body = unseal(data, name)
    try:
        value = json.loads(body)
        found = frozenset(f"sha256:{word}" for word in value)
        for digest in found:
            digest_hex(digest)
    except (TypeError, ValueError, RecursionError, InvalidRequestError) as error:
        raise CorruptFileError(f"{name} is no list of digests.", "A newer version may have written it.") from error
    return found


def store_time(store: ObjectStore) -> datetime:
    """Now, by the store's own clock: that which stamps its objects."""
    store.put("clock", b"")
    info = store.head("clock")
    assert info is not None, "nobody deletes the clock"
    return info.modified


@dataclass(frozen=True, slots=True)
class Tomb:
    key: str
    modified: datetime
    digests: frozenset[str] | None  # None: it is damaged and may mean any layer

    def meets(self, digests: frozenset[str]) -> bool:
        return self.digests is None or not self.digests.isdisjoint(digests)


def tombs(store: ObjectStore) -> Iterator[Tomb]:
    for info in store.list("tombs/"):
        with contextlib.suppress(ObjectMissingError):
            data = store.get(info.key)[0]
            try:
                yield Tomb(info.key, info.modified, load_digests(data, info.key))
            except CorruptFileError:
                yield Tomb(info.key, info.modified, None)


def live_claims(store: ObjectStore, now: datetime) -> Iterator[tuple[ObjectInfo, frozenset[str]]]:
    """Claims that have not expired. Raises CorruptFileError for a damaged one: what it protects is not known."""
    for info in store.list("claims/"):
        if now - info.modified < CLAIM_LIFE:
            with contextlib.suppress(ObjectMissingError):
                yield info, load_digests(store.get(info.key)[0], info.key)


def wait_for_tombs(store: ObjectStore, digests: frozenset[str], clock: Clock) -> None:
    """Return when no collector may be deleting any of the layers, which the caller has claimed.

    A tombstone older than ``TOMB_LIFE`` is of a collector that deletes nothing more: it is removed. Each belongs to
    one run of one collector, so no other's is removed by mistake.
    """
    pause = _POLL[0]
    while met := [tomb for tomb in tombs(store) if tomb.meets(digests)]:
        now = store_time(store)
        abandoned = [tomb.key for tomb in met if now - tomb.modified > TOMB_LIFE]
        if abandoned:
            store.delete(*abandoned)
        else:
            clock.sleep(pause)
            pause = min(2 * pause, _POLL[1])


class StoredClaim:
    """``Claim`` as objects in the store: one for each ``add``."""

    def __init__(
        self, store: ObjectStore, owner: str, clock: Clock, on_release: Callable[["StoredClaim"], None]
    ) -> None:
        if not _OWNER.fullmatch(owner):
            raise InvalidRequestError(
                f"{owner[:128]!r} is no owner of claims.", "Use letters, digits, '.', '_' and '-'."
            )
        self.owner = owner
        self._store = store
        self._clock = clock
        self._on_release = on_release
        self._objects: dict[str, bytes] = {}
        self._digests: frozenset[str] = frozenset()
        self._renewed = clock.now()
        self.lapses = 0  # how often it may have expired before it was renewed
        self._lock = threading.Lock()

    @property
    def digests(self) -> frozenset[str]:
        return self._digests

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._objects)

    @property
    def trusted(self) -> bool:
        """Whether it certainly has not expired in the store."""
        return self._clock.now() - self._renewed < CLAIM_TRUST.total_seconds()

    def add(self, digests: Iterable[str]) -> None:
        with self._lock:
            new = frozenset(digests) - self._digests
            if not new:
                return
            key, data = f"claims/{self.owner}/{uuid.uuid4().hex}.json", dump_digests(new)
            self._objects[key] = data  # before it is there: what fails half-way is released, too
            self._store.put(key, data)
            wait_for_tombs(self._store, new, self._clock)
            self._digests |= new

    def renew(self) -> None:
        """After it may have expired, layers may have been deleted: look again (``SharedRepository.commit`` does)."""
        with self._lock:
            lapsed = not self.trusted
            started = self._clock.now()
            for key, data in self._objects.items():
                self._store.refresh(key, data)
            if lapsed:
                self.lapses += 1
                wait_for_tombs(self._store, self._digests, self._clock)
            self._renewed = started

    def release(self) -> None:
        self._on_release(self)
        with self._lock:
            keys, self._objects, self._digests = list(self._objects), {}, frozenset()
            try:
                self._store.delete(*keys)
            except AenvError as error:
                log.warning("a claim could not be removed and will expire", owner=self.owner, error=str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Renewal:
    """Renews the claims of a repository object in the background, until it is closed."""

    def __init__(self) -> None:
        self._claims: set[StoredClaim] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, claim: StoredClaim) -> None:
        with self._lock:
            self._claims.add(claim)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="repository-claims", daemon=True)
                self._thread.start()

    def remove(self, claim: StoredClaim) -> None:
        with self._lock:
            self._claims.discard(claim)

    def keys(self) -> set[str]:
        """Of all objects that the claims consist of, or are about to."""
        with self._lock:
            return {key for claim in self._claims for key in claim.keys}

    def close(self) -> None:
        self._closed.set()

    def _run(self) -> None:
        pause = CLAIM_RENEWAL.total_seconds()
        while not self._closed.wait(pause):
            pause = CLAIM_RENEWAL.total_seconds()
            with self._lock:
                claims = list(self._claims)
            for claim in claims:
                try:
                    claim.renew()
                except AenvError as error:
                    log.warning("a claim could not be renewed", owner=claim.owner, error=str(error))
                    pause = 60.0
