"""``$AENV_HOME/accounts.db``: SQLite (WAL), readable by its owner alone.

It is apart from the sandboxes' records because its life is another: it holds credentials and secrets, is written
rarely, and must not be lost with a node's sandboxes. Writes take some tens of microseconds, on the event loop;
``synchronous=FULL`` makes each of them durable before it is answered, as a key is shown only once.
"""

import sqlite3
import uuid
from pathlib import Path

from aenv.storage.database import make_tables, open_private

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS credentials (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, name TEXT NOT NULL, hash TEXT NOT NULL UNIQUE,
    mask TEXT NOT NULL, created_at TEXT NOT NULL, last_used TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS secrets (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, value TEXT NOT NULL, version INTEGER NOT NULL,
    metadata TEXT NOT NULL, created_at TEXT NOT NULL, updated_at TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS volumes (
    id TEXT PRIMARY KEY, name TEXT NOT NULL UNIQUE, token TEXT NOT NULL, created_at TEXT NOT NULL
) WITHOUT ROWID;
"""


def open_accounts(path: Path) -> sqlite3.Connection:
    """The database in autocommit mode, made if it is not there. Raises CorruptFileError for a foreign version."""
    return prepare(open_private(path), str(path))


def prepare(database: sqlite3.Connection, name: str = "memory") -> sqlite3.Connection:
    """Make the tables. Raises CorruptFileError when another version made them."""
    make_tables(
        database,
        name,
        version=SCHEMA_VERSION,
        schema=_SCHEMA,
        synchronous="FULL",
        other_version="Run the version of AgentENV that wrote it, or move the file away to start with no keys.",
        unreadable="Restore it, or move it away to start with no keys.",
    )
    database.execute("INSERT OR IGNORE INTO meta VALUES ('team_id', ?)", (str(uuid.uuid4()),))
    return database


def team_id(database: sqlite3.Connection) -> str:
    """The id of the one team of this node, made with the database."""
    (value,) = database.execute("SELECT value FROM meta WHERE name = 'team_id'").fetchone()
    return str(value)
