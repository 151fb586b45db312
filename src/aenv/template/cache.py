"""Cached layers: machines as they were after a step, by the step's key; the least recently used ones go first.

The records name snapshots, which keeps those from being garbage; an evicted layer's files go with the next
collection, unless a template or a running build needs them.
"""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime

from aenv.orchestrator.builds import CachedLayer
from aenv.orchestrator.store import Store


def surplus(layers: Iterable[CachedLayer], limit: int) -> list[str]:
    """Keys beyond the ``limit`` most recently used."""
    ordered = sorted(layers, key=lambda layer: layer.used_at, reverse=True)
    return [layer.id for layer in ordered[limit:]]


class LayerCache:
    def __init__(self, store: Store, limit: int) -> None:
        self._store = store
        self._limit = limit

    def get(self, key: str) -> CachedLayer | None:
        layer = self._store.build_cache.get(key)
        if layer is None or layer.snapshot_id not in self._store.snapshots.rows:
            return None
        used = replace(layer, used_at=datetime.now(UTC))
        with self._store.transaction():
            self._store.build_cache.put(used)
        return used

    def put(self, layer: CachedLayer) -> None:
        """Keep ``layer``, in the place of one with the same key."""
        with self._store.transaction():
            self._store.build_cache.put(layer)
            for key in surplus(self._store.build_cache.rows.values(), self._limit):
                self._store.build_cache.delete(key)

    def trim(self) -> None:
        """For a limit that was lowered between two starts."""
        self._keep(self._limit)

    def shrink(self) -> None:
        """Give up the less recently used half, for a disk that is getting full."""
        self._keep(len(self._store.build_cache.rows) // 2)

    def _keep(self, limit: int) -> None:
        with self._store.transaction():
            for key in surplus(list(self._store.build_cache.rows.values()), limit):
                self._store.build_cache.delete(key)
