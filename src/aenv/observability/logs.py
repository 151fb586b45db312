"""Sandboxes' logs in ``$AENV_HOME/logs.db`` (SQLite, WAL): durable and bounded.

Each sandbox keeps its latest ``MAX_ENTRIES`` entries, and of the sandboxes that are gone the last ``KEEP_ENDED``
keep theirs: what happened to a sandbox is most often asked after its end. ``synchronous=NORMAL``: entries survive
the death of the server at any moment, and at worst the last ones are missing after the host's.

Times are Unix milliseconds and strictly increase within a sandbox (an entry that would share one with its
predecessor is moved by a millisecond), so that a reader who asks for what came after the last time that it saw,
as E2B's tools do, misses nothing and sees nothing twice.
"""

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from aenv.observability.events import Level
from aenv.storage.database import make_tables, open_private

SCHEMA_VERSION = 1
MAX_ENTRIES = 2000
KEEP_ENDED = 1000
MAX_MESSAGE = 4096  # characters of one entry

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sandboxes (
    id TEXT PRIMARY KEY, last_ms INTEGER NOT NULL, count INTEGER NOT NULL, ended_ms INTEGER,
    vm_id TEXT, console_offset INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    sandbox TEXT NOT NULL, time_ms INTEGER NOT NULL, level INTEGER NOT NULL, logger TEXT NOT NULL,
    message TEXT NOT NULL, PRIMARY KEY (sandbox, time_ms)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Entry:
    time_ms: int
    level: Level
    logger: str  # who said it: "sandbox" (the platform), "envd", "console"
    message: str

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.time_ms / 1000, UTC)


@dataclass(frozen=True, slots=True)
class Line:
    """An entry to be written; it gets its time then."""

    level: Level
    logger: str
    message: str


class LogStore:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    @classmethod
    def open(cls, path: Path) -> "LogStore":
        """The log database at ``path`` (mode 0600). Raises CorruptFileError."""
        return cls.prepare(open_private(path), str(path))

    @classmethod
    def prepare(cls, database: sqlite3.Connection, name: str = "memory") -> "LogStore":
        advice = "It holds nothing but logs: remove it to start with none."
        make_tables(
            database,
            name,
            version=SCHEMA_VERSION,
            schema=_SCHEMA,
            synchronous="NORMAL",
            other_version=advice,
            unreadable=advice,
        )
        return cls(database)

    def close(self) -> None:
        self._database.close()

    # -- writing ----------------------------------------------------------------------------------------

    def add(self, sandbox_id: str, lines: Iterable[Line]) -> None:
        with self._transaction():
            self._add(sandbox_id, lines)

    def add_console(self, sandbox_id: str, lines: Iterable[Line], vm_id: str, offset: int) -> None:
        """Lines of a VM's console, which has been read up to ``offset``: both or neither are recorded."""
        with self._transaction():
            self._add(sandbox_id, lines)
            self._database.execute(
                "UPDATE sandboxes SET vm_id = ?, console_offset = ? WHERE id = ?", (vm_id, offset, sandbox_id)
            )

    def _add(self, sandbox_id: str, lines: Iterable[Line]) -> None:
        self._database.execute("INSERT OR IGNORE INTO sandboxes (id, last_ms, count) VALUES (?, 0, 0)", (sandbox_id,))
        last, count = self._database.execute(
            "SELECT last_ms, count FROM sandboxes WHERE id = ?", (sandbox_id,)
        ).fetchone()
        now = int(time.time() * 1000)
        rows = []
        for line in lines:
            last = max(now, last + 1)
            rows.append((sandbox_id, last, int(line.level), line.logger, line.message[:MAX_MESSAGE]))
        self._database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?)", rows)
        count += len(rows)
        if count > MAX_ENTRIES + MAX_ENTRIES // 8:  # in blocks, so that adding stays cheap
            self._database.execute(
                "DELETE FROM entries WHERE sandbox = ? AND time_ms <= (SELECT time_ms FROM entries "
                "WHERE sandbox = ? ORDER BY time_ms DESC LIMIT 1 OFFSET ?)",
                (sandbox_id, sandbox_id, MAX_ENTRIES),
            )
            count = MAX_ENTRIES
        self._database.execute("UPDATE sandboxes SET last_ms = ?, count = ? WHERE id = ?", (last, count, sandbox_id))

    def ended(self, sandbox_id: str) -> None:
        """The sandbox is gone; its log stays until ``KEEP_ENDED`` others have ended after it."""
        with self._transaction():
            self._database.execute(
                "UPDATE sandboxes SET ended_ms = ? WHERE id = ?", (int(time.time() * 1000), sandbox_id)
            )
            surplus = [
                row[0]
                for row in self._database.execute(
                    "SELECT id FROM sandboxes WHERE ended_ms IS NOT NULL ORDER BY ended_ms DESC LIMIT -1 OFFSET ?",
                    (KEEP_ENDED,),
                )
            ]
            for name in surplus:
                self._database.execute("DELETE FROM entries WHERE sandbox = ?", (name,))
                self._database.execute("DELETE FROM sandboxes WHERE id = ?", (name,))

    # -- reading ----------------------------------------------------------------------------------------

    def known(self, sandbox_id: str) -> bool:
        return bool(self._database.execute("SELECT 1 FROM sandboxes WHERE id = ?", (sandbox_id,)).fetchone())

    def unfinished(self) -> set[str]:
        """Sandboxes that had not ended when this was last written."""
        return {row[0] for row in self._database.execute("SELECT id FROM sandboxes WHERE ended_ms IS NULL")}

    def console_offset(self, sandbox_id: str, vm_id: str) -> int:
        """How far the console of this VM has been read, bytes."""
        row = self._database.execute(
            "SELECT console_offset FROM sandboxes WHERE id = ? AND vm_id = ?", (sandbox_id, vm_id)
        ).fetchone()
        return int(row[0]) if row else 0

    def read(
        self,
        sandbox_id: str,
        *,
        cursor: int | None,
        limit: int,
        backward: bool = False,
        level: Level = Level.DEBUG,
        search: str = "",
    ) -> Sequence[Entry]:
        """Entries from ``cursor`` (Unix ms, inclusive) on, oldest first; or up to it, newest first."""
        where = "sandbox = ? AND level >= ?"
        values: list[object] = [sandbox_id, int(level)]
        if cursor is not None:
            where += f" AND time_ms {'<=' if backward else '>='} ?"
            values.append(min(cursor, 2**63 - 1))
        if search:
            where += " AND instr(message, ?) > 0"  # LIKE would ignore case
            values.append(search)
        rows = self._database.execute(
            f"SELECT time_ms, level, logger, message FROM entries WHERE {where} "
            f"ORDER BY time_ms {'DESC' if backward else 'ASC'} LIMIT ?",
            (*values, limit),
        )
        return [Entry(when, Level(number), logger, message) for when, number, logger, message in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise
