"""The cache of converted layers: overlaybd layers below ``$AENV_HOME/images``, and which file systems they make.

``layers/<two digits>/<hex>`` is a layer by the digest of its bytes: written elsewhere, synced, renamed. Who uses one
holds a shared lock on it (a hold); a disk that is on it is a second name of it (``aenv.orchestrator.ondemand``). So
neither is removed, also across processes and crashes. Its modification time is the time of its last use.

``chains/<key>.json`` lists a file system's layers, bottom first (keys: ``aenv.image.chain``). It is written by one
rename after them; without one of them, or damaged, it is as if it were not there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aenv.image.locks import names, try_lock
from aenv.image.reference import is_digest


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """``digest`` and ``size`` (bytes) of a layer as it is stored."""

    digest: str
    size: int


class Hold:
    """Layers that stay in the cache until this is closed, bottom first, and what is known of their file system."""

    def __init__(self, store: LayerStore, user: str = "") -> None:
        self._store = store
        self._descriptors: list[int] = []
        self.layers: tuple[StoredLayer, ...] = ()
        self.user = user

    @property
    def paths(self) -> list[Path]:
        return [self._store.path(layer.digest) for layer in self.layers]

    def add(self, layer: StoredLayer, descriptor: int) -> None:
        self._descriptors.append(descriptor)
        self.layers = (*self.layers, layer)

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class LayerStore:
    def __init__(self, home: Path) -> None:
        self.root = home / "images" / "layers"
        self._chains = home / "images" / "chains"

    def path(self, digest: str) -> Path:
        if not is_digest(digest) or not digest.startswith("sha256:"):
            raise ValueError(f"not a digest: {digest!r}")
        name = digest.partition(":")[2]
        return self.root / name[:2] / name

    def paths(self) -> list[Path]:
        return [*self.root.glob("??/*")]

    def find(self, key: str) -> Hold | None:
        """Hold a file system's layers and mark them as used. None where one of them is missing."""
        value = read_record(self._record(key))
        if value is None:
            return None
        layers, user = value
        return self.hold(layers, user)

    def hold(self, layers: Sequence[StoredLayer], user: str = "") -> Hold | None:
        hold = Hold(self, user)
        now = time.time_ns()
        for number, layer in enumerate(layers):
            descriptor = self._held(layer)
            if descriptor is None:
                hold.close()
                return None
            # Lower ones count as used later: what is over a layer that went would be of no use.
            os.utime(descriptor, ns=(now - number, now - number))
            hold.add(layer, descriptor)
        return hold

    def _held(self, layer: StoredLayer) -> int | None:
        path = self.path(layer.digest)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        # Where the exclusive lock is held, it is being removed.
        if (
            try_lock(descriptor, shared=True)
            and names(path, descriptor)
            and os.fstat(descriptor).st_size == layer.size
        ):
            return descriptor
        os.close(descriptor)
        return None

    def add(self, hold: Hold, path: Path, layer: StoredLayer) -> None:
        """Make the file ``path``, which is synced, a layer of the cache, and hold it over those of ``hold``."""
        target = self.path(layer.digest)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            with contextlib.suppress(FileExistsError):
                os.link(path, target)
            descriptor = self._held(layer)
            if descriptor is not None:
                break
            if target.exists() and not _is_whole(target, layer):
                target.unlink(missing_ok=True)
        path.unlink()
        hold.add(layer, descriptor)

    def record(self, key: str, hold: Hold, user: str = "") -> None:
        """Say what these layers make."""
        write_record(self._record(key), hold.layers, user)

    def remove_damaged(self, layers: Iterable[StoredLayer]) -> bool:
        """Remove those whose bytes are not what they were; whether there were any. Blocking, reads them all."""
        found = False
        for layer in layers:
            path = self.path(layer.digest)
            if path.exists() and not _is_whole(path, layer):
                path.unlink(missing_ok=True)
                found = True
        return found

    def forget(self) -> None:
        """Remove the records of file systems that lack a layer."""
        for path in self._chains.glob("*.json"):
            value = read_record(path)
            if value is None or not self.has(value[0]):
                path.unlink(missing_ok=True)

    def has(self, layers: Iterable[StoredLayer]) -> bool:
        return all(self.path(layer.digest).exists() for layer in layers)

    def _record(self, key: str) -> Path:
        return self._chains / f"{key}.json"


def write_record(path: Path, layers: Sequence[StoredLayer], user: str = "", **more: Any) -> None:
    """One rename. Not synced: a file that a loss of power left empty counts as none."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    value = {"layers": [[layer.digest, layer.size] for layer in layers], "user": user, **more}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_record(path: Path) -> tuple[tuple[StoredLayer, ...], str] | None:
    """Layers and user; None where there is no such record, or nonsense."""
    try:
        value = json.loads(path.read_bytes())
        layers = tuple(StoredLayer(digest, size) for digest, size in value["layers"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if not all(isinstance(x.digest, str) and is_digest(x.digest) and isinstance(x.size, int) for x in layers):
        return None
    return layers, str(value.get("user", ""))


def _is_whole(path: Path, layer: StoredLayer) -> bool:
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == layer.digest
    except OSError:
        return False
