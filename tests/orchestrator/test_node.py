"""What a node does when something fails where nothing should: no place is lost, nobody waits for ever."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from aenv.errors import CapacityError, SandboxUnreachableError
from aenv.orchestrator.capacity import Capacity
from aenv.orchestrator.model import SandboxSpec, SandboxState
from aenv.orchestrator.node import Node
from aenv.orchestrator.saved import SavedSnapshots
from aenv.orchestrator.store import Store
from aenv.server import load_settings
from tests.orchestrator.samples import layer, memory, sandbox, snapshot, template


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "db")
    with made.transaction():
        made.layers.put(layer("l0"))
        made.memory.put(memory("m1"))
        made.snapshots.put(snapshot())
        made.templates.put(template())
    yield made
    made.close()


def node(store: Store, home: Path) -> tuple[Node, Capacity]:
    settings = load_settings(home=home, reserve_disk=0, reserve_memory=0)
    capacity = Capacity(settings)
    machines: Any = SimpleNamespace(get=lambda _: None)
    saved = SavedSnapshots(store)

    async def origin(name: str) -> object:
        return saved.origin(name)

    imports: Any = SimpleNamespace(origin=origin, others=list)
    none = cast("Any", None)
    return Node(settings, store, machines, none, capacity, imports, none), capacity


async def test_a_sandbox_that_cannot_be_recorded_gives_its_place_back(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, capacity = node(store, tmp_path)

    def refuse(_: object) -> None:
        raise CapacityError("full")

    monkeypatch.setattr(store.sandboxes, "put", refuse)
    with pytest.raises(CapacityError):
        await made.create(SandboxSpec(template="base", timeout=60))
    assert capacity.held == 0
    assert not store.layers.rows.keys() - {"l0"}


@pytest.mark.parametrize("state", [SandboxState.RUNNING, SandboxState.PAUSING, SandboxState.RESUMING])
async def test_traffic_does_not_wait_for_a_transition_that_nobody_makes(
    store: Store, tmp_path: Path, state: SandboxState
) -> None:
    """It would wait without ever giving way, and the whole node with it."""
    made, _ = node(store, tmp_path)
    with store.transaction():
        store.sandboxes.put(sandbox(state=state))
    with pytest.raises(SandboxUnreachableError):
        await made.upstream("i1")
