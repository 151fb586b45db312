"""The log store, the console's lines, and what a change of a record says."""

import sqlite3
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import CorruptFileError
from aenv.observability import logs as logs_module
from aenv.observability.console import MAX_READ, Tail, lines_of
from aenv.observability.events import Level, events
from aenv.observability.logs import Line, LogStore
from aenv.observability.recorder import Recorder

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.fixture
def store() -> LogStore:
    return LogStore.prepare(sqlite3.connect(":memory:", isolation_level=None))


def line(message: str, level: Level = Level.INFO) -> Line:
    return Line(level, "sandbox", message)


def test_entries_come_back_in_order_with_times_that_increase(store: LogStore) -> None:
    store.add("a", [line(str(n)) for n in range(100)])
    store.add("b", [line("other")])
    found = store.read("a", cursor=None, limit=1000)
    assert [entry.message for entry in found] == [str(n) for n in range(100)]
    times = [entry.time_ms for entry in found]
    assert times == sorted(set(times))
    assert store.read("a", cursor=times[40], limit=3) == found[40:43]
    assert store.read("a", cursor=times[40], limit=3, backward=True) == found[40:37:-1]
    assert store.read("a", cursor=times[-1] + 1, limit=3) == []
    assert store.read("a", cursor=2**63 + 5, limit=3) == []


def test_level_and_search(store: LogStore) -> None:
    store.add("a", [line("Quiet", Level.DEBUG), line("said 100%"), line("loud_", Level.ERROR)])

    def read(level: Level = Level.DEBUG, search: str = "") -> list[str]:
        return [entry.message for entry in store.read("a", cursor=None, limit=9, level=level, search=search)]

    assert read(Level.WARN) == ["loud_"]
    assert read(search="quiet") == [], "search minds case"
    assert read(search="0%") == ["said 100%"]
    assert read(search="_") == ["loud_"]


def test_a_sandbox_keeps_its_latest_entries(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "MAX_ENTRIES", 16)
    for n in range(100):
        store.add("a", [line(str(n))])
    kept = [int(entry.message) for entry in store.read("a", cursor=None, limit=1000)]
    assert 16 <= len(kept) <= 18
    assert kept == list(range(100 - len(kept), 100))


def test_only_the_last_ended_sandboxes_keep_their_logs(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs_module, "KEEP_ENDED", 2)
    monkeypatch.setattr("time.time", iter(range(1, 100)).__next__)
    for name in "abcd":
        store.add(name, [line("x")])
    for name in "bca":
        store.ended(name)
    assert [name for name in "abcd" if store.known(name)] == ["a", "c", "d"]
    assert store.unfinished() == {"d"}


def test_it_survives_being_opened_again_and_refuses_foreign_files(tmp_path: Path) -> None:
    path = tmp_path / "logs.db"
    first = LogStore.open(path)
    first.add_console("a", [line("x")], "vm", 17)
    assert path.stat().st_mode & 0o777 == 0o600
    first.close()
    again = LogStore.open(path)
    assert again.console_offset("a", "vm") == 17
    assert again.console_offset("a", "other") == 0
    again.close()
    path.write_bytes(b"no database" * 1000)
    for leftover in tmp_path.glob("logs.db-*"):
        leftover.unlink()
    with pytest.raises(CorruptFileError, match="remove it"):
        LogStore.open(path)


def test_console_lines() -> None:
    text = b"\x1b[1mbold\x1b[0m\r\n\n  \nenvd 1.0 ready\n[1.0] Kernel panic - not syncing\n" + b"x" * 5000
    found = lines_of(text)
    assert [entry.message for entry in found[:3]] == ["bold", "envd 1.0 ready", "[1.0] Kernel panic - not syncing"]
    assert [entry.logger for entry in found[:3]] == ["console", "envd", "console"]
    assert found[2].level is Level.ERROR
    assert len(found[3].message) == 1024


@given(st.binary(max_size=300))
def test_console_lines_hold_no_control_characters(text: bytes) -> None:
    for entry in lines_of(text):
        assert (entry.message and entry.message.isprintable()) or "\N{REPLACEMENT CHARACTER}" in entry.message or any(
            ord(letter) > 0x7F for letter in entry.message
        ) or "\t" in entry.message  # fmt: skip


@settings(deadline=None)
@given(st.lists(st.sampled_from([b"a", b"b\n", b"\n", b"long line\n", b"half"]), max_size=30))
def test_a_tail_sees_every_line_once(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("tail") / "console.log"
    tail = Tail(path, "vm")
    seen = [entry.message for entry in tail.read()]
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece)
        seen += [entry.message for entry in tail.read()]
    seen += [entry.message for entry in tail.read(final=True)]
    assert seen == [text.decode() for text in b"".join(pieces).split(b"\n") if text.strip()]


def test_a_flood_is_cut_and_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    path.write_bytes(b"line\n" * MAX_READ)
    found = Tail(path, "vm").read()
    assert "left out" in found[0].message
    assert len(found) < MAX_READ // 5 + 3


@dataclass(frozen=True)
class Record:
    id: str = "child"
    state: str = "running"
    parent_id: str | None = None
    template_id: str = "t"
    template_alias: str | None = "base"
    auto_pause: bool = True
    end_at: datetime = NOW + timedelta(seconds=60)
    vm_id: str | None = "vm"


R = Record()
LATE = replace(R, end_at=NOW - timedelta(seconds=1))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, replace(R, state="starting"), []),
        (None, replace(R, state="starting", parent_id="p"), [("p", "forked into child")]),
        (replace(R, state="starting"), R, [("child", "created from template base")]),
        (replace(R, state="starting", parent_id="p"), replace(R, parent_id="p"), [("child", "forked from p")]),
        (replace(R, state="starting"), replace(R, state="deleting"), [("child", "the sandbox did not start")]),
        (R, R, []),
        (R, LATE, []),
        (R, replace(R, state="pausing"), [("child", "pausing")]),
        (replace(R, state="pausing"), replace(R, state="paused"), [("child", "paused")]),
        (LATE, replace(LATE, state="pausing"), [("child", "pausing")]),
        (
            replace(LATE, state="pausing"),
            replace(LATE, state="paused"),
            [("child", "paused at the end of its time to live")],
        ),
        (replace(R, state="pausing"), R, [("child", "the pause failed; the sandbox runs on")]),
        (replace(R, state="resuming"), R, [("child", "resumed")]),
        (R, replace(R, state="paused"), [("child", "the virtual machine was lost; back to the last pause")]),
        (R, replace(R, state="deleting"), [("child", "killed")]),
        (
            replace(LATE, auto_pause=False),
            replace(LATE, auto_pause=False, state="deleting"),
            [("child", "killed at the end of its time to live")],
        ),
        (replace(R, state="deleting"), None, []),
    ],
)
def test_what_a_change_says(before: Record | None, after: Record | None, expected: list[tuple[str, str]]) -> None:
    assert [(event.sandbox_id, event.message) for event in events(before, after, NOW)] == expected


def test_the_recorder_takes_the_console_before_the_machine_goes(store: LogStore, tmp_path: Path) -> None:
    gone: list[str] = []
    recorder = Recorder(store, tmp_path.joinpath, gone.append)
    starting = replace(R, state="starting", vm_id=None)
    recorder.on_change(None, starting)
    assert recorder.starting == 1
    recorder.on_change(starting, replace(starting, vm_id="vm"))
    recorder.on_change(replace(starting, vm_id="vm"), R)
    assert (recorder.starting, recorder.started) == (0, 1)
    (tmp_path / "vm").write_text("first\nlast words")
    recorder.on_change(R, replace(R, state="deleting"))
    (tmp_path / "vm").unlink()
    recorder.on_change(replace(R, state="deleting"), None)
    said = [entry.message for entry in store.read("child", cursor=None, limit=10)]
    assert said == ["created from template base", "first", "last words", "killed"]
    assert gone == ["child"]
    assert not store.unfinished()


def test_a_log_that_cannot_be_written_stops_nothing(store: LogStore, tmp_path: Path) -> None:
    recorder = Recorder(store, tmp_path.joinpath)
    store.close()
    recorder.on_change(replace(R, state="starting"), R)
