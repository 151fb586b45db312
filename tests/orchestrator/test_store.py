import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aenv.errors import CapacityError, CorruptFileError
from aenv.orchestrator.model import SandboxState
from aenv.orchestrator.store import RESERVE, Store
from tests.orchestrator.samples import layer, memory, sandbox, snapshot


def test_records_survive_reopening(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    records = (sandbox(metadata={"ключ": "値"}), snapshot(), layer("l1", "l0"), memory("m1"))
    with store.transaction():
        store.sandboxes.put(records[0])
        store.snapshots.put(records[1])
        store.layers.put(records[2])
        store.memory.put(records[3])
    store.close()
    again = Store(tmp_path / "db")
    assert (again.sandboxes["i1"], again.snapshots["s1"], again.layers["l1"], again.memory["m1"]) == records


def test_a_failed_transaction_changes_neither_memory_nor_disk(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    with store.transaction():
        store.sandboxes.put(sandbox("keep"))
        store.sandboxes.put(sandbox("gone"))
    with pytest.raises(ZeroDivisionError), store.transaction():
        store.sandboxes.put(sandbox("keep", state=SandboxState.PAUSED))
        store.sandboxes.put(sandbox("new"))
        store.sandboxes.delete("gone")
        store.sandboxes.put(sandbox("keep", state=SandboxState.DELETING))
        raise ZeroDivisionError
    for reader in (store, Store(tmp_path / "db")):
        assert set(reader.sandboxes.rows) == {"keep", "gone"}
        assert reader.sandboxes["keep"].state is SandboxState.RUNNING


KILLED_INSIDE_A_TRANSACTION = """
import os, signal, sys
from pathlib import Path
from aenv.orchestrator.store import RESERVE, Store
from tests.orchestrator.samples import sandbox
store = Store(Path(sys.argv[1]))
with store.transaction():
    store.sandboxes.put(sandbox("committed"))
with store.transaction():
    store.sandboxes.put(sandbox("torn"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_not_committed_when_the_process_was_killed_is_not_there(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", KILLED_INSIDE_A_TRANSACTION, str(tmp_path / "db")], cwd=Path(__file__).parents[2]
    )
    assert process.returncode == -signal.SIGKILL
    assert set(Store(tmp_path / "db").sandboxes.rows) == {"committed"}


def test_writing_outside_a_transaction_is_a_bug(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        Store(tmp_path / "db").sandboxes.put(sandbox())


def test_a_foreign_record_is_a_clear_error(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store._database.execute("INSERT INTO sandboxes VALUES ('x', '{\"id\": 1}')")
    store.close()
    with pytest.raises(CorruptFileError, match="Record 'x' of table 'sandboxes'"):
        Store(tmp_path / "db")


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store._database.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(CorruptFileError, match="schema version 99"):
        Store(tmp_path / "db")


def _stop_growing(store: Store) -> None:
    """As on a full disk, SQLite answers SQLITE_FULL from now on when the database would have to grow."""
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_a_lack_of_capacity(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    _stop_growing(store)
    with pytest.raises(CapacityError), store.transaction():
        store.sandboxes.put(sandbox("small"))
        store.sandboxes.put(sandbox("big", metadata={"x": "y" * 2 * RESERVE}))
    for reader in (store, Store(tmp_path / "db")):
        assert not reader.sandboxes.rows


def test_sandboxes_can_be_deleted_when_the_disk_is_full(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    with store.transaction():
        store.sandboxes.put(sandbox("s"))
    _stop_growing(store)
    log = tmp_path / "db-wal"
    size = log.stat().st_size
    assert size >= RESERVE
    for state in (SandboxState.PAUSING, SandboxState.RUNNING, SandboxState.DELETING) * 50:
        with store.transaction():
            store.sandboxes.put(sandbox("s", state=state))
    with store.transaction():
        store.sandboxes.delete("s")
    assert log.stat().st_size == size, "what was reserved is written over"


def test_what_could_not_be_written_is_written_with_the_next_transaction(tmp_path: Path) -> None:
    store = Store(tmp_path / "db")
    store.sandboxes.remember(sandbox("s"))
    assert store.sandboxes["s"] == sandbox("s")
    assert not Store(tmp_path / "db").sandboxes.rows
    with pytest.raises(ZeroDivisionError), store.transaction():
        raise ZeroDivisionError
    with store.transaction():
        store.layers.put(layer("l1"))
    assert set(Store(tmp_path / "db").sandboxes.rows) == {"s"}
    with store.transaction():
        store.sandboxes.delete("s")
    assert not Store(tmp_path / "db").sandboxes.rows
