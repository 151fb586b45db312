"""Committing local files: what is stored, from what it can be read again, and how deep it gets."""

import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from aenv.snapshot import commit
from aenv.snapshot.commit import CommitSource, Committer, LocalMemory
from aenv.snapshot.manifest import Manifest, Volume
from aenv.snapshot.model import DiskLayer, Snapshot, volume_id
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.shared import SharedRepository
from aenv.storage.lsmt import LayerWriter
from aenv.storage.stack import Stack, open_layer
from aenv.vmm.protocol import MachineShape
from tests.orchestrator.samples import snapshot

MIB = 1 << 20
PAGE = 4096


class Place:
    """A repository, and a node's folder with local memories of 1 MiB and disks of 2 MiB."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.repository = SharedRepository(PosixStore(folder / "repository"))
        self.committer = Committer(self.repository, folder / "commits", "node")
        self.committed: dict[str, Volume] = {}
        (folder / "state").write_bytes(b"state")

    def sparse(self, name: str, size: int, pages: Mapping[int, bytes]) -> Path:
        path = self.folder / name
        with path.open("wb") as file:
            file.truncate(size)
            for number, page in pages.items():
                os.pwrite(file.fileno(), page, number * PAGE)
        return path

    def delta(self, name: str, pages: Mapping[int, bytes]) -> Path:
        path = self.folder / name
        with LayerWriter(path, MIB) as writer:
            for number, page in sorted(pages.items()):
                at, length = (np.array([value], dtype=np.uint64) for value in (number * PAGE, PAGE))
                writer.add(at, length, memoryview(page))
            writer.commit()
        return path

    def commit(
        self,
        made: Snapshot,
        disk: tuple[DiskLayer, Path],
        memory: LocalMemory,
        parent: LocalMemory | None = None,
    ) -> Manifest:
        made = replace(made, shape=MachineShape(1, 1), disk_mib=2)
        source = CommitSource(made, [disk], memory, self.folder / "state", parent, self.committed, {})
        result = self.committer.commit(source)
        self.committed |= {row.id: row.volume for row in result.committed}
        return result.manifest

    def read(self, volume: Volume | None) -> bytes:
        assert volume is not None
        with ExitStack() as stack:
            views = []
            for ref in volume.layers:
                source = self.repository.open_layer(ref)
                stack.callback(source.close)
                views.append(open_layer(source, ref.digest))
            whole = Stack(views, volume.virtual_size)
            return whole.read(0, whole.size)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def identity(number: int) -> str:
    return f"{number:020x}"


def test_a_snapshot_that_goes_from_node_to_node_stays_shallow(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each node has of the one before a volume, over which it puts what its guest wrote."""
    monkeypatch.setattr(commit, "MAX_DEPTH", 6)
    content = bytearray(MIB)
    content[:PAGE] = os.urandom(PAGE)
    base = place.sparse("base", MIB, {0: bytes(content[:PAGE])})
    disk = place.sparse("disk", 2 * MIB, {0: os.urandom(PAGE)})
    manifest = place.commit(
        snapshot(identity(0)), (DiskLayer("d", None, "raw"), disk), LocalMemory(identity(0), "m", base, None)
    )
    for hop in range(1, 40):
        memory, disk_volume = manifest.memory, manifest.disk
        assert memory is not None
        place.committed = {volume_id(memory): memory, volume_id(disk_volume): disk_volume}
        number, page = hop % 5, os.urandom(PAGE)
        content[number * PAGE : (number + 1) * PAGE] = page
        missing = place.folder / "a volume is not read"
        for again in range(2):  # two sandboxes of the same snapshot
            manifest = place.commit(
                snapshot(identity(2 * hop + again)),
                (DiskLayer(volume_id(disk_volume), None, "raw"), missing),
                LocalMemory(
                    identity(2 * hop + again), volume_id(memory), missing, place.delta("delta", {number: page})
                ),
            )
            assert manifest.memory is not None
            assert len(manifest.memory.layers) <= 6
        assert place.read(manifest.memory) == content
    assert place.repository.verify().clean
    assert not list((place.folder / "commits").iterdir())


def test_the_snapshot_before_was_evicted_meanwhile(place: Place) -> None:
    """Its memory is a volume now, which nobody has exported: it is not there to be compared with."""
    one, two = os.urandom(PAGE), os.urandom(PAGE)
    base = place.sparse("base", MIB, {0: one})
    disk = DiskLayer("d", None, "raw"), place.sparse("disk", 2 * MIB, {0: one})
    first = place.commit(snapshot(identity(1)), disk, LocalMemory(identity(1), "m", base, None))
    assert first.memory is not None
    gone = volume_id(first.memory)
    place.committed[gone] = first.memory
    second = place.commit(
        snapshot(identity(2)),
        disk,
        LocalMemory(identity(2), "m", base, place.delta("delta", {1: two})),
        LocalMemory(identity(1), gone, place.folder / "memory" / gone, None),
    )
    assert place.read(second.memory)[: 2 * PAGE] == one + two


def test_committing_again_what_a_crash_broke_off_stores_and_compares_nothing(place: Place) -> None:
    base = place.sparse("base", MIB, {0: os.urandom(PAGE)})
    disk = DiskLayer("d", None, "raw"), place.sparse("disk", 2 * MIB, {0: os.urandom(PAGE)})
    memory = LocalMemory(identity(1), "m", base, place.delta("delta", {1: os.urandom(PAGE)}))
    first = place.commit(snapshot(identity(1)), disk, memory)
    before = place.repository.usage()
    base.unlink()
    disk[1].unlink()
    assert place.commit(snapshot(identity(1)), disk, memory) == first
    assert place.repository.usage() == before


def test_layers_that_were_lost_are_written_anew(place: Place) -> None:
    page = os.urandom(PAGE)
    base = place.sparse("base", MIB, {0: page})
    disk = DiskLayer("d", None, "raw"), place.sparse("disk", 2 * MIB, {0: page})
    place.commit(snapshot(identity(1)), disk, LocalMemory(identity(1), "m", base, None))
    place.repository.delete(identity(1))
    assert place.repository.gc(timedelta(0)).layers_deleted == 3
    second = place.commit(snapshot(identity(2)), disk, LocalMemory(identity(2), "m", base, None))
    assert place.read(second.memory)[:PAGE] == place.read(second.disk)[:PAGE] == page
    assert place.repository.verify().clean
