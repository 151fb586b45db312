"""SQLite files of a node: readable by root alone, in autocommit mode, with a write-ahead log and a schema version."""

import os
import sqlite3
from pathlib import Path

from aenv.errors import CorruptFileError


def open_private(path: Path) -> sqlite3.Connection:
    """The database at ``path``, made with mode 0600 if it is not there."""
    # SQLite gives its -wal and -shm files the mode of the database itself.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


def check_version(database: sqlite3.Connection, name: str, version: int, advice: str) -> None:
    """Raise CorruptFileError unless the database is new or has schema ``version``."""
    (found,) = database.execute("PRAGMA user_version").fetchone()
    if found not in (0, version):
        raise CorruptFileError(f"{name} has schema version {found}; this program knows {version}.", advice)


def make_tables(
    database: sqlite3.Connection,
    name: str,
    *,
    version: int,
    schema: str,
    synchronous: str,
    other_version: str,
    unreadable: str,
) -> None:
    """Make the tables of ``schema``. ``synchronous`` is SQLite's (FULL, NORMAL).

    Raises CorruptFileError with the advice ``other_version`` or ``unreadable``.
    """
    try:
        check_version(database, name, version, other_version)
        database.execute("PRAGMA journal_mode = WAL")
        database.execute(f"PRAGMA synchronous = {synchronous}")
        database.executescript(schema)
        database.execute(f"PRAGMA user_version = {version}")
    except sqlite3.DatabaseError as error:
        raise CorruptFileError(f"{name} cannot be read: {error}.", unreadable) from error
