"""What a snapshot is made of: plain values. No I/O.

A snapshot names a device state, a memory (an immutable base file and an optional delta) and a frozen disk layer; or
the disk layer alone, from which a VM boots. Bases and layers are shared between snapshots; what nothing names is
garbage (``aenv.snapshot.reachability``).

A base, and the lowest layer of a disk, may be a volume: layers of the repository, read on demand through the layer
server. Its id is derived from them, so that snapshots with the same contents share one file and its page cache.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from aenv.snapshot.manifest import Volume
from aenv.vmm.protocol import Fingerprint, MachineShape

_VOLUME = "v-"


def volume_id(volume: Volume) -> str:
    """The id of a disk layer or memory base that is ``volume``: the same for the same layers and size."""
    text = f"{volume.virtual_size} {' '.join(layer.digest for layer in volume.layers)}"
    return _VOLUME + hashlib.sha256(text.encode()).hexdigest()[:32]


def is_volume(item_id: str) -> bool:
    """Whether a disk layer or memory base of that id is read from the layer server."""
    return item_id.startswith(_VOLUME)


@dataclass(frozen=True, slots=True)
class DiskLayer:
    """One file of a root disk's chain: a raw base image or a qcow2 overlay over ``parent``.

    ``format`` is ``raw`` or ``qcow2``. A layer that a snapshot or another layer names is never written again.
    """

    id: str
    parent: str | None
    format: str


@dataclass(frozen=True, slots=True)
class MemoryBase:
    """An immutable full-size memory file that VMs map privately. ``data_bytes`` is its allocated size."""

    id: str
    data_bytes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A point in the life of a VM from which any number of VMs can run on.

    Without memory it is a disk from which they boot anew, whatever VMM and kernel captured it.
    """

    id: str
    owner: str | None  # the sandbox that is paused in it; None for templates and fork points
    memory_base: str | None  # None: no memory was kept
    delta_bytes: int  # 0: the base alone is the memory
    disk: str  # frozen disk layer
    shape: MachineShape
    disk_mib: int
    fingerprint: Fingerprint
    guest_token: str | None  # envd's access token at the moment of capture
    created_at: datetime
    parent: str | None = None  # the snapshot that its VM was started from or that was taken of it before
    hot: str | None = None  # which memory its VM had used: see ``aenv.vmm.hot``

    @property
    def has_memory(self) -> bool:
        return self.memory_base is not None


@dataclass(frozen=True, slots=True)
class Committed:
    """What a local object reads as, in layers of the repository.

    ``id`` is that of a disk layer (with all below it), of a memory base, or of a snapshot (its memory).
    """

    id: str
    volume: Volume
