"""`make lab-bench`: each hypervisor under KVM in the lab, beside its own interface spoken by hand.

Times are medians, wall clock, of a machine whose processor is emulated: only the ratios say something. Ours is the
hypervisor boundary as a node uses it (``aenv.vmm.protocol``), confinement included; by hand nothing is confined.
"""

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from lab.settings import ENVD, GUEST_CACHE, ROOT

from aenv.client.guest import ENVD_PORT
from aenv.config import Settings
from aenv.guest.artifacts import ensure_kernel_and_initramfs
from aenv.network.pool import SlotPool
from aenv.network.settings import NetworkSettings
from aenv.network.slot import NetworkSlot
from aenv.orchestrator.boot import ZERO_FREED, boot_parameters
from aenv.storage import qcow2
from aenv.storage.lsmt import compose
from aenv.vmm import qemu_command
from aenv.vmm.choice import Hypervisors
from aenv.vmm.firecracker import requests
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.firecracker.vmm import FirecrackerVmm
from aenv.vmm.protocol import MachineShape, MemoryImage, NetworkAttachment, Vm, Vmm
from aenv.vmm.qemu_vmm import QemuVmm
from bench.by_hand import RawSnapshot, RawVm, merge_memory, milliseconds, run_command
from bench.firecracker_by_hand import RawFirecracker
from bench.report import Report, Row, console
from lab import homes

SHAPE = MachineShape(1, 512)
CHILDREN = 4
TARGET = 1.3  # times the raw operation
CHANGES = "head -c 16M /dev/urandom > /dev/shm/changed"
PATIENCE = 600.0  # seconds until a guest answers
RETRY = 0.02  # seconds
HEALTH = b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n"
CIDR = "10.236.0.0/16"

Raw = RawVm | RawFirecracker


def until_answer(slot: NetworkSlot) -> None:
    """Until the guest's daemon answers. A lost SYN would be sent again after a second: ask anew before that."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            with socket.create_connection((slot.host_address, ENVD_PORT), 0.1) as connection:
                connection.settimeout(PATIENCE)
                connection.sendall(HEALTH)
                if connection.recv(4096).startswith(b"HTTP/1.1 2"):
                    return
        except OSError:
            assert time.monotonic() < deadline, "the guest does not answer"
            time.sleep(RETRY)  # it may come at once while the host knows no way to the guest


def attachment(slot: NetworkSlot) -> NetworkAttachment:
    return NetworkAttachment(slot.netns, slot.tap, slot.guest_mac)


class Bench:
    def __init__(self, vmm: Vmm, home: Path, kernel: Path, initramfs: Path, slots: list[NetworkSlot], rounds: int):
        self.vmm = vmm
        self.kernel = kernel
        self.initramfs = initramfs
        self.slots = slots
        self.rounds = rounds
        self.report = Report()
        self.raw_folder = home / "raw"
        self.raw_folder.mkdir()
        self.disks = home / "layers"  # where a confined process may read disks
        self.disks.mkdir(exist_ok=True)
        self.base = self.disks / "base.ext4"
        self.base.hardlink_to(next((GUEST_CACHE / "artifacts").glob("base-*.ext4")))
        self.memory = home / "memory-base"
        self.files = home
        self._serial = 0

    # -- both sides

    def name(self) -> str:
        self._serial += 1
        return f"bench{self._serial}"

    def overlay(self, below: Path, form: str = "qcow2") -> Path:
        path = self.disks / f"{self.name()}.qcow2"
        qcow2.create_overlay(path, below, form=form)
        return path

    def _new_files(self, *paths: Path) -> None:
        """Snapshots are written to files that were not there: those of others are never overwritten."""
        for path in paths:
            path.unlink(missing_ok=True)

    def parameters(self, slot: NetworkSlot) -> dict[str, str]:
        return boot_parameters(slot, [], "bench", ZERO_FREED)

    async def compare(
        self, name: str, ours: Callable[[], Awaitable[float]], raw: Callable[[], float], note: str = ""
    ) -> None:
        """Taken in turns, so that whatever else this machine does hits both."""
        found: list[float] = []
        by_hand: list[float] = []
        for _ in range(self.rounds):
            found.append(await ours())
            by_hand.append(await asyncio.to_thread(raw))
        self.report.add(Row(name, statistics.median(found), statistics.median(by_hand), note=note))

    # -- by hand

    def spawn_raw(self, slot: NetworkSlot, boot: bool = False) -> Raw:
        name = self.name()
        if isinstance(self.vmm, FirecrackerVmm):
            return RawFirecracker(self.vmm.binary.path, self.raw_folder / name, SHAPE, attachment(slot))
        assert isinstance(self.vmm, QemuVmm)
        line = qemu_command.kernel_parameters(self.vmm.platform, self.parameters(slot))
        source = qemu_command.BootSource(self.kernel, self.initramfs, line) if boot else None
        return RawVm(self.vmm.platform, self.raw_folder, name, SHAPE, attachment(slot), source)

    def boot_raw(self) -> float:
        slot, disk = self.slots[0], self.overlay(self.base, "raw")
        started = time.perf_counter()
        vm = self.spawn_raw(slot, boot=True)
        try:
            if isinstance(vm, RawFirecracker):
                line = requests.kernel_parameters(self.parameters(slot), FirecrackerOptions())
                vm.boot(self.kernel, self.initramfs, line, disk)
            else:
                vm.boot(disk, self.raw_folder / f"memory-{disk.stem}")
            until_answer(slot)
            return milliseconds(started)
        finally:
            vm.kill()

    def restore_raw(self, snapshot: RawSnapshot, answered: bool) -> float:
        vm = self.spawn_raw(self.slots[0])
        try:
            started = time.perf_counter()
            vm.restore(snapshot)
            if answered:
                until_answer(self.slots[0])
            return milliseconds(started)
        finally:
            vm.kill()

    def capture_raw(self, snapshot: RawSnapshot) -> float:
        slot = self.slots[0]
        vm = self.spawn_raw(slot)
        try:
            vm.restore(snapshot)
            until_answer(slot)
            run_command(slot.host_address, ENVD_PORT, CHANGES)
            self._new_files(self.raw_folder / "state", self.raw_folder / "delta")
            started = time.perf_counter()
            vm.capture(self.raw_folder / "state", self.raw_folder / "delta")
            vm.resume()
            return milliseconds(started)
        finally:
            vm.kill()

    def fork_raw(self, snapshot: RawSnapshot) -> float:
        """Children have the source's memory: what differs is merged into a copy of the base that is made before.

        Nobody else could use that base any more, so this is less than what a fork needs.
        """
        memory = self.raw_folder / "memory"
        subprocess.run(["cp", "--sparse=always", snapshot.memory, memory], check=True)
        source = self.spawn_raw(self.slots[-1])
        children: list[Raw] = []

        def child(slot: NetworkSlot, frozen: Path) -> None:
            children.append(vm := self.spawn_raw(slot))
            vm.restore(RawSnapshot(memory, self.raw_folder / "state", frozen))

        try:
            source.restore(snapshot)
            until_answer(self.slots[-1])
            self._new_files(self.raw_folder / "state", self.raw_folder / "delta")
            started = time.perf_counter()
            source.capture(self.raw_folder / "state", self.raw_folder / "delta")
            frozen = source.freeze_disk()
            source.resume()
            merge_memory(self.raw_folder / "delta", memory)
            with ThreadPoolExecutor(CHILDREN) as executor:
                list(executor.map(child, self.slots[:CHILDREN], [frozen] * CHILDREN))
            return milliseconds(started)
        finally:
            for vm in (source, *children):
                vm.kill()

    # -- ours

    async def boot(self) -> float:
        slot, disk = self.slots[0], self.overlay(self.base, "raw")
        started = time.perf_counter()
        vm = await self.vmm.boot(self.name(), SHAPE, attachment(slot), disk, self.parameters(slot))
        try:
            await asyncio.to_thread(until_answer, slot)
            return milliseconds(started)
        finally:
            await vm.kill()

    async def spawn(self, slot: NetworkSlot) -> Vm:
        return await self.vmm.spawn(self.name(), SHAPE, attachment(slot))

    async def restore(self, image: MemoryImage, snapshot: RawSnapshot, answered: bool) -> float:
        vm = await self.spawn(self.slots[0])
        try:
            started = time.perf_counter()
            await vm.restore(image, snapshot.state, self.overlay(snapshot.disk))
            if answered:
                await asyncio.to_thread(until_answer, self.slots[0])
            return milliseconds(started)
        finally:
            await vm.kill()

    async def capture(self, snapshot: RawSnapshot) -> float:
        slot = self.slots[0]
        vm = await self.spawn(slot)
        try:
            await vm.restore(MemoryImage(snapshot.memory, None), snapshot.state, self.overlay(snapshot.disk))
            await asyncio.to_thread(until_answer, slot)
            await asyncio.to_thread(run_command, slot.host_address, ENVD_PORT, CHANGES)
            self._new_files(self.files / "state", self.files / "delta")
            started = time.perf_counter()
            await vm.stop()
            await vm.capture(self.files / "state", self.files / "delta")
            await vm.cont()
            return milliseconds(started)
        finally:
            await vm.kill()

    async def fork(self, snapshot: RawSnapshot) -> float:
        source = await self.spawn(self.slots[-1])
        children: list[Vm] = []
        state, delta = self.files / "fork-state", self.files / "fork-delta"

        async def child(slot: NetworkSlot, below: Path) -> None:
            vm = await self.spawn(slot)
            children.append(vm)
            await vm.restore(MemoryImage(snapshot.memory, delta), state, self.overlay(below))

        try:
            await source.restore(MemoryImage(snapshot.memory, None), snapshot.state, self.overlay(snapshot.disk))
            await asyncio.to_thread(until_answer, self.slots[-1])
            self._new_files(state, delta)
            started = time.perf_counter()
            await source.stop()
            frozen = await source.disk()
            await source.capture(state, delta)
            await source.rebase_disk(self.disks / f"{self.name()}.qcow2")
            await source.cont()
            async with asyncio.TaskGroup() as group:
                for slot in self.slots[:CHILDREN]:
                    group.create_task(child(slot, frozen))
            return milliseconds(started)
        finally:
            for vm in (source, *children):
                await vm.kill()

    async def first_snapshot(self) -> RawSnapshot:
        """Of a guest that has booted and answered: what everything below starts from."""
        slot, disk = self.slots[0], self.overlay(self.base, "raw")
        state, delta = self.files / "base-state", self.files / "base-delta"
        vm = await self.vmm.boot(self.name(), SHAPE, attachment(slot), disk, self.parameters(slot))
        try:
            await asyncio.to_thread(until_answer, slot)
            await asyncio.to_thread(run_command, slot.host_address, ENVD_PORT, "true")
            await vm.stop()
            await vm.capture(state, delta)
        finally:
            await vm.kill()
        await asyncio.to_thread(compose, None, delta, self.memory)
        return RawSnapshot(self.memory, state, disk)

    async def run(self) -> None:
        await self.compare("boot (guest answers)", self.boot, self.boot_raw)
        snapshot = await self.first_snapshot()
        image = MemoryImage(snapshot.memory, None)
        note = "process waits; with overlay, disk"
        await self.compare(
            "restore (running)",
            lambda: self.restore(image, snapshot, False),
            lambda: self.restore_raw(snapshot, False),
            note,
        )
        await self.compare(
            "restore (guest answers)",
            lambda: self.restore(image, snapshot, True),
            lambda: self.restore_raw(snapshot, True),
            note,
        )
        note = "stop, save, go on; 16 MiB changed"
        await self.compare("capture", lambda: self.capture(snapshot), lambda: self.capture_raw(snapshot), note)
        note = "with the starts of processes"
        await self.compare(
            f"fork of {CHILDREN} (all running)", lambda: self.fork(snapshot), lambda: self.fork_raw(snapshot), note
        )


async def measure(vmm: str, rounds: int) -> list[Row]:
    home = GUEST_CACHE / "homes" / f"bench-{vmm}"
    runtime = Path("/run/aenv-bench")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    (home / "artifacts").symlink_to(GUEST_CACHE / "artifacts")
    guest = await ensure_kernel_and_initramfs(home, ROOT / ENVD, kernel=None, progress=lambda _: None)
    found = {name.removeprefix("AENV_").lower(): value for name, value in homes.settings(vmm).items()}
    settings = Settings.model_validate({**found, "home": home, "runtime": runtime, "slot_prefix": "aenvb"})
    hypervisors = Hypervisors(settings, guest.kernel, guest.initramfs, lambda _: None)
    chosen = await hypervisors.choose()
    fingerprint = chosen.fingerprint
    console.print(
        f"{fingerprint.vmm} {fingerprint.vmm_version}, {fingerprint.accelerator}, medians of {rounds}; not confined: "
        f"{', '.join(hypervisors.gaps) or 'nothing'}"
    )
    pool = SlotPool(NetworkSettings(prefix="aenvr", pool_cidr=CIDR, runtime_dir=runtime), 0)
    slots: list[NetworkSlot] = []
    try:
        await pool.start()
        slots = [await pool.acquire() for _ in range(CHILDREN + 1)]
        bench = Bench(chosen, home, guest.kernel, guest.initramfs, slots, rounds)
        await bench.run()
        bench.report.show()
        return bench.report.rows
    finally:
        for vm_id in chosen.known():
            if (vm := await chosen.adopt(vm_id)) is not None:
                await vm.kill()
        for slot in slots:
            await pool.release(slot)
        await pool.close(remove_root_table=True)
        hypervisors.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="repetitions of each measurement")
    parser.add_argument("--vmm", action="append", choices=homes.VMMS, help="only this one; may be repeated")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    arguments = parser.parse_args()
    results = {}
    for vmm in arguments.vmm or homes.VMMS:
        if reason := homes.missing(vmm):
            console.print(f"{vmm} is left out: {reason}")
            continue
        results[vmm] = asyncio.run(measure(vmm, arguments.rounds))
    if arguments.json is not None:
        figures = {vmm: [asdict(row) for row in rows] for vmm, rows in results.items()}
        arguments.json.write_text(json.dumps(figures, indent=1))
    slow = [
        f"{vmm}: {row.name}"
        for vmm, rows in results.items()
        for row in rows
        if row.raw and row.ours > TARGET * row.raw
    ]
    console.print(f"above {TARGET} × by hand: {', '.join(slow) or 'nothing'}")


if __name__ == "__main__":
    main()
