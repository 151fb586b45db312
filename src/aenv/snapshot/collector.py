"""Deletes the layers that nothing names, safely at once with commits and other collectors.

Why that is so: docs/internals/repository.md. A crash at any step leaves at most a tombstone, which counts for
nothing once it is old, and layers for the next run.
"""

import re
import uuid
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TypeVar

from aenv.errors import ConflictError
from aenv.snapshot.catalog import Catalog
from aenv.snapshot.claims import CLAIM_LIFE, TOMB_LIFE, TOMB_TRUST, dump_digests, live_claims, store_time, tombs
from aenv.snapshot.clock import Clock
from aenv.snapshot.index import ManifestIndex, manifest_key
from aenv.snapshot.objects import MAX_DELETE, ObjectInfo, ObjectStore
from aenv.snapshot.repository import GcReport

Item = TypeVar("Item")

_KEY = re.compile(r"layers/([0-9a-f]{2})/\1[0-9a-f]{62}")
DEBRIS_LIFE = timedelta(hours=24)  # of a half-written object that nobody writes to any more


def layer_key(digest: str) -> str:
    return f"layers/{digest[7:9]}/{digest[7:]}"


def layer_digest(key: str) -> str:
    return "sha256:" + key.rpartition("/")[2]


def is_layer(key: str) -> bool:
    """Whether that is where a layer is stored; other files below ``layers/`` are nobody's, and left alone."""
    return _KEY.fullmatch(key) is not None


def stored_layers(store: ObjectStore) -> Iterator[ObjectInfo]:
    return (info for info in store.list("layers/") if is_layer(info.key))


class Collector:
    """One collection."""

    def __init__(self, store: ObjectStore, index: ManifestIndex, catalog: Catalog, clock: Clock) -> None:
        self._store = store
        self._index = index
        self._catalog = catalog
        self._clock = clock

    def run(self, grace: timedelta) -> GcReport:
        """Raises ConflictError, and deletes nothing, while a manifest cannot be read: what it names is not known."""
        now = store_time(self._store)
        abandoned = [tomb.key for tomb in tombs(self._store) if now - tomb.modified > TOMB_LIFE]
        expired = [info.key for info in self._store.list("claims/") if now - info.modified > 2 * CLAIM_LIFE]
        for keys in _batches(abandoned + expired):
            self._store.delete(*keys)
        debris = self._store.sweep(now - DEBRIS_LIFE)
        named = self._named(now)
        layers = list(stored_layers(self._store))
        unnamed = [info for info in layers if layer_digest(info.key) not in named]
        candidates = [info for info in unnamed if now - info.modified >= grace]
        gone: list[ObjectInfo] = []
        for batch in _batches(candidates):
            gone += self._delete(batch, now)
        manifests, _ = self._index.scan()
        alive = {manifest.id for manifest in manifests}
        return GcReport(
            layers_deleted=len(gone),
            bytes_freed=sum(info.size for info in gone),
            layers_kept=len(layers) - len(gone),
            young=len(unnamed) - len(candidates),
            claims_expired=len(expired),
            tombs_removed=len(abandoned),
            names_removed=self._catalog.remove_all(
                lambda snapshot: snapshot not in alive and self._store.head(manifest_key(snapshot)) is None
            ),
            debris=debris,
        )

    def _delete(self, batch: Sequence[ObjectInfo], now: datetime) -> list[ObjectInfo]:
        """Those that were deleted: none, when this process was held up for so long that its tombstone is void."""
        written = self._clock.now()
        tomb = f"tombs/{uuid.uuid4().hex}.json"
        self._store.put(tomb, dump_digests(layer_digest(info.key) for info in batch))
        named = self._named(now)
        doomed = [info for info in batch if layer_digest(info.key) not in named]
        if self._clock.now() - written > TOMB_TRUST.total_seconds():
            doomed = []
        if doomed:
            # An error leaves the tombstone: as long as the deletion may yet happen, nobody relies on these layers.
            self._store.delete_once(*(info.key for info in doomed))
        self._store.delete(tomb)
        return doomed

    def _named(self, now: datetime) -> set[str]:
        """Claims first: who releases a claim has written its manifest before, so the listing after that has it."""
        named = {digest for _, digests in live_claims(self._store, now) for digest in digests}
        manifests, damaged = self._index.scan()
        if damaged:
            raise ConflictError(
                f"Nothing is collected while manifests are damaged: {', '.join(sorted(damaged))}.",
                "Restore them from a copy, or remove them: aenv-store rm ID.",
            )
        named.update(digest for manifest in manifests for digest in manifest.digests())
        return named


def _batches(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    return (items[start : start + MAX_DELETE] for start in range(0, len(items), MAX_DELETE))
