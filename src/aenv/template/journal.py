"""Logs of builds: one line of JSON per entry in ``$AENV_HOME/builds/<build>.jsonl``.

Entries are appended as they come, so a crash loses at most the last line, which a reader then skips. Reading goes by
index (the SDK's polling) or by time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

MAX_ENTRIES = 20_000  # of one build; what comes after is counted and not kept
MAX_MESSAGE = 8192  # characters of one entry
LEVELS = ("debug", "info", "warn", "error")


@dataclass(frozen=True, slots=True)
class LogEntry:
    """``step`` is ``base``, a step's number from 1, ``finalize``, or None."""

    timestamp: datetime
    level: str
    message: str
    step: str | None = None


def encode(entry: LogEntry) -> str:
    return json.dumps([entry.timestamp.isoformat(), entry.level, entry.message, entry.step])


def decode(line: str) -> LogEntry | None:
    """None for a torn line."""
    try:
        timestamp, level, message, step = json.loads(line)
        return LogEntry(datetime.fromisoformat(timestamp), level, message, step)
    except (ValueError, TypeError):
        return None


def at_least(entries: Sequence[LogEntry], level: str | None) -> Sequence[LogEntry]:
    """Those that are as severe as ``level`` or more."""
    if level is None:
        return entries
    return [entry for entry in entries if LEVELS.index(entry.level) >= LEVELS.index(level)]


def around(entries: Sequence[LogEntry], cursor_ms: int | None, limit: int, *, backward: bool) -> list[LogEntry]:
    """Up to ``limit`` entries from ``cursor_ms`` (milliseconds since 1970) on, or back from it, newest first then."""
    if backward:
        found = [e for e in reversed(entries) if cursor_ms is None or e.timestamp.timestamp() * 1000 <= cursor_ms]
    else:
        found = [e for e in entries if cursor_ms is None or e.timestamp.timestamp() * 1000 >= cursor_ms]
    return found[:limit]


class Journal:
    """The log of one build while it runs."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("a", buffering=1)
        self.entries: list[LogEntry] = []

    def write(self, message: str, *, level: str = "info", step: str | None = None) -> None:
        if self._file.closed or (len(self.entries) >= MAX_ENTRIES and level != "error"):
            return
        if len(self.entries) == MAX_ENTRIES - 1 and level != "error":
            message, level = "There is more output than is kept; the rest is left out.", "warn"
        text = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
        entry = LogEntry(datetime.now(UTC), level, text, step)
        self.entries.append(entry)
        self._file.write(encode(entry) + "\n")

    def close(self) -> None:
        self._file.close()


class JournalStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, Journal] = {}

    def prepare(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def start(self, build_id: str) -> Journal:
        journal = Journal(self._path(build_id))
        self._open[build_id] = journal
        return journal

    def running(self, build_id: str) -> Journal | None:
        return self._open.get(build_id)

    def finish(self, build_id: str) -> None:
        if (journal := self._open.pop(build_id, None)) is not None:
            journal.close()

    def entries(self, build_id: str) -> Sequence[LogEntry]:
        if (journal := self._open.get(build_id)) is not None:
            return journal.entries
        try:
            lines = self._path(build_id).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return []
        return [entry for line in lines if (entry := decode(line)) is not None]

    def remove(self, build_id: str) -> None:
        self.finish(build_id)
        self._path(build_id).unlink(missing_ok=True)

    def retain(self, build_ids: set[str]) -> None:
        """Remove logs of builds that have no record."""
        for path in self._folder.glob("*.jsonl"):
            if path.stem not in build_ids:
                path.unlink(missing_ok=True)

    def _path(self, build_id: str) -> Path:
        return self._folder / f"{build_id}.jsonl"
