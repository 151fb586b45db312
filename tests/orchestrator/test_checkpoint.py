"""Captures that fail half-way: the VM runs on, the guest's disk is not left frozen, and no file stays."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from aenv.errors import CapacityError, GuestUnresponsiveError, VmmError
from aenv.orchestrator import checkpoint
from aenv.orchestrator.checkpoint import Checkpoints
from aenv.orchestrator.machines import Machine, Machines
from aenv.orchestrator.store import Store
from aenv.storage.layout import Layout
from aenv.storage.lsmt import LayerWriter
from aenv.vmm.protocol import CaptureStats
from tests.orchestrator.samples import FINGERPRINT, layer, memory, sandbox

SIZE = 1 << 20


class Steps:
    """A VM and the machines around it; ``done`` is what was asked of them, ``failing`` what they refuse."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.failing: set[str] = set()
        self.id = "vm"
        self.machine: object = None

    def _step(self, name: str, error: type[Exception] = VmmError) -> None:
        self.done.append(name)
        if name in self.failing:
            raise error(f"{name} failed")

    async def stop(self) -> None:
        self._step("stop")

    async def cont(self) -> None:
        self._step("cont")

    async def capture(self, state: Path, delta: Path) -> CaptureStats:
        self._step("capture")
        state.write_bytes(b"state")  # noqa: ASYNC240
        page = np.ones(4096, dtype=np.uint8)
        with LayerWriter(delta, SIZE) as writer:
            at, length = np.array([8192], dtype=np.uint64), np.array([4096], dtype=np.uint64)
            writer.add(at, length, page.data)
            writer.commit()
        return CaptureStats(4096, 0, 5, 0.0)

    async def rebase_disk(self, overlay: Path) -> None:
        self._step("rebase")
        overlay.touch()  # noqa: ASYNC240

    async def freeze(self, *_: object) -> None:
        self._step("freeze", GuestUnresponsiveError)

    async def thaw(self, *_: object) -> None:
        self._step("thaw", GuestUnresponsiveError)

    async def introduce(self, *_: object) -> None:
        pass

    def get(self, _: str) -> object:
        return self.machine

    def launching(self, _: str) -> bool:
        return False


class Setup:
    def __init__(self, home: Path) -> None:
        self.layout = Layout(home, home / "run")
        self.layout.create()
        self.store = Store(self.layout.database)
        self.steps = Steps()
        self.sandbox = sandbox(memory_base="m1", disk="l1", vm_id="vm")
        with self.store.transaction():
            self.store.layers.put(layer("l0"))
            self.store.layers.put(layer("l1", "l0"))
            self.store.memory.put(memory("m1"))
            self.store.sandboxes.put(self.sandbox)
        machine: Any = SimpleNamespace(sandbox_id=self.sandbox.id, vm=self.steps, lease=None)
        self.machine = self.steps.machine = cast("Machine", machine)
        self.checkpoints = Checkpoints(self.layout, self.store, cast("Machines", self.steps), FINGERPRINT)

    def snapshots_on_disk(self) -> list[Path]:
        return list((self.layout.home / "snapshots").iterdir())


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    yield made
    made.store.close()


async def test_a_pause_with_memory_asks_nothing_of_the_guest(setup: Setup) -> None:
    point = await setup.checkpoints.pause_point(setup.sandbox, setup.machine, memory=True)
    assert setup.steps.done == ["stop", "capture"]
    assert (point.snapshot.memory_base, point.snapshot.delta_bytes, point.base) == ("m1", 4096, None)
    assert point.snapshot.owner == setup.sandbox.id


async def test_a_pause_without_memory_settles_the_disk_first(setup: Setup) -> None:
    point = await setup.checkpoints.pause_point(setup.sandbox, setup.machine, memory=False)
    assert setup.steps.done == ["freeze", "stop"]
    assert (point.snapshot.has_memory, point.snapshot.disk) == (False, "l1")


async def test_the_first_capture_after_a_boot_makes_a_memory_base(setup: Setup) -> None:
    booted = replace(setup.sandbox, memory_base=None)
    point = await setup.checkpoints.pause_point(booted, setup.machine, memory=True)
    assert point.base is not None
    assert (point.snapshot.memory_base, point.snapshot.delta_bytes) == (point.base.id, 0)
    content = setup.layout.memory(point.base.id).read_bytes()
    assert content == bytes(8192) + b"\1" * 4096 + bytes(SIZE - 12288)
    assert not setup.layout.delta(point.snapshot.id).exists()
    with setup.store.transaction():
        point.record(setup.store)
    assert setup.store.memory[point.base.id] == point.base


@pytest.mark.parametrize(
    ("memory_kept", "failing"), [(True, "stop"), (True, "capture"), (False, "freeze"), (False, "stop")]
)
async def test_a_failed_pause_leaves_a_running_guest_and_no_file(
    setup: Setup, memory_kept: bool, failing: str
) -> None:
    setup.steps.failing = {failing}
    with pytest.raises((VmmError, GuestUnresponsiveError), match=failing):
        await setup.checkpoints.pause_point(setup.sandbox, setup.machine, memory=memory_kept)
    assert setup.steps.done[-2 if not memory_kept else -1 :] == (["cont"] if memory_kept else ["cont", "thaw"])
    assert setup.snapshots_on_disk() == []


@pytest.mark.parametrize("memory_kept", [True, False])
async def test_a_fork_point_puts_the_source_on_a_recorded_layer(setup: Setup, memory_kept: bool) -> None:
    point = await setup.checkpoints.fork_point(setup.sandbox, setup.machine, memory=memory_kept)
    expected = ["stop", "capture", "rebase", "cont"] if memory_kept else ["freeze", "stop", "rebase", "cont", "thaw"]
    assert setup.steps.done == expected
    disk = setup.store.sandboxes[setup.sandbox.id].disk
    assert disk is not None
    assert setup.store.layers[disk].parent == point.snapshot.disk == "l1"
    assert point.snapshot.owner is None
    assert point.snapshot.id not in setup.store.snapshots.rows


async def test_a_fork_point_that_cannot_swap_the_disk_changes_nothing(setup: Setup) -> None:
    setup.steps.failing = {"rebase"}
    with pytest.raises(VmmError, match="rebase"):
        await setup.checkpoints.fork_point(setup.sandbox, setup.machine)
    assert setup.steps.done[-1] == "cont"
    assert setup.store.sandboxes[setup.sandbox.id] == setup.sandbox
    assert set(setup.store.layers.rows) == {"l0", "l1"}
    assert setup.snapshots_on_disk() == []


async def test_what_fails_after_the_swap_does_not_forget_it(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The VM writes to the new layer: were that not on record, the next pause would name the wrong disk."""
    monkeypatch.setattr(checkpoint, "THAW_RETRY", 0.01)
    setup.steps.failing = {"thaw"}
    with pytest.raises(GuestUnresponsiveError):
        await setup.checkpoints.fork_point(setup.sandbox, setup.machine, memory=False)
    assert setup.store.sandboxes[setup.sandbox.id].disk != "l1"
    assert setup.snapshots_on_disk() == []
    # The guest is asked again until it answers: until then whatever writes in it hangs.
    setup.steps.failing = set()
    await setup.checkpoints.files.background.settle()
    assert setup.steps.done.count("thaw") == 2


def _refuse(_: object) -> None:
    raise CapacityError("full")


@pytest.mark.parametrize("memory_base", ["m1", None])
async def test_a_pause_that_cannot_be_recorded_lets_the_vm_run_on(setup: Setup, memory_base: str | None) -> None:
    source = replace(setup.sandbox, memory_base=memory_base)
    with pytest.raises(CapacityError):
        await setup.checkpoints.pause_point(source, setup.machine, memory=True, commit=_refuse)
    assert setup.steps.done == ["stop", "capture", "cont"]
    assert setup.snapshots_on_disk() == []
    assert list((setup.layout.home / "memory").iterdir()) == []


async def test_a_swapped_disk_is_remembered_when_it_cannot_be_recorded(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(setup.store.layers, "put", _refuse)
        point = await setup.checkpoints.fork_point(setup.sandbox, setup.machine)
    assert setup.steps.done[-1] == "cont"
    disk = setup.store.sandboxes[setup.sandbox.id].disk
    assert disk is not None
    assert disk != "l1"
    with setup.store.transaction():
        point.record(setup.store)
    setup.store.close()
    again = Store(setup.layout.database)
    assert (again.sandboxes[setup.sandbox.id].disk, again.layers[disk].parent) == (disk, "l1")
