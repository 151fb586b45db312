"""A node and its repository when that hangs, fails, or is changed by others, and when the node dies in between."""

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aenv.errors import CorruptFileError, NotFoundError, SourceError
from aenv.orchestrator import files, imports
from aenv.orchestrator.eviction import Eviction
from aenv.orchestrator.files import SnapshotFiles
from aenv.orchestrator.imports import Imports
from aenv.orchestrator.model import SavedSnapshot
from aenv.orchestrator.publication import Publication
from aenv.orchestrator.remote import THREADS, remotely
from aenv.orchestrator.sharing import Sharing
from aenv.orchestrator.store import Store
from aenv.orchestrator.volumes import Volumes
from aenv.snapshot.claims import StoredClaim
from aenv.snapshot.collector import layer_key
from aenv.snapshot.commit import Committer
from aenv.snapshot.model import DiskLayer, MemoryBase, is_volume
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.shared import SharedRepository
from aenv.storage.layout import Layout
from aenv.vmm.protocol import MachineShape
from tests.orchestrator.samples import NOW, snapshot

MIB = 1 << 20


class Server:
    """A layer server that only knows which files it has; ``slow`` is asked before it takes one away."""

    def __init__(self) -> None:
        self.exported: set[str] = set()
        self.slow: Callable[[], Any] | None = None

    async def ensure_running(self) -> bool:
        return False

    async def export(self, name: str, volume: object, *, sequential: bool) -> Path:
        self.exported.add(name)
        return Path("/nowhere") / name

    async def unexport(self, name: str) -> None:
        if self.slow is not None:
            await self.slow()
        self.exported.discard(name)


class HalfNode:
    """What of a node has to do with a repository, without VMs: snapshots of 1 MiB of memory and of disk."""

    def __init__(self, folder: Path, repository: Path) -> None:
        folder.mkdir()
        self.layout = Layout(folder / "home", folder / "run")
        self.layout.create()
        self.store = Store(self.layout.database)
        self.folder = repository
        self.repository = SharedRepository(PosixStore(repository))
        self.server = Server()
        machines: Any = SimpleNamespace(launching=lambda _: False)
        self.files = SnapshotFiles(self.layout, self.store, machines)
        self.volumes = Volumes(self.store, self.server, self.repository, f"{folder.name}.volumes")
        self.files.on_forget = self.volumes.forget
        self.imports = Imports(self.layout, self.store, self.repository, self.volumes, f"{folder.name}.imports")
        committer = Committer(self.repository, self.layout.commits, f"{folder.name}.commits")
        self.publication = Publication(
            self.layout, self.store, self.files, self.repository, committer, "the repository"
        )
        self._count = 0

    def save(self, name: str) -> SavedSnapshot:
        """A sandbox was saved under a name, perhaps again."""
        self._count += 1
        number = f"{os.urandom(8).hex()}{self._count:04x}"
        disk, memory = DiskLayer(f"d{number}", None, "raw"), MemoryBase(f"m{number}", MIB)
        made = replace(snapshot(number), memory_base=memory.id, disk=disk.id, shape=MachineShape(1, 1), disk_mib=1)
        for path in (self.layout.layer(disk), self.layout.memory(memory.id)):
            path.write_bytes(os.urandom(8192).ljust(MIB, b"\0"))
        self.layout.snapshot(number).mkdir()
        self.layout.state(number).write_bytes(os.urandom(100))
        known = next((row for row in self.store.saved.rows.values() if row.name == name), None)
        saved = SavedSnapshot(
            id=known.id if known else f"saved{number}",
            name=name,
            tag="default",
            snapshot_id=number,
            sandbox_id="i1",
            vcpus=1,
            memory_mib=1,
            disk_mib=1,
            envd_version="0.6.4",
            created_at=NOW,
            updated_at=NOW,
        )
        with self.store.transaction():
            self.store.layers.put(disk)
            self.store.memory.put(memory)
            self.store.snapshots.put(made)
            self.store.saved.put(saved)
        self.publication.kick()
        return saved

    def delete(self, saved: SavedSnapshot) -> None:
        with self.store.transaction():
            self.store.saved.delete(saved.id)
        self.files.collect_garbage()
        self.publication.kick()

    async def publish(self) -> None:
        """One attempt at bringing the repository up to date."""
        self.publication.start()
        await self.publication.settle()
        await self.publication.close()

    async def close(self) -> None:
        await self.volumes.close()
        await self.files.background.settle()
        self.repository.close()
        self.store.close()


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[[str], HalfNode]]:
    made: list[HalfNode] = []

    def one(name: str) -> HalfNode:
        made.append(HalfNode(tmp_path / name, tmp_path / "repository"))
        return made[-1]

    yield one
    for node in made:
        await node.close()


def failing(*_: object, **__: object) -> Any:
    raise SourceError("The repository cannot be reached.")


# --- Publication -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["deleted", "saved again"])
async def test_a_deletion_that_was_broken_off_is_made_again(
    make: Callable[[str], HalfNode], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    node = make("one")
    saved = node.save("name")
    await node.publish()
    if change == "deleted":
        node.delete(saved)
    else:
        node.save("name")
    with monkeypatch.context() as broken:
        broken.setattr(node.repository, "delete", failing)
        await node.publish()
    assert saved.snapshot_id in {manifest.id for manifest in node.repository.list()}
    await node.publish()
    kept = [row.snapshot_id for row in node.store.saved.rows.values()]
    assert [manifest.id for manifest in node.repository.list()] == kept
    assert {entry.snapshot for entry in node.repository.names()} == set(kept)
    node.repository.gc(timedelta(0))
    assert node.repository.verify().clean
    assert node.repository.usage().unreferenced_layers == 0


async def test_deletions_are_not_put_off_by_snapshots_that_keep_coming(make: Callable[[str], HalfNode]) -> None:
    node = make("one")
    gone = node.save("gone")
    await node.publish()
    node.delete(gone)
    for number in range(3):
        node.save(f"name{number}")
    set_name, coming = node.repository.set_name, iter(range(5))

    def another(*args: Any, **kwargs: Any) -> None:
        set_name(*args, **kwargs)
        if next(coming, None) is not None:
            loop.call_soon_threadsafe(node.publication.kick)
        else:
            # Only now nothing new comes, and what was deleted before is gone long since.
            assert gone.snapshot_id not in {manifest.id for manifest in node.repository.list()}

    loop = asyncio.get_running_loop()
    node.repository.set_name = another  # type: ignore[method-assign]
    await node.publish()
    assert {f"name{number}:default" for number in range(3)} <= set(node.store.published.rows)


async def test_what_is_wrong_with_one_snapshot_does_not_concern_the_others(
    make: Callable[[str], HalfNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make("one")
    bad = node.save("bad")
    good = node.save("good")
    name = node.repository.set_name

    def set_name(name_: str, tag: str, snapshot_id: str, **options: Any) -> None:
        if snapshot_id == bad.snapshot_id:
            raise KeyError("a mistake of the program")
        name(name_, tag, snapshot_id, **options)

    monkeypatch.setattr(node.repository, "set_name", set_name)
    await node.publish()
    assert node.repository.resolve("good", "default") == good.snapshot_id
    monkeypatch.undo()
    await node.publish()
    assert node.repository.resolve("bad", "default") == bad.snapshot_id


async def test_what_another_node_deletes_while_it_is_named_is_not_taken_back(make: Callable[[str], HalfNode]) -> None:
    node = make("one")
    saved = node.save("name")
    commit = node.repository.commit

    def commit_then_lose(*args: Any, **kwargs: Any) -> None:
        commit(*args, **kwargs)
        node.repository.delete(saved.snapshot_id)

    node.repository.commit = commit_then_lose  # type: ignore[method-assign]
    await node.publish()
    assert list(node.repository.list()) == []
    assert {"name:default", f"{saved.id}:default"} == set(node.store.published.rows)
    assert saved.id in node.store.saved.rows, "it can be used here"


# --- Names of other nodes ----------------------------------------------------------------------------------------


async def test_a_known_snapshot_starts_while_the_repository_fails(
    make: Callable[[str], HalfNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make("one"), make("two")
    saved = one.save("name")
    await one.publish()
    monkeypatch.setattr(imports, "FRESH", 0.0)
    found = await two.imports.origin("name")
    assert found.snapshot_id == saved.snapshot_id
    with monkeypatch.context() as broken:
        broken.setattr(two.repository, "resolve", failing)
        assert await two.imports.origin("name") == found
        with pytest.raises(SourceError):
            await two.imports.origin("unknown")
    again = one.save("name")
    await one.publish()
    assert (await two.imports.origin("name")).snapshot_id == again.snapshot_id


async def test_of_two_nodes_that_save_under_one_name_the_later_one_holds(make: Callable[[str], HalfNode]) -> None:
    one, two = make("one"), make("two")
    first = one.save("name")
    second = two.save("name")  # neither knows of the other
    await one.publish()
    await two.publish()
    assert one.repository.resolve("name", "default") == second.snapshot_id
    await one.imports.refresh()
    await two.imports.refresh()
    for node in (one, two):
        assert (await node.imports.origin("name")).snapshot_id == second.snapshot_id
    assert (await one.imports.origin(first.id)).snapshot_id == first.snapshot_id, "it has its id still"
    # Now one that knows of it: the id stays, and the other node has it when it looks the next time.
    await one.imports.inherit("name")
    third = one.save("name")
    assert third.id == second.id
    await one.publish()
    await two.imports.refresh()
    assert (await two.imports.origin("name")).snapshot_id == third.snapshot_id
    assert [saved.id for saved in two.store.saved.rows.values()] == [third.id]
    await two.publish()
    manifests = {manifest.id for manifest in one.repository.list()}
    assert manifests == {first.snapshot_id, third.snapshot_id}, "nobody needs the second one"


async def test_what_was_saved_just_now_is_not_taken_for_an_old_one(
    make: Callable[[str], HalfNode],
) -> None:
    node = make("one")
    node.save("name")
    await node.publish()
    listing = node.imports._list

    def older() -> Any:
        found = listing()
        released.wait()
        return found

    released = threading.Event()
    node.imports._list = older  # type: ignore[method-assign]
    refreshing = asyncio.ensure_future(node.imports.refresh())
    again = node.save("name")
    await node.publish()
    released.set()
    await refreshing
    assert node.store.saved[again.id] == again
    assert node.repository.resolve("name", "default") == again.snapshot_id


async def test_a_repository_that_hangs_keeps_nobody_else_from_working(
    make: Callable[[str], HalfNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make("one")
    monkeypatch.setattr(imports, "ANSWER", 0.2)
    released = threading.Event()

    def hang(*_: object) -> str:
        released.wait()
        raise NotFoundError("too late")

    monkeypatch.setattr(node.repository, "resolve", hang)
    try:
        asked = [asyncio.ensure_future(node.imports.find(f"name{n}")) for n in range(2 * THREADS)]
        await node.imports.inherit("new")  # saving goes on, under an id of its own
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(answer, SourceError) for answer in answers)
        assert await asyncio.to_thread(lambda: 1) == 1, "asyncio's own threads are free"
    finally:
        released.set()
    assert not node.imports._locks


async def test_a_manifest_that_says_two_things_about_its_size_is_refused(make: Callable[[str], HalfNode]) -> None:
    one, two = make("one"), make("two")
    saved = one.save("name")
    with one.store.transaction():
        one.store.snapshots.put(replace(one.store.snapshots[saved.snapshot_id], disk_mib=1))
    await one.publish()
    manifest = one.repository.get(saved.snapshot_id)
    wrong = replace(manifest, id="ab" * 10, shape=MachineShape(1, 1 << 40))
    with one.repository.claim(wrong.digests(), "tool") as claim:
        one.repository.commit(wrong, claim=claim)
    one.repository.set_name("wrong", "default", wrong.id)
    with pytest.raises(CorruptFileError, match="two things"):
        await two.imports.find("wrong")
    assert wrong.id not in two.store.snapshots.rows
    assert not list(two.layout.snapshot("x").parent.iterdir())
    await two.imports.refresh()
    assert [other.snapshot_id for other in two.imports.others()] == [saved.snapshot_id]


async def test_a_snapshot_that_comes_back_while_its_files_go_is_whole(
    make: Callable[[str], HalfNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make("one"), make("two")
    one.save("name")
    await one.publish()
    saved = await two.imports.find("name")
    go_on = threading.Event()
    remove = files._remove_all

    def late(paths: Any) -> None:
        go_on.wait()
        remove(paths)

    monkeypatch.setattr(files, "_remove_all", late)
    two.imports.forget(saved)
    two.files.collect_garbage()
    assert saved.snapshot_id not in two.store.snapshots.rows
    assert (await two.imports.find("name")).snapshot_id == saved.snapshot_id
    go_on.set()
    await two.files.background.settle()
    state = two.repository.get(saved.snapshot_id).state
    assert state is not None
    assert two.layout.state(saved.snapshot_id).stat().st_size == state.size
    assert [path.name for path in two.layout.snapshot("x").parent.iterdir()] == [saved.snapshot_id]


# --- Volumes -----------------------------------------------------------------------------------------------------


async def test_layers_in_use_are_claimed_as_soon_as_the_repository_is_back(
    make: Callable[[str], HalfNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = make("one"), make("two")
    saved, other = one.save("name"), one.save("other")
    await one.publish()
    await two.imports.find("name")
    # The next life of the second node, which finds the repository out of reach.
    reopened = SharedRepository(PosixStore(two.folder))
    volumes = Volumes(two.store, two.server, reopened, two.volumes.owner)
    with monkeypatch.context() as broken:
        broken.setattr(reopened, "claim", failing)
        with pytest.raises(SourceError):
            await volumes.take_over()
    manifest = one.repository.get(other.snapshot_id)
    async with volumes.keeping(manifest.digests()):
        await volumes.take_over()
        # Those of the former life are gone, and nothing is lost: neither what is recorded nor what is about to be.
        assert len(list(two.repository.store.list(f"claims/{volumes.owner}/"))) <= 2
        one.repository.delete(saved.snapshot_id)
        one.repository.delete(other.snapshot_id)
        assert one.repository.gc(timedelta(0)).layers_deleted == 1, "the device state of what was imported"
    await volumes.take_over()
    await volumes.close()
    reopened.close()


async def test_claims_of_commits_that_a_crash_broke_off_are_dropped(make: Callable[[str], HalfNode]) -> None:
    node = make("one")
    lost = SharedRepository(PosixStore(node.folder))
    digest = f"sha256:{'ab' * 32}"
    for work in ("commits", "imports", "volumes"):
        lost.claim([digest], f"one.{work}")
    other = lost.claim([digest], "another.commits")
    sharing = Sharing(node.layout, node.store, node.repository, node.server, "one", "here", lambda _: None)
    with node.repository.claim([digest], "one.commits") as held:
        await sharing._take_over()
        left = {info.key for info in node.repository.store.list("claims/")}
        assert isinstance(held, StoredClaim) and isinstance(other, StoredClaim)
        assert left == held.keys | other.keys
    await sharing.volumes.close()


async def test_a_volume_that_comes_back_while_it_goes_is_there(make: Callable[[str], HalfNode]) -> None:
    one, two = make("one"), make("two")
    one.save("name")
    await one.publish()
    saved = await two.imports.find("name")
    made = two.store.snapshots[saved.snapshot_id]
    await two.volumes.ensure(made.disk, made.memory_base)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> None:
        begun.set()
        await go_on.wait()

    two.server.slow = slow
    two.imports.forget(saved)
    two.files.collect_garbage()
    await begun.wait()
    await two.imports.find("name")
    again = asyncio.ensure_future(two.volumes.ensure(made.disk, made.memory_base))
    await asyncio.sleep(0)
    go_on.set()
    await again
    await two.volumes.background.settle()
    assert two.server.exported == {made.disk, made.memory_base}


# --- Eviction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "missing"])
async def test_the_only_sound_copy_is_not_evicted(make: Callable[[str], HalfNode], damage: str) -> None:
    node = make("one")
    saved = node.save("name")
    await node.publish()
    manifest = node.repository.get(saved.snapshot_id)
    path = node.folder / layer_key(manifest.disk.layers[0].digest)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    eviction = Eviction(node.layout, node.store, node.files, node.repository, node.volumes, lambda: True)
    assert await eviction.relieve() == 0
    assert not is_volume(node.store.snapshots[saved.snapshot_id].disk)
    content[len(content) // 2] ^= damage == "flipped"
    path.write_bytes(content)
    assert await eviction.relieve() == 1
    assert is_volume(node.store.snapshots[saved.snapshot_id].disk)
    assert node.repository.verify().clean


# --- Threads -----------------------------------------------------------------------------------------------------


async def test_calls_that_hang_hold_others_up_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    program = """
import asyncio, threading
from aenv.orchestrator.remote import THREADS, remotely

async def main():
    hung = [asyncio.ensure_future(remotely(threading.Event().wait)) for _ in range(THREADS)]
    waiting = asyncio.ensure_future(remotely(print, "never"))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    for task in (*hung, waiting):
        task.cancel()
    await asyncio.wait([*hung, waiting])
    print("over")

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"over\n")


async def test_calls_answer_raise_and_share_threads() -> None:
    names = await asyncio.gather(*(remotely(lambda: threading.current_thread().name) for _ in range(200)))
    assert len(set(names)) <= THREADS
    assert await remotely(sorted, [2, 1], reverse=True) == [2, 1]
    with pytest.raises(SourceError):
        await remotely(failing)
