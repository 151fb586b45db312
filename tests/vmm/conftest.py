"""Real VMs for tests: the node's guest kernel with a tiny user space of our own, in namespaces of our own.

One VM is booted per session and captured; every other VM is restored from that.
"""

# ruff: noqa: ASYNC221 - nothing else runs on a test's event loop

import asyncio
import ctypes
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from aenv.guest.commands import GuestArtifactError
from aenv.guest.initramfs import guest_entries, write_cpio
from aenv.guest.kernel import ensure_kernel
from aenv.guest.modules import Module
from aenv.storage import lsmt, qcow2
from aenv.vmm.choice import make_qemu
from aenv.vmm.jail import Jailer
from aenv.vmm.jail_settings import JailSettings
from aenv.vmm.probe import find_qemu
from aenv.vmm.protocol import Accelerator, MachineShape, MemoryImage, NetworkAttachment
from aenv.vmm.qemu import QemuVm
from aenv.vmm.qemu_vmm import QemuVmm

GUEST = "169.254.77.2"
PORT = 7000
SHAPE = MachineShape(vcpus=1, memory_mib=256)
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class GuestFiles:
    kernel: Path
    kernel_sha256: str
    initramfs: Path


@dataclass(frozen=True)
class Frozen:
    """A snapshot: what ``Vm.restore`` takes, and the facts that must survive."""

    memory: MemoryImage
    state: Path
    disk: Path
    count: int
    memory_sum: str
    disk_sum: str


class Namespaces:
    """Network namespaces with one tap each; every guest has the same address in its own."""

    def __init__(self) -> None:
        self._made: list[str] = []
        self._free: list[str] = []

    def take(self) -> NetworkAttachment:
        if not self._free:
            name = f"aenvtest{os.getpid()}x{len(self._made)}"
            self._made.append(name)
            inside = ["ip", "netns", "exec", name, "ip"]
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run([*inside, "tuntap", "add", "dev", "tap0", "mode", "tap", "vnet_hdr"], check=True)
            subprocess.run([*inside, "addr", "add", "169.254.77.1/30", "dev", "tap0"], check=True)
            subprocess.run([*inside, "link", "set", "tap0", "up"], check=True)
            self._free.append(name)
        return NetworkAttachment(self._free.pop(), "tap0", "02:00:00:00:00:01")

    def give_back(self, network: NetworkAttachment) -> None:
        self._free.append(network.netns)

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False)


_asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ask")


def ask_now(network: NetworkAttachment, command: str, timeout: float) -> str:
    """One command to the guest; retries to connect until ``timeout``. Only for the ``_asking`` threads."""
    with open(f"/run/netns/{network.netns}") as namespace:
        assert _libc.setns(namespace.fileno(), 0x40000000) == 0
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((GUEST, PORT), timeout=1) as link:
                link.settimeout(timeout)
                link.sendall(command.encode() + b"\n")
                return link.makefile().readline().strip()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


async def ask(vm: QemuVm, command: str, timeout: float = 60) -> str:
    return await asyncio.get_running_loop().run_in_executor(_asking, ask_now, vm.network, command, timeout)


@pytest.fixture(scope="session")
def root_only() -> None:
    if os.geteuid() != 0 or not shutil.which("qemu-system-x86_64") or not shutil.which("ip"):
        pytest.skip("needs root, QEMU and iproute2")


@pytest.fixture(scope="session")
async def guest_files(root_only: None, tmp_path_factory: pytest.TempPathFactory) -> GuestFiles:
    artifacts = Path(os.environ.get("AENV_TEST_ARTIFACTS", "/var/lib/aenv-dev/artifacts"))
    try:
        kernel = await ensure_kernel(artifacts, None, progress=print)
    except (GuestArtifactError, OSError) as error:
        pytest.skip(f"no guest kernel: {error}")
    directory = tmp_path_factory.mktemp("guest")
    source = Path(__file__).with_name("guest") / "init.c"
    init = directory / "init"
    built = subprocess.run(["gcc", "-O2", "-static", "-s", "-o", init, source], check=False)
    if built.returncode:
        pytest.skip("needs a C compiler")
    modules: list[Module] = list(kernel.modules)
    archive = directory / "initramfs.cpio"
    archive.write_bytes(write_cpio(guest_entries(init.read_bytes(), modules)))
    return GuestFiles(kernel.vmlinux, kernel.sha256, archive)


@pytest.fixture(scope="session")
def namespaces(root_only: None) -> Iterator[Namespaces]:
    made = Namespaces()
    yield made
    made.close()


@pytest.fixture(scope="session")
async def vmm(guest_files: GuestFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QemuVmm]:
    home, runtime = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("run")
    qemu = await find_qemu("qemu-system-x86_64")
    confined = os.environ.get("AENV_TEST_JAIL") != "off"
    jail = JailSettings(mode="on" if confined else "off", node=f"vmmtest{os.getpid()}")
    accelerator = Accelerator(os.environ.get("AENV_TEST_ACCELERATOR", "tcg"))
    made = make_qemu(
        home, runtime, qemu, accelerator, guest_files.kernel, guest_files.initramfs, guest_files.kernel_sha256,
        Jailer(jail, home, runtime), [tmp_path_factory.getbasetemp()],
    )  # fmt: skip
    yield made
    for vm_id in made.known():
        if vm := await made.adopt(vm_id):
            await vm.kill()
    made.close()


@pytest.fixture(scope="session")
async def frozen(
    vmm: QemuVmm, namespaces: Namespaces, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Frozen]:
    directory = tmp_path_factory.mktemp("frozen")
    base = directory / "base.raw"
    with base.open("wb") as file:
        file.truncate(64 << 20)
    disk = directory / "disk.qcow2"
    qcow2.create_overlay(disk, base, form="raw")
    network = namespaces.take()
    vm = await vmm.boot("first", SHAPE, network, disk, {"aenv.test": "yes"})
    assert (await ask(vm, "ping", 120)) == "pong"
    assert "aenv.test=yes" in await ask(vm, "cmdline")
    memory_sum, disk_sum = await ask(vm, "fill 8 7"), await ask(vm, "dwrite 3 5")
    await vm.stop()
    stats = await vm.capture(directory / "state", directory / "delta")
    assert 0 < stats.memory_bytes < SHAPE.memory_mib << 20 and stats.state_bytes > 0
    await vm.rebase_disk(directory / "after.qcow2")
    await vm.cont()
    count = int(await ask(vm, "count"))
    assert await ask(vm, "sum") == memory_sum, "the source runs on, unchanged"
    await vm.kill()
    namespaces.give_back(network)
    await asyncio.to_thread(lsmt.compose, None, directory / "delta", directory / "memory", False)
    yield Frozen(MemoryImage(directory / "memory", None), directory / "state", disk, count, memory_sum, disk_sum)


class Children:
    """Restores VMs and takes them all down again at the end of a test."""

    def __init__(self, vmm: QemuVmm, namespaces: Namespaces, directory: Path) -> None:
        self._vmm, self._namespaces, self._directory = vmm, namespaces, directory
        self._made: list[QemuVm] = []

    async def spawn(self, name: str, shape: MachineShape = SHAPE) -> QemuVm:
        vm = await self._vmm.spawn(f"{self._directory.name}-{name}", shape, self._namespaces.take())
        self._made.append(vm)
        return vm

    async def restore(self, name: str, frozen: Frozen) -> QemuVm:
        vm = await self.spawn(name)
        overlay = self._directory / f"{name}.qcow2"
        qcow2.create_overlay(overlay, frozen.disk)
        await vm.restore(frozen.memory, frozen.state, overlay)
        return vm

    async def close(self) -> None:
        for vm in self._made:
            await vm.kill()
            self._namespaces.give_back(vm.network)


@pytest.fixture
async def children(vmm: QemuVmm, namespaces: Namespaces, tmp_path: Path) -> AsyncIterator[Children]:
    made = Children(vmm, namespaces, tmp_path)
    yield made
    await made.close()
