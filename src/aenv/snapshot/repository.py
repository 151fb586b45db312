"""The repository of committed snapshots, as nodes see it: values and protocols. No I/O here.

``aenv.snapshot.shared`` implements it over a folder or a bucket; ``aenv.snapshot.opening`` opens the configured one.
Why deletion is safe against concurrent commits: docs/internals/repository.md.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from aenv.snapshot.manifest import LayerRef, Manifest
from aenv.snapshot.objects import OpenObject

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class Anything(Enum):
    """The type of ``ANY``, as in PEP 484's singletons."""

    ANY = "any"


ANY = Anything.ANY  # a name may have any value, or none, before it is set or removed


@dataclass(frozen=True, slots=True)
class NameEntry:
    """A name of a snapshot; one name has any number of tags."""

    name: str
    tag: str
    snapshot: str  # id
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection removed and kept. Bytes are stored bytes."""

    layers_deleted: int
    bytes_freed: int
    layers_kept: int
    young: int  # kept only because they were written less than the grace period ago
    claims_expired: int
    tombs_removed: int  # left by collectors that crashed
    names_removed: int  # of snapshots that are gone
    debris: int  # half-written objects of crashed writers


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the repository that is not as it was written. ``snapshots`` cannot be used because of it."""

    key: str
    what: str
    snapshots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """``layers`` and ``bytes`` were read and hashed, or only looked up when ``deep`` was not asked for."""

    snapshots: int
    layers: int
    bytes: int
    names: int
    deep: bool
    problems: tuple[Problem, ...]

    @property
    def clean(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes are stored bytes, except ``virtual_bytes``."""

    snapshots: int
    layers: int
    layer_bytes: int
    unreferenced_layers: int  # named by no snapshot; a collection removes those that nobody claims either
    unreferenced_bytes: int
    claimed_bytes: int  # of the unreferenced ones
    virtual_bytes: int  # what all snapshots would take without layers
    stacked_bytes: int  # what they would take without sharing layers


class Claim(Protocol):
    """Layers that a collection leaves alone, whether or not a snapshot names them, until it is released.

    It lives as long as its repository object renews it (a thread does, in the background), and a few hours longer: a
    process that dies loses its claims only then. Leaving its ``with`` block releases it.
    """

    @property
    def owner(self) -> str: ...

    @property
    def digests(self) -> frozenset[str]: ...

    def add(self, digests: Iterable[str]) -> None:
        """Claim more. When it returns, those layers are there for good, or are not there.

        Raises SourceError.
        """

    def renew(self) -> None:
        """Raises SourceError."""

    def release(self) -> None:
        """Idempotent. Never raises: a claim that cannot be removed now expires."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Repository(Protocol):
    """Committed snapshots and their layers. Blocking; usable from any thread and by many processes and hosts.

    Every method raises SourceError when the store cannot be reached after retries, CapacityError when it is full.
    """

    def has_layer(self, digest: str) -> bool:
        """What it says holds only while the digest is claimed."""

    def put_layer(
        self, path: Path, digest: str | None = None, progress: Progress | None = None, *, replace: bool = False
    ) -> LayerRef:
        """Store a file as a layer; nothing is copied when it is there. ``replace`` writes it over a damaged one.

        Claim the digest first, or commit a manifest that names it within the grace period of collections. Raises
        CorruptFileError when the file does not have ``digest``.
        """

    def open_layer(self, ref: LayerRef) -> OpenObject:
        """Read by range; its reads raise SourceError. Nothing is verified but the size."""

    def fetch(self, ref: LayerRef, path: Path, progress: Progress | None = None) -> None:
        """Write a layer whole to ``path``, which appears only when its digest was verified.

        Raises SourceError when it is gone, CorruptFileError when it is damaged.
        """

    def check_layer(self, ref: LayerRef) -> None:
        """Read a layer whole. Raises NotFoundError, SourceError, CorruptFileError when its bytes are others."""

    def commit(self, manifest: Manifest, *, claim: Claim) -> None:
        """Make a snapshot visible, all at once. Idempotent: the same snapshot may be committed again, by anyone.

        ``claim`` covers all that it names. Raises NotFoundError when a layer is not there, ConflictError when another
        snapshot has the id.
        """

    def get(self, snapshot_id: str) -> Manifest:
        """Raises SnapshotNotFoundError, CorruptFileError."""

    def list(self) -> Iterator[Manifest]:
        """All snapshots that can be read, newest first. Damaged ones are left to ``verify``."""

    def delete(self, snapshot_id: str) -> None:
        """Remove a snapshot and its names; its layers stay until a collection. Raises SnapshotNotFoundError."""

    def set_name(self, name: str, tag: str, snapshot_id: str, *, expected: str | Anything | None = ANY) -> None:
        """Name a snapshot. Of two at once, one comes after the other; none is lost unseen.

        ``expected`` is the id that the name has now, None when it has none. Raises ConflictError when it has another,
        SnapshotNotFoundError when there is no such snapshot, InvalidRequestError for a bad name.
        """

    def resolve(self, name: str, tag: str) -> str:
        """The id of a name. Raises SnapshotNotFoundError."""

    def names(self) -> Iterator[NameEntry]:
        """All names, sorted."""

    def delete_name(self, name: str, tag: str, *, expected: str | Anything = ANY) -> None:
        """Raises SnapshotNotFoundError when there is no such name, ConflictError when it names another snapshot."""

    def claim(self, digests: Iterable[str], owner: str) -> Claim:
        """Keep layers from being collected. ``owner`` is a node's name, or that of a tool.

        When it returns, each layer is there for good, or is not there and has to be stored.
        """

    def acquire(self, snapshot_id: str, owner: str) -> tuple[Manifest, Claim]:
        """A snapshot and a claim of all that it names, which is there then: what a node runs it from.

        Raises SnapshotNotFoundError, CorruptFileError.
        """

    def drop_claims(self, owner: str) -> int:
        """Remove claims that former processes of ``owner`` left, and none that this object holds; how many. A node
        that starts claims anew first.
        """

    def gc(self, grace: timedelta) -> GcReport:
        """Delete the layers that no snapshot names, nobody claims, and that are older than ``grace``.

        Safe at any time, on any node, at once with commits and with other collections.
        """

    def verify(self, progress: Progress | None = None, *, deep: bool = True) -> VerifyReport:
        """Check every document, reference and, when ``deep``, the digest of every layer. Changes nothing."""

    def usage(self) -> Usage: ...

    def close(self) -> None:
        """End the renewal of claims; they are kept, and expire unless they were released."""
