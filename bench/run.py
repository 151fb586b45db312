"""`make bench`: the node's operations beside the same done by hand, in one run, with ratios.

Starts a node of its own. Times are medians, wall clock, on whatever this machine is doing besides.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from e2b import Sandbox
from tests.node.process import NodeProcess, wait_for

from aenv.client.guest import ENVD_PORT
from aenv.config import Settings
from aenv.network.addressing import slot_at
from aenv.network.pool import SlotPool
from aenv.network.settings import NetworkSettings
from aenv.network.slot import NetworkSlot
from aenv.storage.lsmt import compose
from aenv.vmm.choice import Hypervisors
from aenv.vmm.protocol import MachineShape, NetworkAttachment
from aenv.vmm.qemu_command import Platform
from aenv.vmm.qemu_vmm import QemuVmm
from bench.by_hand import (
    RawSnapshot,
    RawVm,
    first_answer,
    milliseconds,
    private_bytes,
    run_command,
)
from bench.calls import calls, listing, streams
from bench.cli import cli
from bench.cold_start import cold_start
from bench.density import density
from bench.images import images
from bench.layer_server import layer_server
from bench.report import Report, Row, console
from bench.repository import repository
from bench.snapshots import captures, stalls
from bench.storage_formats import formats

MIB = 1 << 20
CHILDREN = 16
NODE_CIDR, RAW_CIDR = "10.234.0.0/16", "10.235.0.0/16"
HEALTH = b"GET /health HTTP/1.1\r\nHost: guest\r\nConnection: close\r\n\r\n"


class Bench:
    def __init__(self, node: NodeProcess, slots: list[NetworkSlot], platform: Platform, folder: Path, rounds: int):
        self.node = node
        self.slots = slots
        self.platform = platform
        self.folder = folder
        self.rounds = rounds
        self.report = Report()
        self.api = httpx.Client(base_url=node.url, headers={"X-API-Key": node.api_key}, timeout=120)
        self._serial = 0

    # -- the node's side

    def create(self) -> Sandbox:
        node = self.node
        return Sandbox.create("base", timeout=3600, api_key=node.api_key, api_url=node.url, sandbox_url=node.url)

    def post(self, path: str, body: dict[str, object] | None = None) -> object:
        answer = self.api.post(path, json=body or {})
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def record(self, sandbox_id: str) -> dict[str, object]:
        found: dict[str, object] = json.loads(self.node.records("sandboxes")[sandbox_id])
        return found

    def host_of(self, sandbox_id: str) -> str:
        settings = NetworkSettings(prefix=self.node.prefix, pool_cidr=NODE_CIDR)
        slot = self.record(sandbox_id)["slot"]
        assert isinstance(slot, int)
        return slot_at(settings, slot).host_address

    def warm(self) -> None:
        """Wait until the pool is full again, so that every round starts from the same state."""
        wait_for(lambda: httpx.get(f"{self.node.url}/health").is_success, "the node")
        settled = [0.0, 0]

        def quiet() -> bool:
            count = len(self.node.vm_pids())
            if count != settled[1]:
                settled[:] = [time.monotonic(), count]
            return time.monotonic() - settled[0] > 0.4

        wait_for(quiet, "the pool to settle", interval=0.05)

    # -- the raw side

    def snapshot_of(self, sandbox_id: str) -> RawSnapshot:
        """The files of a paused sandbox, its memory as one file."""
        record = self.record(sandbox_id)
        snapshot = json.loads(self.node.records("snapshots")[str(record["snapshot_id"])])
        folder = self.node.home / "snapshots" / snapshot["id"]
        memory = self.folder / f"memory-{snapshot['id']}"
        if not memory.exists():
            base = self.node.home / "memory" / snapshot["memory_base"]
            if (folder / "delta").exists():
                compose(base, folder / "delta", memory)
            else:
                shutil.copy(base, memory)
        return RawSnapshot(memory, folder / "state", self.node.home / "layers" / f"{snapshot['disk']}.qcow2")

    def spawn(self, slot: NetworkSlot) -> RawVm:
        self._serial += 1
        network = NetworkAttachment(slot.netns, slot.tap, slot.guest_mac)
        return RawVm(self.platform, self.folder, f"raw{self._serial}", self.shape, network)

    @property
    def shape(self) -> MachineShape:
        template = json.loads(next(iter(self.node.records("templates").values())))
        return MachineShape(template["vcpus"], template["memory_mib"])

    @contextmanager
    def raw_vms(self, count: int, snapshot: RawSnapshot) -> Iterator[tuple[list[RawVm], float]]:
        """``count`` children of a snapshot, spawned cold side by side; with the ms until all run."""
        vms: list[RawVm] = []

        def child(slot: NetworkSlot) -> None:
            vm = self.spawn(slot)
            vms.append(vm)
            vm.restore(snapshot)

        try:
            started = time.perf_counter()
            with ThreadPoolExecutor(count) as executor:
                list(executor.map(child, self.slots[:count]))
            yield vms, milliseconds(started)
        finally:
            for vm in vms:
                vm.kill()

    def median(self, work: Callable[[], float]) -> float:
        return statistics.median(work() for _ in range(self.rounds))

    # -- what is measured

    def life(self) -> None:
        sandbox = self.create()
        sandbox.commands.run("true")
        sandbox.pause()
        snapshot = self.snapshot_of(sandbox.sandbox_id)

        def raw_restore(snapshot: RawSnapshot, answered: bool) -> float:
            slot = self.slots[0]
            vm = self.spawn(slot)
            try:
                started = time.perf_counter()
                vm.restore(snapshot)
                if answered:
                    first_answer(slot.host_address, ENVD_PORT, HEALTH)
                return milliseconds(started)
            finally:
                vm.kill()

        def create() -> float:
            self.warm()
            started = time.perf_counter()
            made = self.post("/sandboxes", {"templateID": "base", "timeout": 600})
            elapsed = milliseconds(started)
            assert isinstance(made, dict)
            self.api.delete(f"/sandboxes/{made['sandboxID']}")
            return elapsed

        self.report.add(
            Row(
                "create from template (guest answers)",
                self.median(create),
                self.median(lambda: raw_restore(snapshot, True)),
                note="by hand: restore of a waiting process, then GET /health",
            )
        )
        path = f"/sandboxes/{sandbox.sandbox_id}"
        resumes, pauses = [], []
        for _ in range(self.rounds):
            self.warm()
            started = time.perf_counter()
            self.post(f"{path}/resume", {"timeout": 3600})
            resumes.append(milliseconds(started))
            sandbox.commands.run("true")
            started = time.perf_counter()
            self.post(f"{path}/pause")
            pauses.append(milliseconds(started))
        snapshot = self.snapshot_of(sandbox.sandbox_id)  # each pause replaces the files of the one before
        note = "API call to answer, VM running; by hand: restore of a waiting process"
        self.report.add(
            Row("resume", statistics.median(resumes), self.median(lambda: raw_restore(snapshot, False)), note=note)
        )

        def raw_pause() -> float:
            slot = self.slots[0]
            vm = self.spawn(slot)
            try:
                vm.restore(snapshot)
                first_answer(slot.host_address, ENVD_PORT, HEALTH)
                started = time.perf_counter()
                vm.capture(self.folder / "state", self.folder / "delta")
                return milliseconds(started)
            finally:
                vm.kill()

        self.report.add(
            Row("pause", statistics.median(pauses), self.median(raw_pause), note="by hand: stop, state, dirty pages")
        )
        sandbox.kill()

    def forks(self) -> None:
        sandbox = self.create()
        sandbox.commands.run("true")
        path = f"/sandboxes/{sandbox.sandbox_id}"
        for count in (1, CHILDREN):
            running, answered, memory = [], [], []
            raw_running, raw_answered, raw_memory = [], [], []
            for _ in range(max(3, self.rounds // 3)):
                self.warm()
                started = time.perf_counter()
                outcomes = self.post(f"{path}/fork", {"count": count, "timeout": 600})
                running.append(milliseconds(started))
                assert isinstance(outcomes, list)
                children = [outcome["sandbox"] for outcome in outcomes]
                self.answer_all([(self.host_of(c["sandboxID"]), c.get("envdAccessToken")) for c in children])
                answered.append(milliseconds(started))
                memory += [self.owned(child["sandboxID"]) for child in children]
                for child in children:
                    self.api.delete(f"/sandboxes/{child['sandboxID']}")
                # The same by hand: capture the running source, then spawn and restore the children.
                raw = self.raw_fork(count, sandbox)
                raw_running.append(raw[0])
                raw_answered.append(raw[1])
                raw_memory += raw[2]
            for name, ours, by_hand in (
                ("all running", running, raw_running),
                ("all answered a command", answered, raw_answered),
            ):
                self.report.add(Row(f"fork of {count}: {name}", statistics.median(ours), statistics.median(by_hand)))
        self.report.add(
            Row(
                "memory owned by an idle child",
                statistics.median(memory) / MIB,
                statistics.median(raw_memory) / MIB,
                "MiB",
                "private pages of its VMM process, after one command",
            )
        )
        sandbox.kill()

    def raw_fork(self, count: int, sandbox: Sandbox) -> tuple[float, float, list[int]]:
        """Capture a running VM and start ``count`` children, by hand: ms until running, until answered, memory."""
        outcomes = self.post(f"/sandboxes/{sandbox.sandbox_id}/fork", {"count": 1, "timeout": 600})
        assert isinstance(outcomes, list)
        parked = outcomes[0]["sandbox"]
        parked_id = parked["sandboxID"]
        self.post(f"/sandboxes/{parked_id}/pause")
        self.warm()  # its VM holds the disk's lock until it is gone
        snapshot = self.snapshot_of(parked_id)
        token = parked.get("envdAccessToken")
        slot = self.slots[-1]
        source = self.spawn(slot)
        try:
            source.restore(snapshot)
            first_answer(slot.host_address, ENVD_PORT, HEALTH)
            started = time.perf_counter()
            source.capture(self.folder / "fork-state", self.folder / "fork-delta")
            source.tell("cont")
            captured = milliseconds(started)
            with self.raw_vms(count, snapshot) as (vms, spent):
                again = time.perf_counter()
                self.answer_all([(s.host_address, token) for s in self.slots[:count]])
                answered = captured + spent + milliseconds(again)
                return captured + spent, answered, [private_bytes(vm.process.pid) for vm in vms]
        finally:
            source.kill()
            self.api.delete(f"/sandboxes/{parked_id}")

    @staticmethod
    def answer_all(guests: list[tuple[str, str | None]]) -> None:
        def ask(guest: tuple[str, str | None]) -> None:
            host, token = guest
            deadline = time.monotonic() + 60
            while True:
                try:
                    run_command(host, ENVD_PORT, "true", token)
                    return
                except (AssertionError, OSError):
                    # A child of the node learns its own token a moment after it runs.
                    if time.monotonic() > deadline:
                        raise

        with ThreadPoolExecutor(len(guests)) as executor:
            list(executor.map(ask, guests))

    def owned(self, sandbox_id: str) -> int:
        vm_id = str(self.record(sandbox_id)["vm_id"])
        pid = next(p for p in self.node.vm_pids() if vm_id.encode() in Path(f"/proc/{p}/cmdline").read_bytes())
        return private_bytes(pid)


async def main(rounds: int, minutes: float, folder: Path) -> None:
    node = NodeProcess(folder, prefix="aenvb", cidr=NODE_CIDR, warm_vms="4", log_level="debug")
    raw_network = NetworkSettings(prefix="aenvr", pool_cidr=RAW_CIDR, runtime_dir=folder)
    slots = SlotPool(raw_network, 0)
    taken: list[NetworkSlot] = []
    try:
        console.print("starting a node for the measurement")
        await asyncio.to_thread(node.start)
        artifacts = node.home / "artifacts"
        kernel = next(artifacts.glob("kernel-*/vmlinux"))
        initramfs = max(artifacts.glob("initramfs-*.cpio"), key=lambda p: p.stat().st_mtime)
        settings = Settings.model_validate({"home": node.home, "runtime": folder})
        vmm = await Hypervisors(settings, kernel, initramfs, lambda _: None).choose()
        assert isinstance(vmm, QemuVmm)  # what is done by hand beside it is QEMU's
        fingerprint = vmm.fingerprint
        console.print(f"{fingerprint.vmm} {fingerprint.vmm_version}, {fingerprint.accelerator}, medians of {rounds}")
        await slots.start()
        taken = [await slots.acquire() for _ in range(CHILDREN + 1)]
        bench = Bench(node, taken, vmm.platform, folder, rounds)
        parts: list[Callable[[], None]] = [bench.life, bench.forks]
        sdk = bench.create
        parts.append(lambda: calls(sdk, bench.host_of, bench.report, rounds))
        parts.append(lambda: cli(node, sdk, bench.host_of, bench.report, rounds))
        parts.append(lambda: streams(sdk, bench.report, minutes))
        parts.append(lambda: listing(node, bench.report, rounds))
        parts.append(lambda: stalls(node, sdk, bench.report))
        parts.append(lambda: captures(folder, bench.report, rounds))
        base = max((node.home / "memory").iterdir(), key=lambda path: path.stat().st_blocks)
        parts.append(lambda: formats(bench.report, base, 3))
        parts.append(lambda: repository(bench.report, folder))
        parts.append(lambda: layer_server(bench.report))
        parts.append(lambda: cold_start(folder, bench.report))
        parts.append(lambda: images(bench.report, folder))
        parts.append(lambda: density(node, sdk, CHILDREN))
        for part in parts:
            await asyncio.to_thread(part)
        bench.report.show()
    finally:
        await asyncio.to_thread(node.destroy)
        for slot in taken:
            await slots.release(slot)
        await slots.close(remove_root_table=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="repetitions of each measurement")
    parser.add_argument("--minutes", type=float, default=1.0, help="how long the concurrent streams stay open")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as name:
        asyncio.run(main(arguments.rounds, arguments.minutes, Path(name)))
