"""Real Firecracker VMs with the test guest of ``tests/vmm``: where KVM works, and with ``AENV_FIRECRACKER_BIN``.

One VM is booted per binary and session and captured; every other VM is restored from that.
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.storage import lsmt, qcow2
from aenv.vmm.disk.choice import ExportKind, choose_exporter
from aenv.vmm.firecracker.binary import FirecrackerBinary, find_firecracker
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.firecracker.probe import probe
from aenv.vmm.firecracker.vm import FirecrackerVm
from aenv.vmm.firecracker.vmm import FirecrackerVmm, fingerprint
from aenv.vmm.jail import Jailer
from aenv.vmm.jail_settings import JailSettings
from aenv.vmm.protocol import Accelerator, MachineShape, MemoryImage
from tests.vmm.conftest import GuestFiles, Namespaces, ask

SHAPE = MachineShape(vcpus=1, memory_mib=256)
BINARIES = [name for name in os.environ.get("AENV_FIRECRACKER_BIN", "").split(":") if name]
DISK = 64 << 20


@dataclass(frozen=True)
class Frozen:
    """A snapshot: what ``Vm.restore`` takes, and the facts that must survive."""

    memory: MemoryImage
    state: Path
    disk: Path
    count: int
    memory_sum: str
    disk_sum: str


@pytest.fixture(scope="session", params=BINARIES or [""], ids=lambda name: Path(name).name or "none")
async def firecracker(request: pytest.FixtureRequest, guest_files: GuestFiles) -> FirecrackerBinary:
    if not request.param:
        pytest.skip("AENV_FIRECRACKER_BIN names no Firecracker binary (several: separated by colons)")
    binary = await find_firecracker(request.param)
    verdict = await probe(binary, Accelerator.KVM, guest_files.kernel, guest_files.initramfs)
    if not verdict.works:
        pytest.skip(f"Firecracker cannot run here: {verdict.reason}")
    return binary


async def make(
    binary: FirecrackerBinary, guest_files: GuestFiles, directory: Path, options: FirecrackerOptions
) -> FirecrackerVmm:
    facts = fingerprint(binary, Accelerator.KVM, guest_files.kernel_sha256)
    home, runtime = directory / "home", directory / "run"
    home.mkdir()
    runtime.mkdir()
    mode = os.environ.get("AENV_TEST_JAIL", "on")
    jailer = Jailer(JailSettings(mode=mode, node="fctest"), home, runtime)  # type: ignore[arg-type]
    kernel, initramfs = guest_files.kernel, guest_files.initramfs
    exporter = await choose_exporter(ExportKind(os.environ.get("AENV_TEST_EXPORT", "auto")))
    return FirecrackerVmm(home, runtime, binary, facts, kernel, initramfs, exporter, options, jailer)


@pytest.fixture(scope="session")
async def fc(
    firecracker: FirecrackerBinary, guest_files: GuestFiles, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[FirecrackerVmm]:
    made = await make(firecracker, guest_files, tmp_path_factory.mktemp("fc"), FirecrackerOptions())
    yield made
    for vm_id in made.known():
        if vm := await made.adopt(vm_id):
            await vm.kill()
    made.close()


async def snapshot(
    fc: FirecrackerVmm, namespaces: Namespaces, directory: Path, shape: MachineShape = SHAPE
) -> Frozen:
    """Boot one, let it work, and capture it; it runs on, unchanged, and is ended."""
    base = directory / "base.raw"
    with base.open("wb") as file:
        file.truncate(DISK)
    disk = directory / "disk.qcow2"
    qcow2.create_overlay(disk, base, form="raw")
    network = namespaces.take()
    vm = await fc.boot(f"first{shape.memory_mib}", shape, network, disk, {"aenv.test": "yes"})
    try:
        assert (await say(vm, "ping", 120)) == "pong"
        assert "aenv.test=yes" in await say(vm, "cmdline")
        memory_sum, disk_sum = await say(vm, "fill 8 7"), await say(vm, "dwrite 3 5")
        await vm.stop()
        stats = await vm.capture(directory / "state", directory / "delta")
        assert 0 < stats.memory_bytes < shape.memory_mib << 20 and stats.state_bytes > 0
        await vm.rebase_disk(directory / "after.qcow2")
        await vm.cont()
        count = int(await say(vm, "count"))
        assert await say(vm, "sum") == memory_sum
    finally:
        await vm.kill()
        namespaces.give_back(network)
    await asyncio.to_thread(lsmt.compose, None, directory / "delta", directory / "memory", False)
    return Frozen(MemoryImage(directory / "memory", None), directory / "state", disk, count, memory_sum, disk_sum)


async def say(vm: FirecrackerVm, command: str, timeout: float = 60) -> str:
    return await ask(vm, command, timeout)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
async def frozen(fc: FirecrackerVmm, namespaces: Namespaces, tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    return await snapshot(fc, namespaces, tmp_path_factory.mktemp("frozen"))


class Children:
    """Restores VMs and takes them all down again at the end of a test."""

    def __init__(self, fc: FirecrackerVmm, namespaces: Namespaces, directory: Path) -> None:
        self._fc, self._namespaces, self._directory = fc, namespaces, directory
        self._made: list[FirecrackerVm] = []

    async def spawn(self, name: str, shape: MachineShape = SHAPE) -> FirecrackerVm:
        vm = await self._fc.spawn(f"{uuid.uuid4().hex[:8]}{name}", shape, self._namespaces.take())
        self._made.append(vm)
        return vm

    async def restore(self, name: str, frozen: Frozen, shape: MachineShape = SHAPE) -> FirecrackerVm:
        return await self.fill(await self.spawn(name, shape), name, frozen)

    async def fill(self, vm: FirecrackerVm, name: str, frozen: Frozen) -> FirecrackerVm:
        """Restore a process that was spawned before."""
        overlay = self._directory / f"{name}.qcow2"
        qcow2.create_overlay(overlay, frozen.disk)
        await vm.restore(frozen.memory, frozen.state, overlay)
        return vm

    async def close(self) -> None:
        for vm in self._made:
            try:
                await vm.kill()
            except VmmError as error:
                print(error)
            self._namespaces.give_back(vm.network)


@pytest.fixture
async def children(fc: FirecrackerVmm, namespaces: Namespaces, tmp_path: Path) -> AsyncIterator[Children]:
    made = Children(fc, namespaces, tmp_path)
    yield made
    await made.close()
