"""Names, tags, what a finished build changes, what is kept and what goes."""

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import InvalidRequestError, NotFoundError
from aenv.orchestrator import catalog
from aenv.orchestrator.builds import Build, BuildStatus, BuiltImage, CachedLayer, Failure
from aenv.orchestrator.store import Store
from aenv.template import publishing
from aenv.template.archives import PROTECTED, Archives, Stored
from aenv.template.archives import surplus as surplus_archives
from aenv.template.cache import LayerCache
from aenv.template.journal import Journal, JournalStore, around, at_least, decode
from aenv.template.lines import LineSplitter
from tests.orchestrator.samples import NOW, snapshot

IMAGE = BuiltImage("s1", 1, 512, 4096, "0.6.4", "0" * 64, {"A": "1"}, "root", "/srv")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "db")
    yield made
    made.close()


def build(number: int, *tags: str) -> Build:
    return Build(
        id=f"b{number}",
        template_id="t1",
        name="demo",
        tags=tags or ("default",),
        status=BuildStatus.WAITING,
        vcpus=1,
        memory_mib=512,
        created_at=NOW + timedelta(seconds=number),
        updated_at=NOW,
    )


def publish(store: Store, number: int, *tags: str) -> None:
    with store.transaction():
        image = replace(IMAGE, snapshot_id=f"s{number}")
        publishing.publish(store, build(number, *tags), image, NOW + timedelta(minutes=number))


def resolved(store: Store, name: str) -> str:
    return catalog.resolve(store.templates.rows.values(), store.builds.rows, name).snapshot_id


@pytest.mark.parametrize("text", ["", "a b", "-a", "a:", "a:b:c", "a:b/c", "/a", "a" * 129, "a//b", "ä"])
def test_names_that_cannot_be(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        catalog.parse(text)


def test_names() -> None:
    assert catalog.parse("Team/My-App:v1.0") == catalog.Reference("team/my-app", "v1.0")
    assert catalog.parse("x") == catalog.Reference("x", None)


def test_tags_name_builds_and_move(store: Store) -> None:
    publish(store, 1, "v1", "default")
    publish(store, 2, "v2")
    assert [resolved(store, name) for name in ("demo", "demo:v1", "DEMO:v2", "t1", "t1:v2")] == [
        "s1", "s1", "s2", "s1", "s2"
    ]  # fmt: skip
    template = catalog.resolve(store.templates.rows.values(), store.builds.rows, "demo:v2")
    assert (template.env_vars, template.default_user, template.default_workdir) == ({"A": "1"}, "root", "/srv")
    publish(store, 3, "default")
    assert [resolved(store, name) for name in ("demo", "demo:v1", "demo:v2")] == ["s3", "s1", "s2"]
    with store.transaction():
        publishing.untag(store, store.templates["t1"], ["v1", "default"], NOW)
    assert store.builds["b1"].image is None, "what no tag names keeps no snapshot"
    assert store.builds["b1"].status is BuildStatus.READY
    assert store.templates["t1"].snapshot_id == "s2"
    with pytest.raises(NotFoundError, match="no tag 'default'"):
        resolved(store, "demo")


def test_a_name_without_a_finished_build_says_so(store: Store) -> None:
    with store.transaction():
        store.builds.put(publishing.failed(build(1), Failure("no", "1"), NOW))
    with pytest.raises(NotFoundError, match="no finished build"):
        resolved(store, "demo")
    with pytest.raises(NotFoundError, match="not found"):
        resolved(store, "other")


def test_old_builds_are_forgotten_and_tagged_ones_kept(store: Store) -> None:
    publish(store, 0, "keep")
    with store.transaction():
        for number in range(1, publishing.KEEP_BUILDS + 4):
            store.builds.put(publishing.failed(build(number), Failure("no"), NOW))
        store.builds.put(build(99))
    gone = publishing.forgettable(store.builds.rows.values(), "t1")
    assert sorted(b.id for b in gone) == ["b1", "b2", "b3"]


def test_layer_cache_keeps_the_last_used(store: Store) -> None:
    cache = LayerCache(store, 2)
    with store.transaction():
        store.snapshots.put(snapshot("s1"))
    for number in range(2):
        cache.put(CachedLayer(f"k{number}", "s1", "", NOW + timedelta(seconds=number)))
    assert cache.get("k0") is not None  # now the last used
    cache.put(CachedLayer("k2", "s1", "", NOW + timedelta(days=9999)))
    assert set(store.build_cache.rows) == {"k0", "k2"}
    cache.shrink()
    assert set(store.build_cache.rows) == {"k2"}
    with store.transaction():
        store.snapshots.delete("s1")
    assert cache.get("k2") is None, "a layer whose snapshot is gone is none"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10_000))), st.integers(0, 200))
def test_archives_are_bounded_and_recent_ones_protected(sizes: list[tuple[int, int]], limit: int) -> None:
    stored = [Stored(str(index), size, float(used)) for index, (size, used) in enumerate(sizes)]
    now = 10_000.0
    gone = surplus_archives(stored, limit, now)
    left = [item for item in stored if item.name not in gone]
    assert all(now - item.used >= PROTECTED for item in stored if item.name in gone)
    assert sum(item.size for item in left) <= limit or all(now - item.used < PROTECTED for item in left)


def test_archives_appear_complete(tmp_path: Path) -> None:
    archives = Archives(tmp_path / "files", 100)
    archives.open()
    part = archives.part()
    part.write_bytes(b"tar")
    assert not archives.present("0" * 64)
    archives.commit(part, "0" * 64)
    assert archives.present("0" * 64)
    archives.part().write_bytes(b"left by a dead server")
    archives.open()
    assert [path.name for path in (tmp_path / "files").iterdir()] == ["0" * 64]


def test_journal_survives_its_writer(tmp_path: Path) -> None:
    journals = JournalStore(tmp_path / "builds")
    journals.prepare()
    journal = journals.start("b1")
    for number in range(5):
        journal.write(f"line {number}", step="1")
    journal.write("broken", level="error", step="2")
    assert [entry.message for entry in journals.entries("b1")][-1] == "broken"
    with (tmp_path / "builds/b1.jsonl").open("a") as file:
        file.write('["2026-01-01T00:00:00+00:00", "info", "to')  # torn
    again = JournalStore(tmp_path / "builds").entries("b1")
    assert [entry.message for entry in again] == [*(f"line {n}" for n in range(5)), "broken"]
    assert [entry.message for entry in at_least(again, "warn")] == ["broken"]
    cursor = round(again[0].timestamp.timestamp() * 1000) + 60_000
    assert around(again, cursor, 10, backward=False) == []
    assert [entry.message for entry in around(again, None, 2, backward=True)] == ["broken", "line 4"]
    assert decode("nonsense") is None
    journals.retain({"other"})
    assert journals.entries("b2") == []


def test_journal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aenv.template.journal.MAX_ENTRIES", 10)
    journal = Journal(tmp_path / "log")
    for number in range(50):
        journal.write(str(number))
    journal.write("the end", level="error")
    assert len(journal.entries) == 11
    assert [entry.level for entry in journal.entries[-2:]] == ["warn", "error"]
    started = time.monotonic()
    journal.write("x" * 1_000_000, level="error")
    assert len(journal.entries[-1].message) < 10_000 and time.monotonic() - started < 1


@given(st.binary(max_size=200), st.lists(st.integers(1, 20), max_size=20))
def test_lines_do_not_depend_on_how_output_is_cut(data: bytes, cuts: list[int]) -> None:
    whole, pieces = LineSplitter(), LineSplitter()
    expected = whole.feed(data) + whole.end()
    found: list[str] = []
    at = 0
    for cut in cuts:
        found += pieces.feed(data[at : at + cut])
        at += cut
    found += pieces.feed(data[at:]) + pieces.end()
    assert found == expected


def test_progress_bars_show_their_last_state() -> None:
    assert LineSplitter().feed(b"10%\r50%\r100%\r\nnext\n") == ["100%", "next"]
