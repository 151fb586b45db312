"""A disk that is exported, and a plain copy in memory that must always read the same."""

import contextlib
import os
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.storage import qcow2
from aenv.vmm.disk.choice import ExportKind, choose_exporter
from aenv.vmm.disk.protocol import DiskExport, DiskExporter

MIB = 1 << 20
SIZE = 24 * MIB
CLUSTER = qcow2.CLUSTER


async def exporter_of(kind: str) -> DiskExporter:
    """Skips the test where that way of exporting does not work."""
    if os.geteuid() != 0:
        pytest.skip("exporting disks needs root")
    try:
        return await choose_exporter(ExportKind(kind))
    except VmmError as error:
        if os.environ.get("AENV_TEST_DISK_EXPORTS"):  # the lab has all of them
            raise
        pytest.skip(str(error))


@pytest.fixture(params=["fuse", "ublk"])
async def exporter(request: pytest.FixtureRequest) -> DiskExporter:
    return await exporter_of(str(request.param))


@pytest.fixture
def seeded() -> Iterator[random.Random]:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")  # pytest shows it when the test fails
    yield random.Random(seed)


def make_base(path: Path, size: int = SIZE) -> bytearray:
    """A raw base of which a third has data; what it reads as."""
    content = bytearray(size)
    for at in range(0, size, 3 * MIB):
        content[at : at + MIB] = random.Random(at).randbytes(MIB)
    path.write_bytes(content)
    return content


def check(path: Path) -> str:
    """What ``qemu-img check`` says of a qcow2; raises when it is not clean."""
    return subprocess.run(
        ["qemu-img", "check", "-f", "qcow2", str(path)], check=True, capture_output=True, text=True
    ).stdout


def contents(disk: Path) -> bytes:
    """All of a chain as QEMU itself reads it. The disk may be exported at the same time."""
    raw = disk.with_suffix(".converted")
    try:
        subprocess.run(["qemu-img", "convert", "-U", "-f", "qcow2", "-O", "raw", str(disk), str(raw)], check=True)
        return raw.read_bytes()
    finally:
        raw.unlink(missing_ok=True)


class Guest:
    """Writes as a VMM does: opens the exported path and keeps it open."""

    def __init__(self, export: DiskExport, model: bytearray) -> None:
        self.model = model
        self._fd = os.open(export.path, os.O_RDWR | os.O_CLOEXEC)

    def write(self, at: int, data: bytes) -> None:
        assert os.pwrite(self._fd, data, at) == len(data)
        self.model[at : at + len(data)] = data

    def read(self, at: int, length: int) -> bytes:
        return os.pread(self._fd, length, at)

    def discard(self, at: int, length: int) -> None:
        """Make it read as zeros, giving the space back."""
        subprocess.run(
            ["fallocate", "-p", "-o", str(at), "-l", str(length), f"/proc/{os.getpid()}/fd/{self._fd}"], check=True
        )
        self.model[at : at + length] = bytes(length)

    def sync(self) -> None:
        os.fsync(self._fd)

    def verify(self) -> None:
        """Everything reads as it should, past every cache of this side."""
        self.sync()
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for at in range(0, len(self.model), MIB):
            assert self.read(at, MIB) == self.model[at : at + MIB], f"differs in the MiB at {at}"

    def random_step(self, dice: random.Random) -> None:
        at = dice.randrange(0, len(self.model) // 512) * 512
        length = min(dice.choice([512, 4096, 65536, 200 * 1024]), len(self.model) - at)
        if dice.random() < 0.15:
            # Whole clusters: of less, a FUSE export says that it cannot.
            at -= at % CLUSTER
            self.discard(at, min(-(-length // CLUSTER) * CLUSTER, len(self.model) - at))
        elif dice.random() < 0.1:
            self.write(at, bytes(length))
        else:
            self.write(at, dice.randbytes(length))

    def close(self) -> None:
        with contextlib.suppress(OSError):  # its daemon may be dead
            os.close(self._fd)


class Bench:
    """One disk on a base in a folder, exported once."""

    def __init__(self, folder: Path, exporter: DiskExporter) -> None:
        self.folder = folder
        self.exporter = exporter
        self.runtime = folder / "run"
        self.runtime.mkdir()
        self.model = make_base(folder / "base.raw")
        self.disk = folder / "0.qcow2"
        qcow2.create_overlay(self.disk, folder / "base.raw", form="raw")
        self._open: list[DiskExport] = []

    async def export(self, disk: Path | None = None) -> DiskExport:
        export = await self.exporter.export("test", disk or self.disk, self.runtime)
        self._open.append(export)
        return export

    async def adopt(self) -> DiskExport | None:
        export = await self.exporter.adopt("test", self.runtime)
        if export is not None:
            self._open.append(export)
        return export

    async def close(self) -> None:
        for export in self._open:
            await export.close()


@pytest.fixture
async def bench(tmp_path: Path, exporter: DiskExporter) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, exporter)
    yield made
    await made.close()
