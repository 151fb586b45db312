"""What exports are made of: layers opened once, whoever uses them, and stacks composed of them."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv import mountinfo
from aenv.errors import CorruptFileError
from aenv.storage.blockcache import BlockCache, CachedSource
from aenv.storage.layerd.datamap import DataMap
from aenv.storage.layerd.exports import Export, Layer
from aenv.storage.layerd.opening import Opener
from aenv.storage.runs import ZERO
from aenv.storage.source import FileSource, Source
from aenv.storage.stack import LayerView, Stack, gather, open_layer

# mountinfo's names of file systems whose files are on this host: caching them again would gain nothing.
LOCAL = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay", "bcachefs", "ramfs"})


class Composed:
    """One export, open: its stack, and its layers' uncompressed bytes, bottom first."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.blobs = [layer.source for layer in stack.layers]
        self._map: DataMap | None = None

    def read(self, offset: int, length: int) -> bytes | bytearray | None:
        """None: all of it is zeros. Raises SourceError, CorruptFileError.

        Every page of what is returned has been written to, so that copying from it does not wait for memory.
        """
        segments = self.stack.segments(offset, length)
        if len(segments) == 1:
            layer, position, _ = segments[0]
            return None if layer == ZERO else self.blobs[layer].read(position, length)
        return gather(self.blobs, segments, length)

    def seek(self, offset: int, *, data: bool) -> int | None:
        """See ``DataMap.seek``."""
        if self._map is None:
            self._map = DataMap(self.stack.runs, self.stack.size)
        return self._map.seek(offset, data=data)


@dataclass(slots=True)
class _Opened:
    view: LayerView
    source: Source  # of the stored bytes
    users: int = 0


class Library:
    """Thread-safe. ``opener`` opens a layer's stored bytes in the repository that an export names."""

    def __init__(self, cache: BlockCache, opener: Opener) -> None:
        self._cache = cache
        self._opener = opener
        self._lock = threading.Lock()
        self._layers: dict[str, _Opened] = {}
        self._composed: dict[int, Composed] = {}
        self._opening: dict[int, threading.Lock] = {}

    def open(self, export: Export) -> Composed:
        """The composed disk or memory; opens its layers on first use. Raises SourceError, CorruptFileError."""
        if (composed := self._composed.get(export.inode)) is not None:
            return composed
        with self._lock:
            turn = self._opening.setdefault(export.inode, threading.Lock())
        with turn:
            if (composed := self._composed.get(export.inode)) is None:
                composed = self._composed[export.inode] = self._compose(export)
            return composed

    def drop(self, export: Export) -> None:
        """Close what only this export used. Nobody reads it any more."""
        with self._lock:
            self._opening.pop(export.inode, None)
            if self._composed.pop(export.inode, None) is not None:
                for layer in export.layers:
                    self._put_back(layer.digest)

    def _compose(self, export: Export) -> Composed:
        views: list[LayerView] = []
        try:
            views.extend(self._take(export.repository, layer) for layer in export.layers)
            return Composed(Stack(views, export.virtual_size))
        except BaseException:
            with self._lock:
                for layer in export.layers[: len(views)]:
                    self._put_back(layer.digest)
            raise

    def _take(self, repository: Mapping[str, Any], layer: Layer) -> LayerView:
        with self._lock:
            if (opened := self._layers.get(layer.digest)) is not None:
                opened.users += 1
                return opened.view
        # Without the lock, since it may take long. Two that open the same layer at once: the later one is closed.
        source = self._through_cache(repository, layer)
        try:
            view = open_layer(source, layer.digest)
        except BaseException:
            _close(source)
            raise
        with self._lock:
            opened = self._layers.setdefault(layer.digest, _Opened(view, source))
            opened.users += 1
        if opened.source is not source or opened.view is not view:
            _close(source)
        return opened.view

    def _through_cache(self, repository: Mapping[str, Any], layer: Layer) -> Source:
        source = self._opener(repository, layer)
        if source.size != layer.size:
            _close(source)
            raise CorruptFileError(
                f"{layer.digest} has {source.size} bytes in its repository instead of {layer.size}."
            )
        if isinstance(source, FileSource) and is_local(source.path):
            return source
        return self._cache.open(layer.digest, source)

    def _put_back(self, digest: str) -> None:
        opened = self._layers[digest]
        opened.users -= 1
        if not opened.users:
            del self._layers[digest]
            _close(opened.source)


def _close(source: Source) -> None:
    if isinstance(source, FileSource | CachedSource):
        source.close()


def is_local(path: Path) -> bool:
    """Whether a file is on a disk of this host, and not on a network's."""
    return mountinfo.kind_of(path) in LOCAL
