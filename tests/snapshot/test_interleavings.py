"""Commits, deletions and collections at once, in every order of their requests (docs/internals/repository.md).

The programs are the real ones; only the store is in memory, and it holds each of them up before every request.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from aenv.errors import AenvError, NotFoundError, SnapshotNotFoundError
from aenv.snapshot.claims import CLAIM_LIFE
from aenv.snapshot.collector import layer_key
from aenv.snapshot.repository import Claim
from aenv.snapshot.shared import SharedRepository, file_digest
from tests.snapshot.interleave import World, explore, sample
from tests.snapshot.memory import MemoryStore
from tests.snapshot.things import commit_files, make_file

A, B, OLD = "aaaaaaaa", "bbbbbbbb", "00000000"
NO_GRACE = timedelta(0)


class Scene:
    """A store that holds the layer ``x``, named by nobody or by the snapshot ``OLD``; programs are added to it."""

    def __init__(self, folder: Path, named: bool) -> None:
        self.folder = folder
        self.world = World(MemoryStore())
        self.claims: list[Claim] = []
        repository = self.node()
        if named:
            commit_files(repository, OLD, [folder / "x"])
        else:
            repository.put_layer(folder / "x")
        self.world.store.seconds += 100.0

    def node(self) -> SharedRepository:
        repository = SharedRepository(self.world.store, self.world.clock)
        repository.close()  # nothing is renewed in the background: threads of its own are not explored
        return repository

    def commit(self, snapshot_id: str, *layers: str, owner: str = "node") -> Callable[[], None]:
        repository = self.node()
        return lambda: void(commit_files(repository, snapshot_id, [self.folder / name for name in layers], owner))

    def abort(self, *layers: str) -> Callable[[], None]:
        """A commit that is given up after its layers were stored."""
        repository = self.node()

        def run() -> None:
            files = [self.folder / name for name in layers]
            with repository.claim([file_digest(path) for path in files], "aborter"):
                for path in files:
                    repository.put_layer(path)

        return run

    def collect(self) -> Callable[[], None]:
        repository = self.node()
        return lambda: void(repository.gc(NO_GRACE))

    def delete(self, snapshot_id: str) -> Callable[[], None]:
        return lambda: self.node().delete(snapshot_id)

    def acquire(self, snapshot_id: str) -> Callable[[], None]:
        repository = self.node()
        return lambda: self.claims.append(repository.acquire(snapshot_id, "reader")[1])


def void(_: object) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in "xyz":
        make_file(tmp_path / name, name.encode() * 10)
    return tmp_path


def check(scene: Scene, order: str, committed: set[str]) -> None:
    """Every commit that was reported is there and whole; nothing else is; and a later collection frees the rest."""
    store = scene.world.store
    errors = {name: actor.error for name, actor in scene.world.actors.items() if actor.error}
    repository = scene.node()
    for claim in scene.claims:
        assert all(repository.has_layer(digest) for digest in claim.digests), f"a claimed layer went: {order}"
    report = repository.verify()
    assert report.clean, f"{report.problems} {errors}: {order}"
    found = {manifest.id for manifest in repository.list()}
    assert committed <= found, f"{committed - found} {errors}: {order}"
    store.seconds += 3 * CLAIM_LIFE.total_seconds()
    repository.gc(NO_GRACE)
    assert repository.verify().clean, order
    named = {layer_key(digest) for manifest in repository.list() for digest in manifest.digests()}
    left = {key for key in store.objects if not key.startswith(("snapshots/", "names/")) and key != "clock"}
    assert left == named, f"space is not reclaimed: {order}"


class Case:
    """Programs to run at once. Reported commits are those of actors named by a snapshot's id that ended well."""

    def __init__(self, folder: Path, named: bool, programs: dict[str, Callable[[Scene], Callable[[], None]]]) -> None:
        self.folder = folder
        self.named = named
        self.programs = programs
        self.scene: Scene | None = None
        self.crash: tuple[str, int] | None = None
        self.crashed = False

    def build(self) -> World:
        self.scene = Scene(self.folder, self.named)
        for name, program in self.programs.items():
            at = self.crash[1] if self.crash and self.crash[0] == name else None
            self.scene.world.add(name, program(self.scene), at)
        return self.scene.world

    def check(self, world: World, order: str) -> None:
        assert self.scene is not None and self.scene.world is world
        ended = {name: actor for name, actor in world.actors.items() if not actor.dead}
        self.crashed |= len(ended) < len(world.actors)
        for name, actor in ended.items():
            allowed = (SnapshotNotFoundError,) if name.startswith(("reader", "namer")) else ()
            assert actor.error is None or isinstance(actor.error, allowed), f"{name} failed: {actor.error!r}: {order}"
        committed = {name[:8] for name in ended if name[:8] in (A, B)}
        check(self.scene, order, committed)

    def explore(self, limit: int = 20_000) -> int:
        return explore(self.build, self.check, limit)

    def explore_crashes(self, name: str) -> int:
        """Kill that program after each of its operations, and run every order of each."""
        runs = 0
        for operations in range(100):
            self.crash, self.crashed = (name, operations), False
            runs += self.explore()
            if not self.crashed:  # it ends before that many operations
                return runs
        raise AssertionError("it does not end")


def test_commit_against_collection(folder: Path) -> None:
    case = Case(folder, False, {A: lambda s: s.commit(A, "x", "y"), "gc": lambda s: s.collect()})
    assert case.explore() > 20


def test_the_search_finds_a_protocol_that_is_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(folder, False, {A: lambda s: s.commit(A, "x"), "gc": lambda s: s.collect()})
    with monkeypatch.context() as patch:
        patch.setattr("aenv.snapshot.claims.wait_for_tombs", lambda *_: None)
        with pytest.raises(AssertionError, match=r"missing|is not in the repository"):
            case.explore()


@pytest.mark.parametrize("victim", [A, "gc"])
def test_commit_against_collection_with_a_crash(folder: Path, victim: str) -> None:
    case = Case(folder, False, {A: lambda s: s.commit(A, "x"), "gc": lambda s: s.collect()})
    assert case.explore_crashes(victim) > 100


def test_commit_against_deletion_and_collection(folder: Path) -> None:
    programs = {
        A: lambda s: s.commit(A, "x"),
        "deleter": lambda s: s.delete(OLD),
        "gc": lambda s: s.collect(),
    }
    assert Case(folder, True, programs).explore() > 50


def test_reader_against_deletion_and_collection(folder: Path) -> None:
    def delete_and_collect(scene: Scene) -> Callable[[], None]:
        delete, collect = scene.delete(OLD), scene.collect()
        return lambda: (delete(), collect())[1]

    case = Case(folder, True, {"reader": lambda s: s.acquire(OLD), "gc": delete_and_collect})
    assert case.explore() > 10


def test_two_nodes_commit_the_same_against_collection(folder: Path) -> None:
    programs = {
        A + " first": lambda s: s.commit(A, "x", owner="one"),
        A + " second": lambda s: s.commit(A, "x", owner="two"),
        "gc": lambda s: s.collect(),
    }
    case = Case(folder, False, programs)
    sample(case.build, case.check, runs=1500, seed=1)


@pytest.mark.parametrize("crash_at", [None, *range(4, 12)])
def test_two_commits_two_collections_and_one_given_up(folder: Path, crash_at: int | None) -> None:
    """Also with a collector that crashes and leaves a tombstone, which others come to consider abandoned."""
    programs = {
        A: lambda s: s.commit(A, "x", "y"),
        B: lambda s: s.commit(B, "x", "z"),
        "aborter": lambda s: s.abort("x"),
        "gc one": lambda s: s.collect(),
        "gc two": lambda s: s.collect(),
    }
    case = Case(folder, False, programs)
    if crash_at is not None:
        case.crash = "gc one", crash_at
    sample(case.build, case.check, runs=400, seed=crash_at or 0)


def test_a_snapshot_is_named_while_it_is_deleted(folder: Path) -> None:
    def name_it(scene: Scene) -> Callable[[], None]:
        repository = scene.node()
        return lambda: repository.set_name("name", "tag", OLD)

    assert Case(folder, True, {"namer": name_it, "deleter": lambda s: s.delete(OLD)}).explore() > 5


def test_names_of_two_nodes_both_arrive(folder: Path) -> None:
    def name_it(tag: str) -> Callable[[Scene], Callable[[], None]]:
        return lambda scene: lambda: scene.node().set_name("name", tag, OLD)

    case = Case(folder, True, {"one": name_it("1"), "two": name_it("2")})

    def both(world: World, order: str) -> None:
        assert case.scene is not None
        assert [entry.tag for entry in case.scene.node().names()] == ["1", "2"], order

    assert explore(case.build, both) > 1


def test_a_claim_that_lapsed_does_not_let_a_broken_snapshot_stand(folder: Path) -> None:
    """The process is held up for longer than a claim lives, at each of its requests, while others collect."""
    for at in range(20):
        scene = Scene(folder, False)
        store, count = scene.world.store, 0

        def before(operation: object, at: int = at, scene: Scene = scene, store: MemoryStore = store) -> None:
            nonlocal count
            count += 1
            if count == at:
                store.before = void
                store.seconds += 2 * CLAIM_LIFE.total_seconds()
                scene.node().gc(NO_GRACE)

        store.before = before
        try:
            scene.commit(A, "x", "y")()
        except NotFoundError:
            assert not list(scene.node().list())
        except AenvError as error:
            raise AssertionError(at) from error
        store.before = void
        check(scene, str(at), set())
        if count < at:
            return
    raise AssertionError("it does not end")
