"""``python -m bench.disks``: a disk through each export beside the same fio job on a raw file, in one run.

What a VMM does is done by fio: ``pread`` and ``pwrite`` through the page cache, and an fsync at the end, whose time
counts. The disk is an empty qcow2 overlay over a raw base that is in the page cache. Best of the rounds; larger is
better, so a ratio of 1 is the raw file's speed. ``nbd`` is the kernel's NBD client on ``qemu-nbd``: for comparison,
not a way that a node uses. Needs root and fio; ``--json`` is for the lab.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import VmmError
from aenv.storage import qcow2
from aenv.vmm.disk.choice import ExportKind, choose_exporter
from aenv.vmm.disk.protocol import DiskExport
from bench.report import Report, Row, console

MIB = 1 << 20
NBD = Path("/dev/nbd0")


@dataclass(frozen=True)
class Job:
    """What fio does; ``part`` is how much of the disk, one in so many bytes."""

    name: str
    rw: str
    bs: str
    part: int = 1
    fresh: bool = False  # on an overlay that holds nothing


JOBS = (
    Job("sequential reads, 1 MiB", "read", "1m"),
    Job("random reads, 4 KiB", "randread", "4k", part=8),
    Job("random writes, 4 KiB, first time", "randwrite", "4k", part=8, fresh=True),
    Job("random writes, 4 KiB, again", "randwrite", "4k", part=8),
    Job("sequential writes, 1 MiB, first time", "write", "1m", fresh=True),
    Job("sequential writes, 1 MiB, again", "write", "1m"),
)


def fio(path: Path, job: Job, size: int) -> float:
    """MB/s."""
    argv = [
        "fio", "--name=job", f"--filename={path}", f"--rw={job.rw}", f"--bs={job.bs}", "--ioengine=psync",
        f"--size={size}", f"--io_size={size // job.part}", "--invalidate=1", "--end_fsync=1", "--randrepeat=1",
        "--allow_file_create=0", "--output-format=json",
    ]  # fmt: skip
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    result = json.loads(said[said.index("{") :])["jobs"][0]
    return float(max(result["read"]["bw_bytes"], result["write"]["bw_bytes"])) / 1e6


def command(*argv: object) -> None:
    subprocess.run([str(part) for part in argv], check=True, stdout=subprocess.DEVNULL)


def synced(path: Path) -> Path:
    """Written to the host's disk, so that it is not written while something is measured."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return path


class Disks:
    """Files of one comparison in a folder."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        self.base = folder / "base.raw"
        with self.base.open("wb") as file:
            for _ in range(size // MIB):
                file.write(os.urandom(MIB))

    def raw(self) -> Path:
        """A copy of the base, as if it were the disk."""
        path = self.folder / "disk.raw"
        shutil.copyfile(self.base, path)
        return synced(path)

    def overlay(self) -> Path:
        path = self.folder / "disk.qcow2"
        path.unlink(missing_ok=True)
        qcow2.create_overlay(path, self.base, form="raw")
        synced(self.base).read_bytes()  # into the page cache
        return synced(path)

    @asynccontextmanager
    async def exported(self, kind: str) -> AsyncIterator[Path]:
        disk = await asyncio.to_thread(self.overlay)
        if kind == "nbd":
            await asyncio.to_thread(self.connect_nbd, disk)
            try:
                yield NBD
            finally:
                await asyncio.to_thread(command, "qemu-nbd", "-d", NBD)
            return
        export = await self.export(kind, disk)
        try:
            yield export.path
        finally:
            await export.close()

    def connect_nbd(self, disk: Path) -> None:
        options = ["--fork", "--cache=unsafe", "--discard=unmap", "--detect-zeroes=unmap", "-f", "qcow2"]
        command("qemu-nbd", "-c", NBD, *options, disk)
        while int(Path(f"/sys/block/{NBD.name}/size").read_text()) * 512 < self.size:
            time.sleep(0.01)

    async def export(self, kind: str, disk: Path) -> DiskExport:
        runtime = self.folder / "run"
        runtime.mkdir(exist_ok=True)
        return await (await choose_exporter(ExportKind(kind))).export("bench", disk, runtime)


async def measured(disks: Disks, kind: str | None, rounds: int) -> dict[str, float]:
    """MB/s of each job; on the raw file where ``kind`` is None."""
    best: dict[str, float] = {}

    async def run(path: Path, jobs: list[Job]) -> None:
        for job in jobs:
            speed = await asyncio.to_thread(fio, path, job, disks.size)
            best[job.name] = max(best.get(job.name, 0.0), speed)

    groups: list[list[Job]] = []
    for job in JOBS:
        if job.fresh or not groups:
            groups.append([])
        groups[-1].append(job)
    for _ in range(rounds):
        for group in groups:
            if kind is None:
                await run(await asyncio.to_thread(disks.raw), group)
            else:
                async with disks.exported(kind) as path:
                    await run(path, group)
    return best


async def freezing(disks: Disks, kind: str, rounds: int) -> float:
    """Milliseconds of a rebase after 16 MiB of random writes that nobody synced."""
    best = float("inf")
    for _ in range(rounds):
        export = await disks.export(kind, await asyncio.to_thread(disks.overlay))
        try:
            job = ["--rw=randwrite", "--bs=4k", f"--io_size={16 * MIB}", f"--size={disks.size}", "--ioengine=psync"]
            file = [f"--filename={export.path}", "--allow_file_create=0"]
            await asyncio.to_thread(command, "fio", "--name=job", *file, *job)
            began = time.perf_counter()
            await export.rebase(disks.folder / f"{os.urandom(4).hex()}.qcow2")
            best = min(best, (time.perf_counter() - began) * 1000)
        finally:
            await export.close()
    return best


async def available(kinds: list[str]) -> list[str]:
    found = []
    for kind in kinds:
        if kind == "nbd":
            if shutil.which("qemu-nbd") and os.access(NBD, os.R_OK):
                found.append(kind)
            continue
        try:
            await choose_exporter(ExportKind(kind))
            found.append(kind)
        except VmmError as error:
            print(error, file=sys.stderr)
    return found


async def run(kinds: list[str], size: int, rounds: int) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="aenv-bench-disks-") as name:
        disks = Disks(Path(name), size)
        figures = {"raw": await measured(disks, None, rounds)}
        for kind in await available(kinds):
            figures[kind] = await measured(disks, kind, rounds)
            if kind != "nbd":
                figures[kind]["freeze, 16 MiB not synced (ms)"] = await freezing(disks, kind, rounds)
    return figures


def report(figures: dict[str, dict[str, float]]) -> None:
    table = Report()
    for kind, speeds in figures.items():
        for name, speed in speeds.items():
            if name.endswith("(ms)"):
                table.add(Row(f"{kind}: {name.removesuffix(' (ms)')}", speed, None))
            elif kind != "raw":
                table.add(Row(f"{kind}: {name}", speed, figures["raw"][name], "MB/s"))
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="MiB of disk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("kinds", nargs="*", default=["ublk", "fuse", "nbd"])
    arguments = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("fio") is None:
        parser.exit(2, "This needs root and fio (apt-get install fio).\n")
    figures = asyncio.run(run(arguments.kinds, arguments.size * MIB, arguments.rounds))
    if arguments.json:
        print(json.dumps(figures, indent=1))
    else:
        console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
        report(figures)


if __name__ == "__main__":
    main()
