"""The node's records in SQLite (WAL), with a copy in memory that reads are served from.

Each record is one row: an id and a JSON document. A ``transaction`` applies its changes to the database and to
memory together, or to neither. Writes take some tens of microseconds and run on the event loop.
``synchronous=NORMAL`` makes them survive the death of the process at any moment; when the host itself dies the
database stays consistent, at worst without the last transitions.
"""

import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from aenv.errors import CapacityError, CorruptFileError
from aenv.orchestrator.builds import Build, CachedLayer
from aenv.orchestrator.model import Published, Sandbox, SavedSnapshot, Template
from aenv.snapshot.model import Committed, DiskLayer, MemoryBase, Snapshot
from aenv.storage.database import check_version, open_private

SCHEMA_VERSION = 1
RESERVE = 4 << 20  # bytes; SQLite starts its log of changes over at about this size

Record = TypeVar(
    "Record",
    Sandbox, Template, SavedSnapshot, Snapshot, DiskLayer, MemoryBase, Build, CachedLayer, Committed, Published,
)  # fmt: skip


class Table(Generic[Record]):
    """Records of one type by id: read from memory, written to both inside a transaction."""

    def __init__(self, database: sqlite3.Connection, name: str, kind: type[Record]) -> None:
        self._database = database
        self._name = name
        self._adapter: TypeAdapter[Record] = TypeAdapter(kind)
        self._undo: list[tuple[str, Record | None]] = []
        # Told of every committed change as (before, after); must not write to the store.
        self.on_change: Callable[[Record | None, Record | None], None] | None = None
        database.execute(f"CREATE TABLE IF NOT EXISTS {name} (id TEXT PRIMARY KEY, doc TEXT NOT NULL) WITHOUT ROWID")
        self._rows: dict[str, Record] = {}
        self._unwritten: set[str] = set()
        for key, doc in database.execute(f"SELECT id, doc FROM {name}"):
            try:
                self._rows[key] = self._adapter.validate_json(doc)
            except ValidationError as error:
                raise CorruptFileError(
                    f"Record {key!r} of table {name!r} cannot be read: {error.errors()[0]['msg']}.",
                    "The database was written by another version or is damaged; restore it or use a fresh home.",
                ) from error

    @property
    def rows(self) -> Mapping[str, Record]:
        return self._rows

    def get(self, key: str) -> Record | None:
        return self._rows.get(key)

    def __getitem__(self, key: str) -> Record:
        return self._rows[key]

    def put(self, record: Record) -> None:
        self._require_transaction()
        self._write(record)
        self._undo.append((record.id, self._rows.get(record.id)))
        self._rows[record.id] = record

    def remember(self, record: Record) -> None:
        """What is true and could not be written: in memory now, in the database with the next transaction."""
        self._rows[record.id] = record
        self._unwritten.add(record.id)

    def write_remembered(self) -> None:
        for key in self._unwritten:
            if (record := self._rows.get(key)) is not None:
                self._write(record)

    def _write(self, record: Record) -> None:
        self._database.execute(
            f"INSERT INTO {self._name} (id, doc) VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET doc = excluded.doc",
            (record.id, self._adapter.dump_json(record).decode()),
        )

    def delete(self, key: str) -> None:
        self._require_transaction()
        self._database.execute(f"DELETE FROM {self._name} WHERE id = ?", (key,))
        self._undo.append((key, self._rows.pop(key, None)))

    def _require_transaction(self) -> None:
        if not self._database.in_transaction:
            raise RuntimeError("records are written inside Store.transaction() only")

    def committed(self) -> None:
        changed: dict[str, Record | None] = {}
        for key, before in self._undo:
            changed.setdefault(key, before)
        self._undo.clear()
        self._unwritten.clear()
        if self.on_change is not None:
            for key, before in changed.items():
                self.on_change(before, self._rows.get(key))

    def rolled_back(self) -> None:
        while self._undo:
            key, before = self._undo.pop()
            if before is None:
                self._rows.pop(key, None)
            else:
                self._rows[key] = before


class Store:
    """All tables of a node. One process at a time opens it (the server holds ``Layout.lock``)."""

    def __init__(self, path: Path) -> None:
        self._database = open_private(path)  # tokens and environments are in it
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        advice = "Run the version of AgentENV that wrote it, or start with a fresh home."
        check_version(self._database, str(path), SCHEMA_VERSION, advice)
        self._database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        self.sandboxes = Table(self._database, "sandboxes", Sandbox)
        self.templates = Table(self._database, "templates", Template)
        self.saved = Table(self._database, "saved_snapshots", SavedSnapshot)
        self.snapshots = Table(self._database, "snapshots", Snapshot)
        self.layers = Table(self._database, "layers", DiskLayer)
        self.memory = Table(self._database, "memory", MemoryBase)
        self.builds = Table(self._database, "builds", Build)
        self.build_cache = Table(self._database, "build_cache", CachedLayer)
        self.committed = Table(self._database, "committed", Committed)
        self.published = Table(self._database, "published", Published)
        self._tables = (
            self.sandboxes,
            self.templates,
            self.saved,
            self.snapshots,
            self.layers,
            self.memory,
            self.builds,
            self.build_cache,
            self.committed,
            self.published,
        )
        self._reserve()

    def _reserve(self) -> None:
        """Let the files take now what later changes need, so that sandboxes can be deleted when the disk is full."""
        try:
            with self.transaction():
                self._database.execute("CREATE TABLE IF NOT EXISTS reserve (filler BLOB)")
                self._database.execute("INSERT INTO reserve VALUES (zeroblob(?))", (RESERVE,))
                self._database.execute("DELETE FROM reserve")
            self._database.execute("PRAGMA wal_checkpoint(RESTART)")
        except CapacityError:
            pass  # full already: records can be written as long as there is room

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All writes inside become durable and visible together; an exception undoes them in both places.

        Raises CapacityError when the disk is full.
        """
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for table in self._tables:
                table.write_remembered()
            yield
            self._database.execute("COMMIT")
        except BaseException as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            for table in self._tables:
                table.rolled_back()
            if isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise CapacityError("No room left to write the node's database.", "Free disk space.") from error
            raise
        for table in self._tables:
            table.committed()

    def close(self) -> None:
        self._database.close()
