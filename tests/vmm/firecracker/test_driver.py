"""The driver against a program that stands in for Firecracker (``fake.py``): no KVM, and the real system calls."""

# ruff: noqa: ASYNC240 - nothing else runs on a test's event loop

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aenv.errors import CapacityError, VmmError
from aenv.storage import lsmt
from aenv.vmm.disk.protocol import DiskExport
from aenv.vmm.firecracker import requests
from aenv.vmm.firecracker import vmm as module
from aenv.vmm.firecracker.api import FirecrackerApiError
from aenv.vmm.firecracker.binary import find_firecracker
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.firecracker.vm import FirecrackerVm
from aenv.vmm.firecracker.vmm import FirecrackerVmm, fingerprint
from aenv.vmm.jail import Jailer
from aenv.vmm.jail_settings import JailSettings
from aenv.vmm.protocol import Accelerator, MachineShape, MemoryImage, NetworkAttachment
from tests.vmm.firecracker import fake

SHAPE = MachineShape(1, 16)
SIZE = 16 << 20
PAGE = 4096
NETNS = f"aenvtest{os.getpid()}fc"
NETWORK = NetworkAttachment(NETNS, "tap0", "02:00:00:00:00:01")


class FakeExport:
    """Serves the file itself."""

    def __init__(self, owner: "FakeExporter", name: str, disk: Path) -> None:
        self._owner, self._name, self._disk = owner, name, disk
        self.path = disk
        self.calls: list[tuple[object, ...]] = []

    async def disk(self) -> Path:
        return self._disk

    async def rebase(self, overlay: Path) -> None:
        self.calls.append(("rebase", overlay))

    async def replace_backing(self, backing: Path) -> None:
        self.calls.append(("replace_backing", backing))

    async def grow(self, size: int) -> None:
        self.calls.append(("grow", size))
        self.path = self._disk.with_suffix(".grown")
        self.path.write_bytes(bytes(512))

    async def close(self) -> None:
        self._owner.present.pop(self._name, None)


class FakeExporter:
    def __init__(self) -> None:
        self.present: dict[str, FakeExport] = {}

    async def export(self, name: str, disk: Path, directory: Path) -> DiskExport:
        assert directory.is_dir()
        self.present[name] = FakeExport(self, name, disk)
        return self.present[name]

    async def adopt(self, name: str, directory: Path) -> DiskExport | None:
        return self.present.get(name)


@pytest.fixture(scope="module")
def netns() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    subprocess.run(["ip", "netns", "add", NETNS], check=True)
    yield
    subprocess.run(["ip", "netns", "del", NETNS], check=True)


@pytest.fixture
def exporter() -> FakeExporter:
    return FakeExporter()


@pytest.fixture
async def vmm(netns: None, tmp_path: Path, exporter: FakeExporter) -> AsyncIterator[FirecrackerVmm]:
    program = tmp_path / "firecracker"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {fake.__file__} "$@"\n')
    program.chmod(0o755)
    binary = await find_firecracker(str(program))
    home, runtime = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    runtime.mkdir()
    (tmp_path / "kernel").write_bytes(b"kernel")
    (tmp_path / "initramfs").write_bytes(b"initramfs")
    facts = fingerprint(binary, Accelerator.KVM, "sha")
    jailer = Jailer(JailSettings(mode="off", node="fcdriver"), home, runtime)
    made = FirecrackerVmm(
        home,
        runtime,
        binary,
        facts,
        tmp_path / "kernel",
        tmp_path / "initramfs",
        exporter,
        FirecrackerOptions(),
        jailer,
    )
    yield made
    for vm_id in made.known():
        if vm := await made.adopt(vm_id):
            await vm.kill()
    made.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A memory file whose second MiB is data."""
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.truncate(SIZE)
        file.seek(1 << 20)
        file.write(b"b" * (1 << 20))
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (path := tmp_path / "disk").write_bytes(bytes(512))
    return path


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (path := tmp_path / "state").write_bytes(fake.STATE)
    return path


def delta_of(path: Path, pages: dict[int, bytes]) -> Path:
    """A layer with these pages."""
    with lsmt.LayerWriter(path, SIZE) as writer:
        for offset, content in pages.items():
            writer.add(np.array([offset], np.uint64), np.array([PAGE], np.uint64), content.ljust(PAGE, b"\0"))
        writer.commit()
    return path


def journal(vm: FirecrackerVm) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (vm.directory / "journal").read_text().splitlines()]


def paths(vm: FirecrackerVm) -> list[str]:
    return [entry["path"] for entry in journal(vm) if "path" in entry]


async def test_a_boot_starts_a_guest_whose_memory_is_found(
    vmm: FirecrackerVmm, disk: Path, tmp_path: Path, exporter: FakeExporter
) -> None:
    vm = await vmm.boot("a", SHAPE, NETWORK, disk, {"aenv.root": "/dev/vda"})
    assert vm.alive and vm.console.read_text() == "serial console\n"
    assert paths(vm)[-1] == "/actions"
    assert await vm.disk() == disk
    await vm.stop()
    stats = await vm.capture(tmp_path / "s", tmp_path / "d")
    assert (tmp_path / "s").read_bytes() == fake.STATE
    assert stats.state_bytes == len(fake.STATE) and stats.stall > 0 and stats.hot is not None
    with lsmt.Layer(tmp_path / "d") as layer:
        line = layer.read(fake.COMMAND_LINE, 200)
        assert b"aenv.root=/dev/vda" in line
    assert 0 < stats.memory_bytes < 1 << 20
    await vm.kill()
    assert not vm.alive and not vmm.known() and not exporter.present


async def test_a_delta_is_in_memory_before_any_device_is_there(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path
) -> None:
    at, size = fake.WATCHED
    delta = delta_of(tmp_path / "delta", {at - at % PAGE: b"new words and more", 1 << 20: b"over data"})
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    await vm.restore(MemoryImage(base, delta), state, disk)
    opened = [entry for entry in journal(vm) if "opened" in entry]
    assert [bytes.fromhex(entry["opened"]) for entry in opened] == [b"new words and more"[:size]]
    assert paths(vm) == [
        "/serial", "/snapshot/load",
        f"/drives/{requests.ROOT_DRIVE}", f"/network-interfaces/{requests.NETWORK_CARD}", "/vm",
    ]  # fmt: skip
    await vm.stop()
    await vm.capture(tmp_path / "s", tmp_path / "d")
    with lsmt.Layer(tmp_path / "d") as layer:
        assert layer.read(at, 9) == b"new words"
        assert layer.read(1 << 20, 9) == b"over data"


async def test_the_server_reads_consoles_while_a_delta_is_put_into_memory(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Firecracker is held meanwhile by its open of the console. The event loop must not be."""
    delta = delta_of(tmp_path / "delta", {1 << 20: b"over data"})
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    loop, fill, read = asyncio.get_running_loop(), FirecrackerVm._fill, list[bytes]()

    async def look() -> None:
        read.append(vm.console.read_bytes())

    def fill_and_look(self: FirecrackerVm, image: MemoryImage) -> None:
        asyncio.run_coroutine_threadsafe(look(), loop).result()
        fill(self, image)

    monkeypatch.setattr(FirecrackerVm, "_fill", fill_and_look)
    await vm.restore(MemoryImage(base, delta), state, disk)
    assert len(read) == 1


async def test_a_capture_is_of_the_moment_of_its_device_state(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path
) -> None:
    """What a device writes as soon as Firecracker is done with the request belongs to the next capture."""
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    await vm.restore(MemoryImage(base, None), state, disk)
    await vm.stop()
    first = await vm.capture(tmp_path / "s1", tmp_path / "d1")
    with lsmt.Layer(tmp_path / "d1") as layer:
        assert len(layer.extents) == 0
    second = await vm.capture(tmp_path / "s2", tmp_path / "d2")
    with lsmt.Layer(tmp_path / "d2") as layer:
        assert layer.read(fake.LATER_AT, len(fake.LATER)) == fake.LATER
    assert first.memory_bytes == 0 and second.memory_bytes == PAGE
    await vm.cont()


async def test_a_capture_of_a_running_vm_is_refused(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path
) -> None:
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    with pytest.raises(VmmError, match="before starting"):
        await vm.stop()
    await vm.restore(MemoryImage(base, None), state, disk)
    with pytest.raises(FirecrackerApiError, match="not paused"):
        await vm.capture(tmp_path / "s", tmp_path / "d")
    assert not (tmp_path / "s").exists() and not (tmp_path / "d").exists()
    await vm.stop()
    await vm.capture(tmp_path / "s", tmp_path / "d")


async def test_a_full_disk_leaves_the_vm_as_it_was(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    await vm.restore(MemoryImage(base, None), state, disk)
    await vm.stop()

    def full(*_: object) -> None:
        raise CapacityError("No room left.")

    with monkeypatch.context() as patch:
        patch.setattr(lsmt.LayerWriter, "commit", full)
        with pytest.raises(CapacityError):
            await vm.capture(tmp_path / "s", tmp_path / "d")
    assert not (tmp_path / "s").exists()
    await vm.capture(tmp_path / "s", tmp_path / "d")
    await vm.cont()
    assert vm.alive


async def test_what_a_balloon_took_hides_the_base(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path
) -> None:
    """Its pages are zero and not there; where the base has data, the delta says so."""
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    await vm.restore(MemoryImage(base, None), state, disk)
    await vm.stop()
    start = vm._record.pieces[0][0]
    took = (1 << 20) + 4 * PAGE, 8 * PAGE
    (vm.directory / "balloon").write_text(json.dumps([start + took[0], took[1]]))
    await vm._api.send(replace(requests.describe(), path="/balloon/take"))
    stats = await vm.capture(tmp_path / "s", tmp_path / "d")
    with lsmt.Layer(tmp_path / "d") as layer:
        whole = base.read_bytes()
        content = layer.read(0, SIZE, whole)
        zeroed = layer.extents.offset[layer.extents.zeroed], layer.extents.length[layer.extents.zeroed]
    assert content[took[0] : sum(took)] == bytes(took[1])
    assert content[: took[0]].count(b"b") + content[sum(took) :].count(b"b") == (1 << 20) - took[1]
    assert [words.tolist() for words in zeroed] == [[took[0]], [took[1]]]
    assert stats.memory_bytes == 0


async def test_firecrackers_refusal_of_a_snapshot_is_told(
    vmm: FirecrackerVmm, base: Path, disk: Path, tmp_path: Path
) -> None:
    (torn := tmp_path / "torn").write_bytes(b"torn")
    delta = delta_of(tmp_path / "delta", {0: b"x"})
    for number, image in enumerate((MemoryImage(base, None), MemoryImage(base, delta))):
        vm = await vmm.spawn(f"v{number}", SHAPE, NETWORK)
        with pytest.raises(FirecrackerApiError, match="CRC64"):
            await vm.restore(image, torn, disk)
        with pytest.raises(VmmError, match="already"):
            await vm.restore(image, torn, disk)
        await vm.kill()


async def test_a_delta_of_another_size_is_refused(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path
) -> None:
    os.truncate(base, SIZE // 2)
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    with pytest.raises(VmmError, match=r"maps \d+ of 16777216 bytes|as guest memory"):
        await vm.restore(MemoryImage(base, delta_of(tmp_path / "delta", {0: b"x"})), state, disk)


async def test_a_larger_disk_is_opened_anew(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, exporter: FakeExporter
) -> None:
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    with pytest.raises(VmmError, match="no root disk"):
        await vm.disk()
    await vm.restore(MemoryImage(base, None), state, disk)
    await vm.grow_disk(1 << 20)
    assert (vm.directory / requests.DISK).resolve() == disk.with_suffix(".grown")
    paused, opened, resumed = journal(vm)[-3:]
    assert (paused["body"], resumed["body"]) == ({"state": "Paused"}, {"state": "Resumed"})
    assert opened["body"] == {"drive_id": "root", "path_on_host": requests.DISK}
    await vm.stop()
    await vm.grow_disk(2 << 20)
    assert journal(vm)[-1]["body"] == opened["body"], "one that was stopped stays so"
    await vm.rebase_disk(Path("/x"))
    await vm.replace_backing(Path("/y"))
    assert exporter.present["a"].calls == [
        ("grow", 1 << 20), ("grow", 2 << 20), ("rebase", Path("/x")), ("replace_backing", Path("/y")),
    ]  # fmt: skip


async def test_a_process_and_its_guest_are_found_again(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path
) -> None:
    waiting = await vmm.spawn("w", SHAPE, NETWORK)
    running = await vmm.spawn("r", MachineShape(1, 16), NETWORK)
    await running.restore(MemoryImage(base, None), state, disk)
    waiting.detach()
    running.detach()
    assert vmm.known() == ["r", "w"]
    found, spare = await vmm.adopt("r"), await vmm.adopt("w")
    assert found is not None and spare is not None
    assert (found.pid, found.shape, found.network) == (running.pid, running.shape, running.network)
    await found.stop()
    await found.capture(tmp_path / "s", tmp_path / "d")
    await spare.restore(MemoryImage(base, tmp_path / "d"), tmp_path / "s", disk)
    await found.kill()
    assert await vmm.adopt("r") is None
    assert vmm.known() == ["w"]


async def test_a_vm_whose_disk_is_gone_is_ended(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, exporter: FakeExporter
) -> None:
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    await vm.restore(MemoryImage(base, None), state, disk)
    vm.detach()
    exporter.present.clear()
    assert await vmm.adopt("a") is None
    await vm.wait()
    assert not vmm.known()


async def test_a_process_that_hangs_is_ended(vmm: FirecrackerVmm, monkeypatch: pytest.MonkeyPatch) -> None:
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    vm.detach()
    (vm.directory / "hangs").touch()
    monkeypatch.setattr(module, "ADOPT_TIMEOUT", 0.1)
    assert await vmm.adopt("a") is None
    await vm.wait()
    assert not vmm.known()


async def test_a_process_that_was_never_noted_is_swept(vmm: FirecrackerVmm) -> None:
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    vm.detach()
    (vm.directory / "process.json").unlink()
    assert await vmm.adopt("a") is None
    await vm.wait()
    assert not vmm.known()


async def test_a_firecracker_that_ends_at_once_is_quoted(vmm: FirecrackerVmm, tmp_path: Path) -> None:
    (tmp_path / "run" / "ends").touch()
    with pytest.raises(VmmError, match=r"exit status 3.*it ends at once"):
        await vmm.spawn("a", SHAPE, NETWORK)
    assert not vmm.known()


async def test_ids_are_taken_once_and_paths_are_not_too_long(vmm: FirecrackerVmm) -> None:
    await vmm.spawn("a", SHAPE, NETWORK)
    with pytest.raises(VmmError, match="exists already"):
        await vmm.spawn("a", SHAPE, NETWORK)
    assert vmm.known() == ["a"]
    with pytest.raises(VmmError, match="too long"):
        await vmm.spawn("b" * 100, SHAPE, NETWORK)


async def test_a_command_line_that_would_not_arrive_starts_nothing(vmm: FirecrackerVmm, disk: Path) -> None:
    with pytest.raises(ValueError, match="parameter"):
        await vmm.boot("a", SHAPE, NETWORK, disk, {"a": "b c"})
    assert not vmm.known()


async def test_a_boot_without_its_kernel_leaves_nothing(
    vmm: FirecrackerVmm, disk: Path, tmp_path: Path, exporter: FakeExporter
) -> None:
    (tmp_path / "kernel").unlink()
    with pytest.raises(FirecrackerApiError, match=r"/actions .*No such file"):
        await vmm.boot("a", SHAPE, NETWORK, disk, {})
    assert not vmm.known() and not exporter.present


async def test_a_cancelled_capture_can_be_made_again(
    vmm: FirecrackerVmm, base: Path, state: Path, disk: Path, tmp_path: Path
) -> None:
    vm = await vmm.spawn("a", SHAPE, NETWORK)
    await vm.restore(MemoryImage(base, None), state, disk)
    await vm.stop()
    for _ in range(5):
        task = asyncio.create_task(vm.capture(tmp_path / "s", tmp_path / "d"))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await vm.capture(tmp_path / "s", tmp_path / "d")
    assert (tmp_path / "s").read_bytes() == fake.STATE
