"""What is committed of a snapshot: a manifest that names layers by their digests. Values and their JSON; no I/O.

A manifest is stored as a sealed document (``aenv.snapshot.sealed``). Its body has ``"format": "aenv-snapshot"`` and
``"version"``; a version that this program does not know is refused.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError, with_config

from aenv.errors import CorruptFileError, InvalidRequestError
from aenv.snapshot.sealed import seal, unseal
from aenv.vmm.protocol import Fingerprint, MachineShape

MAX_BYTES = 4 << 20  # of a manifest: two volumes of 255 layers are 60 kB, the rest is for attributes
MAX_LAYERS = 255  # of a volume: overlaybd's limit (aenv.storage.stack)
MAX_SIZE = 1 << 62  # bytes of anything: sums of two still fit 64 bits

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-f]{8,64}")


def digest_hex(digest: str) -> str:
    """The 64 hexadecimal digits of ``sha256:<hex>``. Raises InvalidRequestError for anything else."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidRequestError(f"{digest[:80]!r} is no digest.", "Digests are sha256:<64 hexadecimal digits>.")
    return digest[7:]


def check_id(snapshot_id: str) -> str:
    """The id itself. Raises InvalidRequestError unless it is 8 to 64 lower-case hexadecimal digits."""
    if not _ID.fullmatch(snapshot_id):
        raise InvalidRequestError(f"{snapshot_id[:80]!r} is no snapshot id.", "It is 8 to 64 hexadecimal digits.")
    return snapshot_id


@dataclass(frozen=True, slots=True)
class LayerRef:
    """One committed blob: an overlaybd layer, perhaps within a ZFile, or a device state."""

    digest: str  # "sha256:<hex>" of the stored bytes
    size: int  # stored bytes

    def __post_init__(self) -> None:
        digest_hex(self.digest)
        _check_size(self.size, "A layer")


@dataclass(frozen=True, slots=True)
class Volume:
    """A virtual disk or a memory: layers, bottom first. No layers: all of it is zeros."""

    virtual_size: int  # bytes
    layers: tuple[LayerRef, ...]

    def __post_init__(self) -> None:
        _check_size(self.virtual_size, "A volume")
        if len(self.layers) > MAX_LAYERS:
            raise InvalidRequestError(
                f"A volume has {len(self.layers)} layers; {MAX_LAYERS} are allowed.", "Compact it."
            )


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed snapshot. Raises InvalidRequestError when its parts do not fit together."""

    id: str  # hexadecimal, chosen by the node that commits
    created_at: datetime  # with a time zone
    parent: str | None  # id of the snapshot it was taken from, for display only
    disk: Volume
    memory: Volume | None  # None: it boots from its disk
    state: LayerRef | None  # device state, a plain blob; present exactly when memory is
    shape: MachineShape
    disk_mib: int
    fingerprint: Fingerprint
    guest_token: str | None = field(default=None, repr=False)
    attributes: Mapping[str, JsonValue] = field(default_factory=dict)  # opaque to the repository

    def __post_init__(self) -> None:
        check_id(self.id)
        if self.parent is not None:
            check_id(self.parent)
        if self.created_at.tzinfo is None:
            raise InvalidRequestError("A snapshot's time of creation has no time zone.")
        if (self.memory is None) != (self.state is None):
            raise InvalidRequestError("A snapshot has memory and device state, or neither.")

    def layers(self) -> Iterator[LayerRef]:
        """Every blob it names, in a fixed order; one that is named twice comes twice."""
        yield from self.disk.layers
        if self.memory is not None:
            yield from self.memory.layers
        if self.state is not None:
            yield self.state

    def digests(self) -> frozenset[str]:
        return frozenset(layer.digest for layer in self.layers())

    @property
    def virtual_bytes(self) -> int:
        """What it would take on disk without layers."""
        memory = self.memory.virtual_size if self.memory else 0
        return self.disk.virtual_size + memory + (self.state.size if self.state else 0)

    def same_content(self, other: "Manifest") -> bool:
        """Whether two commits are of the same thing: all is equal but the moment at which they were made."""
        return _body(self, with_time=False) == _body(other, with_time=False)


def dump(manifest: Manifest) -> bytes:
    """The document of a manifest. Raises InvalidRequestError when it is larger than ``MAX_BYTES``."""
    data = seal(_body(manifest))
    if len(data) > MAX_BYTES:
        raise InvalidRequestError(
            f"The manifest has {len(data)} bytes; {MAX_BYTES} are allowed.", "Use fewer attributes."
        )
    return data


def load(data: bytes, name: str) -> Manifest:
    """The manifest of a document. ``name`` says in errors where it came from.

    Raises CorruptFileError when it is too large, damaged, of another format or version, or makes no sense.
    """
    if len(data) > MAX_BYTES:
        raise CorruptFileError(f"{name} has {len(data)} bytes; a manifest has at most {MAX_BYTES}.")
    body = unseal(data, name)
    try:
        return _DOCUMENT.validate_json(body).snapshot
    except (ValidationError, InvalidRequestError) as error:
        raise CorruptFileError(
            f"{name} is no manifest that this program knows: {error}.", "A newer version may have written it."
        ) from error


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class _Document:
    format: Literal["aenv-snapshot"]
    version: Literal[1]
    snapshot: Manifest


_DOCUMENT = TypeAdapter(_Document)


def _body(manifest: Manifest, *, with_time: bool = True) -> bytes:
    value = _DOCUMENT.dump_python(_Document("aenv-snapshot", 1, manifest), mode="json")
    if not with_time:
        del value["snapshot"]["created_at"]
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _check_size(size: int, what: str) -> None:
    if not 0 <= size <= MAX_SIZE:
        raise InvalidRequestError(f"{what} cannot have {size} bytes.")
