"""Figures of docs/internals/vmm.md: ``python -m tests.vmm.measure`` as root, with ``src`` on PYTHONPATH.

Medians of several rounds, against the same QMP commands sent by hand over a blocking socket.
"""

import asyncio
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from aenv.guest.initramfs import guest_entries, write_cpio
from aenv.guest.kernel import ensure_kernel
from aenv.storage import lsmt, qcow2
from aenv.vmm import qemu_command
from aenv.vmm.choice import make_qemu
from aenv.vmm.jail import Jailer
from aenv.vmm.jail_settings import JailSettings
from aenv.vmm.probe import find_qemu
from aenv.vmm.protocol import Accelerator, MachineShape, MemoryImage, NetworkAttachment
from aenv.vmm.qemu import QemuVm
from aenv.vmm.qemu_vmm import QemuVmm
from tests.vmm.conftest import Namespaces, ask

# ruff: noqa: ASYNC221
ROUNDS = 7


async def timed(call: Awaitable[Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = await call
    return (time.perf_counter() - began) * 1e3, result


def show(name: str, values: list[float]) -> None:
    low, high = min(values), max(values)
    print(f"{name:46} median {statistics.median(values):8.1f} ms   ({low:.1f} to {high:.1f})", flush=True)


def cpu_seconds(pid: int) -> float:
    """User and system time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def private_kib(pid: int) -> dict[str, int]:
    """Anonymous memory by place."""
    out: dict[str, int] = {}
    place = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            fields = line.split(None, 5)
            name = Path(fields[5]).name if len(fields) > 5 else "anonymous"
            place = "jit" if "x" in fields[1] and name == "anonymous" else name
            place = place if place in ("jit", "[heap]", "anonymous") or place.startswith("memory") else "libraries"
        elif line.startswith("Anonymous:"):
            out[place] = out.get(place, 0) + int(line.split()[1])
    return out


def by_hand(
    platform: qemu_command.Platform,
    shape: MachineShape,
    network: NetworkAttachment,
    directory: Path,
    memory: Path,
    state: Path,
    disk: Path,
) -> tuple[float, float]:
    """Spawn and restore as a person would type it, one command after the other."""
    listener = socket.socket(socket.AF_UNIX)
    path = directory / "hand.sock"
    path.unlink(missing_ok=True)
    listener.bind(str(path))
    listener.listen(1)
    argv = qemu_command.command(platform, "hand", shape, network, directory / "con", listener.fileno(), None)
    began = time.perf_counter()
    child = subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{network.netns}", *argv],
        pass_fds=[listener.fileno()],
        stdin=subprocess.DEVNULL,
    )
    listener.close()
    link = socket.socket(socket.AF_UNIX)
    link.connect(str(path))
    file = link.makefile("rwb", buffering=0)

    def read() -> dict[str, Any]:
        message: dict[str, Any] = json.loads(file.readline())
        return message

    def run(name: str, **arguments: Any) -> None:
        file.write(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
        while "return" not in (message := read()):
            assert "error" not in message, message

    read()
    run("qmp_capabilities")
    spawned = (time.perf_counter() - began) * 1e3
    time.sleep(0.1)
    began = time.perf_counter()
    run("blockdev-add", **qemu_command.disk_node(disk, "root", "qcow2"))
    run("object-add", **qemu_command.memory_backend(memory, shape.memory_mib))
    run("qom-set", path="/machine", property="memory-backend", value="mem")
    run("x-exit-preconfig")
    file.write(json.dumps({"execute": "migrate-incoming", "arguments": {"uri": f"file:{state}"}}).encode() + b"\n")
    while read().get("data", {}).get("status") != "completed":
        pass
    file.write(b'{"execute": "cont"}\n')
    restored = (time.perf_counter() - began) * 1e3
    child.kill()
    child.wait()
    return spawned, restored


async def main() -> None:
    vcpus = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    shape = MachineShape(vcpus, 512)
    directory = Path(tempfile.mkdtemp(prefix="aenv-measure-", dir=os.environ.get("TMPDIR", "/var/tmp")))
    artifacts = Path(os.environ.get("AENV_TEST_ARTIFACTS", "/var/lib/aenv-dev/artifacts"))
    kernel = await ensure_kernel(artifacts, None, progress=print)
    init = directory / "init"
    source = Path(__file__).with_name("guest") / "init.c"
    subprocess.run(["gcc", "-O2", "-static", "-s", "-o", init, source], check=True)
    initramfs = directory / "initramfs.cpio"
    initramfs.write_bytes(write_cpio(guest_entries(init.read_bytes(), kernel.modules)))
    qemu = await find_qemu("qemu-system-x86_64")
    jail = JailSettings(mode="off" if os.environ.get("AENV_TEST_JAIL") == "off" else "auto", node="measure")
    vmm = make_qemu(
        directory, directory / "run", qemu, Accelerator.TCG, kernel.vmlinux, initramfs, kernel.sha256,
        Jailer(jail, directory, directory / "run"), [directory],
    )  # fmt: skip
    namespaces = Namespaces()
    try:
        await measure(vmm, namespaces, directory, shape)
    finally:
        for vm_id in vmm.known():
            if vm := await vmm.adopt(vm_id):
                await vm.kill()
        namespaces.close()
        shutil.rmtree(directory)


async def measure(vmm: QemuVmm, namespaces: Namespaces, directory: Path, shape: MachineShape) -> None:
    with (directory / "root.raw").open("wb") as file:
        file.truncate(1 << 30)
    disk = directory / "disk.qcow2"
    qcow2.create_overlay(disk, directory / "root.raw", form="raw")
    network = namespaces.take()
    began = time.perf_counter()
    vm = await vmm.boot("first", shape, network, disk, {})
    await ask(vm, "ping", 120)
    wall, cpu = time.perf_counter() - began, cpu_seconds(vm.pid)
    print(f"boot until the guest answers: {wall:.1f} s, CPU {cpu:.1f} s, load {os.getloadavg()[0]:.1f}")
    await asyncio.sleep(5)
    print(f"CPU of an idle guest: {(cpu_seconds(vm.pid) - cpu) / 5 * 100:.1f} %")
    await vm.stop()
    took, stats = await timed(vm.capture(directory / "state0", directory / "delta0"))
    print(f"first capture: {took:.0f} ms, {stats}")
    await vm.kill()
    namespaces.give_back(network)
    base = directory / "memory0"
    took, _ = await timed(asyncio.to_thread(lsmt.compose, None, directory / "delta0", base))
    print(f"compose: {took:.0f} ms")
    image = MemoryImage(base, None)

    count = 0

    async def spawn() -> QemuVm:
        nonlocal count
        count += 1
        return await vmm.spawn(f"c{count}", shape, namespaces.take())

    def overlay(below: Path) -> Path:
        path = directory / f"o{time.monotonic_ns()}.qcow2"
        qcow2.create_overlay(path, below)
        return path

    async def end(vm: QemuVm) -> None:
        await vm.kill()
        namespaces.give_back(vm.network)

    hand = []
    for _ in range(ROUNDS):
        network = namespaces.take()
        top = overlay(disk)
        hand.append(
            await asyncio.to_thread(by_hand, vmm.platform, shape, network, directory, base, directory / "state0", top)
        )
        namespaces.give_back(network)
    show("by hand: spawn", [a for a, _ in hand])
    show("by hand: restore, no delta", [b for _, b in hand])

    async def rounds(image: MemoryImage, state: Path, below: Path, name: str) -> QemuVm:
        spawns, restores, answers = [], [], []
        for number in range(ROUNDS):
            began = time.perf_counter()
            vm = await spawn()
            spawns.append((time.perf_counter() - began) * 1e3)
            await asyncio.sleep(0.1)
            top = overlay(below)
            restores.append((await timed(vm.restore(image, state, top)))[0])
            answers.append((await timed(ask(vm, "ping")))[0])
            if number < ROUNDS - 1:
                await end(vm)
        show("spawn", spawns)
        show(f"restore, {name}", restores)
        show("  first answer of the guest after that", answers)
        return vm

    vm = await rounds(image, directory / "state0", disk, "no delta")
    await asyncio.sleep(2)
    print("private memory of an idle child, KiB:", private_kib(vm.pid), sum(private_kib(vm.pid).values()))
    await ask(vm, "fill 3 9")
    stops, captures = [], []
    for _ in range(ROUNDS):
        stops.append((await timed(vm.stop()))[0])
        took, stats = await timed(vm.capture(directory / "state1", directory / "delta1"))
        captures.append(took)
        await vm.cont()
        await ask(vm, "ping")
    show("stop", stops)
    show(f"capture, {stats.memory_bytes >> 10} KiB data {stats.zero_bytes >> 10} KiB zero", captures)
    layers = []
    await vm.stop()
    frozen = await vm.disk()
    await vm.capture(directory / "state1", directory / "delta1")
    for _ in range(ROUNDS):
        path = directory / f"r{time.monotonic_ns()}.qcow2"
        layers.append((await timed(vm.rebase_disk(path)))[0])
    show("rebase_disk", layers)
    await end(vm)
    image = MemoryImage(base, directory / "delta1")
    size = (directory / "delta1").stat().st_size >> 10
    await end(await rounds(image, directory / "state1", frozen, f"{size} KiB delta"))
    overlays = [(await timed(asyncio.to_thread(overlay, frozen)))[0] for _ in range(50)]
    show("create_overlay", overlays)

    async def one() -> QemuVm:
        vm = await spawn()
        await vm.restore(image, directory / "state1", overlay(frozen))
        return vm

    networks = [namespaces.take() for _ in range(16)]  # made before the clock runs
    for network in networks:
        namespaces.give_back(network)
    for name, warm in (("cold", False), ("from a pool", True)):
        totals = []
        for _ in range(3):
            if warm:
                vms = list(await asyncio.gather(*(spawn() for _ in range(16))))
                await asyncio.sleep(0.5)
                tops = [overlay(frozen) for _ in vms]
                took, _ = await timed(
                    asyncio.gather(
                        *(v.restore(image, directory / "state1", t) for v, t in zip(vms, tops, strict=True))
                    )
                )
            else:
                took, vms = await timed(asyncio.gather(*(one() for _ in range(16))))
            totals.append(took)
            for vm in vms:
                await end(vm)
        show(f"fork of 16, {name}", totals)


if __name__ == "__main__":
    asyncio.run(main())
