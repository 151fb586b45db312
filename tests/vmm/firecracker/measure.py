"""Figures of docs/internals/firecracker.md: ``python -m tests.vmm.firecracker.measure BINARY``, as root, with KVM.

Medians of several rounds, beside the same requests sent by hand: Firecracker without a jail on a raw disk, and its
own snapshots, ``Diff`` with dirty page tracking and ``Full``.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from aenv.guest.initramfs import guest_entries, write_cpio
from aenv.guest.kernel import ensure_kernel
from aenv.storage import lsmt, qcow2
from aenv.vmm.disk.choice import ExportKind, choose_exporter
from aenv.vmm.firecracker import requests
from aenv.vmm.firecracker.binary import FirecrackerBinary, find_firecracker
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.firecracker.requests import Request
from aenv.vmm.firecracker.vm import FirecrackerVm
from aenv.vmm.firecracker.vmm import FirecrackerVmm, fingerprint
from aenv.vmm.jail import Jailer
from aenv.vmm.jail_settings import JailSettings
from aenv.vmm.protocol import Accelerator, MachineShape, MemoryImage, NetworkAttachment
from tests.vmm.conftest import Namespaces, ask_now

# ruff: noqa: ASYNC221
ROUNDS = int(os.environ.get("ROUNDS", "7"))
SHAPE = MachineShape(1, 512)
OPTIONS = FirecrackerOptions()


async def timed(call: Awaitable[Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = await call
    return (time.perf_counter() - began) * 1e3, result


def show(name: str, values: list[float], by_hand: list[float] | None = None) -> None:
    low, high = min(values), max(values)
    ratio = f"  {statistics.median(values) / statistics.median(by_hand):5.2f} x by hand" if by_hand else ""
    print(f"{name:52} median {statistics.median(values):8.1f} ms   ({low:.1f} to {high:.1f}){ratio}", flush=True)


class Hand:
    """Firecracker as a person would start and ask it."""

    def __init__(self, binary: str, network: NetworkAttachment, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        (directory / "dev").mkdir()
        self.directory, self.network = directory, network
        argv = ["ip", "netns", "exec", network.netns, binary, "--api-sock", "api.sock", "--level", "Warn"]
        with (directory / "console").open("wb") as console:
            self.process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=console, cwd=directory)
        self.link = socket.socket(socket.AF_UNIX)
        while True:
            try:
                self.link.connect(str(directory / "api.sock"))
                return
            except OSError:
                time.sleep(0.002)

    def send(self, request: Request, **more: Any) -> None:
        content = json.dumps({**(request.body or {}), **more}).encode()
        head = (
            f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        )
        self.link.sendall(head.encode() + content)
        answer = self.link.recv(65536).decode()
        assert answer.split()[1] in ("200", "204"), answer

    def boot(self, kernel: Path, initramfs: Path, *, track: bool) -> None:
        (self.directory / requests.KERNEL).symlink_to(kernel)
        (self.directory / requests.INITRAMFS).symlink_to(initramfs)
        line = requests.kernel_parameters({}, OPTIONS)
        for request in requests.boot(line, SHAPE, self.network, OPTIONS):
            more = {"track_dirty_pages": track} if request.path == "/machine-config" else {}
            self.send(request, **more)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.link.close()


@contextlib.contextmanager
def hand(binary: str, network: NetworkAttachment, directory: Path) -> Iterator[Hand]:
    made = Hand(binary, network, directory)
    try:
        yield made
    finally:
        made.kill()


async def say(vm: FirecrackerVm | NetworkAttachment, command: str, timeout: float = 120) -> str:
    network = vm if isinstance(vm, NetworkAttachment) else vm.network
    return await asyncio.to_thread(ask_now, network, command, timeout)


async def by_hand(binary: FirecrackerBinary, files: tuple[Path, Path], namespaces: Namespaces, place: Path) -> Any:
    """Boot, snapshots and restores by hand; the figures by name, and the base, state and disk of the snapshot."""
    figures: dict[str, list[float]] = {name: [] for name in ("spawn", "load", "full", "diff", "first diff", "boot")}
    network = namespaces.take()
    raw = place / "raw.disk"
    with raw.open("wb") as file:
        file.truncate(64 << 20)
    with hand(binary.path, network, place / "hand") as source:
        shutil.copy(raw, source.directory / requests.DISK)
        began = time.perf_counter()
        source.boot(*files, track=True)
        assert await say(network, "ping") == "pong"
        figures["boot"].append((time.perf_counter() - began) * 1e3)
        await say(network, "fill 64 1")
        source.send(requests.run(False))
        began = time.perf_counter()
        source.send(requests.save("state", "memory", "Diff"))
        figures["first diff"].append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        source.send(requests.save("state2", "memory2", "Full"))
        figures["full"].append((time.perf_counter() - began) * 1e3)
        shutil.copy(source.directory / "memory", place / "memory")
        shutil.copy(source.directory / "state", place / "state")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        with hand(binary.path, network, place / "hand") as child:
            figures["spawn"].append((time.perf_counter() - began) * 1e3)
            shutil.copy(raw, child.directory / requests.DISK)
            (child.directory / requests.MEMORY).symlink_to(place / "memory")
            (child.directory / requests.STATE).symlink_to(place / "state")
            began = time.perf_counter()
            child.send(requests.load(network), track_dirty_pages=True)
            child.send(requests.run(True))
            figures["load"].append((time.perf_counter() - began) * 1e3)
            await say(network, "fill 4 1")
            child.send(requests.run(False))
            began = time.perf_counter()
            child.send(requests.save("state9", "memory9", "Diff"))
            figures["diff"].append((time.perf_counter() - began) * 1e3)
            written = (child.directory / "memory9").stat().st_blocks * 512
    print(f"by hand, Diff wrote {written / 1e6:.1f} MB", flush=True)
    namespaces.give_back(network)
    return figures


async def main() -> None:
    binary = await find_firecracker(sys.argv[1])
    place = Path(tempfile.mkdtemp(prefix="fc", dir=os.environ.get("PLACE", "/var/tmp")))
    namespaces = Namespaces()
    try:
        artifacts = Path(os.environ.get("AENV_TEST_ARTIFACTS", "/var/lib/aenv-dev/artifacts"))
        kernel = await ensure_kernel(artifacts, None, progress=print)
        init = place / "init"
        source = Path(__file__).parent.parent / "guest" / "init.c"
        subprocess.run(["gcc", "-O2", "-static", "-s", "-o", init, source], check=True)
        initramfs = place / "initramfs"
        initramfs.write_bytes(write_cpio(guest_entries(init.read_bytes(), list(kernel.modules))))
        print(f"Firecracker {binary.version}, {SHAPE.memory_mib} MiB, load {os.getloadavg()[0]:.1f}", flush=True)
        hand_figures = await by_hand(binary, (kernel.vmlinux, initramfs), namespaces, place)
        for name, values in hand_figures.items():
            show(f"by hand: {name}", values)
        home, runtime = place / "home", place / "run"
        home.mkdir()
        runtime.mkdir()
        jailer = Jailer(JailSettings(mode=os.environ.get("JAIL", "auto"), node="fcbench"), home, runtime)  # type: ignore[arg-type]
        facts = fingerprint(binary, Accelerator.KVM, kernel.sha256)
        exporter = await choose_exporter(ExportKind(os.environ.get("AENV_TEST_EXPORT", "auto")))
        print(f"disks exported through {exporter.kind}", flush=True)
        vmm = FirecrackerVmm(
            home, runtime, binary, facts, kernel.vmlinux, initramfs, exporter, OPTIONS, jailer
        )  # fmt: skip
        await ours(vmm, namespaces, place, hand_figures)
        vmm.close()
    finally:
        namespaces.close()
        shutil.rmtree(place, ignore_errors=True)


async def ours(vmm: FirecrackerVmm, namespaces: Namespaces, place: Path, hand: dict[str, list[float]]) -> None:
    raw, disk = place / "raw.disk", place / "disk.qcow2"
    qcow2.create_overlay(disk, raw, form="raw")
    network = namespaces.take()
    began = time.perf_counter()
    first = await vmm.boot("first", SHAPE, network, disk, {})
    assert await say(first, "ping") == "pong"
    show("boot until the guest answers", [(time.perf_counter() - began) * 1e3], hand["boot"])
    await say(first, "fill 64 1")
    await first.stop()
    took, stats = await timed(first.capture(place / "state", place / "delta"))
    show(f"capture of a first boot, {stats.memory_bytes / 1e6:.0f} MB", [took], hand["first diff"])
    await first.rebase_disk(place / "after.qcow2")
    await first.kill()
    namespaces.give_back(network)
    base = place / "base.memory"
    await asyncio.to_thread(lsmt.compose, None, place / "delta", base, False)
    figures: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    image, state = MemoryImage(base, None), place / "state"
    for delta in (False, True):
        words = ", 4 MiB delta" if delta else ""
        for number in range(ROUNDS):
            network = namespaces.take()
            took, vm = await timed(vmm.spawn(f"v{number}", SHAPE, network))
            note("spawn", took)
            overlay = place / f"o{number}{delta}.qcow2"
            qcow2.create_overlay(overlay, disk)
            took, _ = await timed(vm.restore(image, state, overlay))
            note(f"restore{words}", took)
            took, _ = await timed(say(vm, "ping"))
            note("first answer", took)
            await say(vm, "fill 4 1")
            took, _ = await timed(vm.stop())
            note("stop", took)
            took, stats = await timed(vm.capture(place / "state1", place / "delta1"))
            note("capture, 4 MiB filled", took)
            took, _ = await timed(vm.rebase_disk(place / f"r{number}{delta}.qcow2"))
            note("rebase_disk", took)
            took, _ = await timed(vm.cont())
            note("cont", took)
            took, _ = await timed(vm.kill())
            note("kill", took)
            namespaces.give_back(network)
        print(f"captured {stats.memory_bytes / 1e6:.1f} MB", flush=True)
        image, state = MemoryImage(base, place / "delta1"), place / "state1"
    image, state = MemoryImage(base, None), place / "state"
    for _ in range(3):
        networks = [namespaces.take() for _ in range(4)]
        began = time.perf_counter()

        async def child(number: int, network: NetworkAttachment) -> FirecrackerVm:
            vm = await vmm.spawn(f"f{number}", SHAPE, network)
            overlay = place / f"fork{time.monotonic_ns()}.qcow2"
            qcow2.create_overlay(overlay, disk)
            await vm.restore(image, state, overlay)
            return vm

        made = await asyncio.gather(*(child(i, network) for i, network in enumerate(networks)))
        note("fork of 4, processes spawned", (time.perf_counter() - began) * 1e3)
        await asyncio.gather(*(say(vm, "ping") for vm in made))
        note("  until all have answered", (time.perf_counter() - began) * 1e3)
        for vm in made:
            await vm.kill()
            namespaces.give_back(vm.network)
    against = {
        "spawn": "spawn", "restore": "load", "restore, 4 MiB delta": "load", "capture, 4 MiB filled": "diff",
    }  # fmt: skip
    for name, values in figures.items():
        show(name, values, hand[against[name]] if name in against else None)


if __name__ == "__main__":
    asyncio.run(main())
