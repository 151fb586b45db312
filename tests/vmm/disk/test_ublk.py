"""What only a ublk device can do: outlive its daemon, and wait for room on the host's disk."""

import asyncio
import os
import random
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from aenv.errors import CapacityError
from aenv.storage import qcow2
from aenv.vmm.disk.protocol import DiskExporter
from aenv.vmm.disk.ublk import UblkExport

from .conftest import MIB, Bench, Guest, check, contents, exporter_of


@pytest.fixture
async def exporter() -> DiskExporter:
    return await exporter_of("ublk")


@pytest.fixture
def devices() -> Iterator[None]:
    """No device is left."""
    before = set(Path("/dev").glob("ublk*"))
    yield
    assert set(Path("/dev").glob("ublk*")) == before


@pytest.fixture
async def bench(tmp_path: Path, devices: None, exporter: DiskExporter) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, exporter)
    yield made
    await made.close()


async def exported(bench: Bench) -> UblkExport:
    export = await bench.export()
    assert isinstance(export, UblkExport)
    return export


async def test_a_guest_does_not_notice_that_the_daemon_was_killed(bench: Bench, seeded: random.Random) -> None:
    export = await exported(bench)
    guest = Guest(export, bench.model)
    try:
        for number in range(1, 4):
            pid = export.pid

            def write_and_sync() -> None:
                for _ in range(60):
                    guest.random_step(seeded)
                guest.sync()  # what waits for an answer goes to the next daemon

            writing = asyncio.create_task(asyncio.to_thread(write_and_sync))
            os.kill(pid, signal.SIGKILL)
            await writing
            await export.rebase(bench.folder / f"{number}.qcow2")
            assert export.pid != pid
            await asyncio.to_thread(guest.verify)
    finally:
        guest.close()
    await export.close()
    for number in range(4):
        check(bench.folder / f"{number}.qcow2")
    assert contents(bench.folder / "3.qcow2") == bench.model


async def test_server_and_daemon_killed(bench: Bench, seeded: random.Random) -> None:
    export = await exported(bench)
    guest = Guest(export, bench.model)
    try:
        for _ in range(50):
            guest.random_step(seeded)
        await export.rebase(bench.folder / "1.qcow2")
        export.detach()
        os.kill(export.pid, signal.SIGKILL)
        again = await bench.adopt()
        assert again is not None
        assert (again.path, await again.disk()) == (export.path, bench.folder / "1.qcow2")
        for _ in range(50):
            guest.random_step(seeded)
        await asyncio.to_thread(guest.verify)
    finally:
        guest.close()
    await again.close()
    check(bench.folder / "1.qcow2")
    assert contents(bench.folder / "1.qcow2") == bench.model


async def test_devices_of_a_daemon_that_cannot_be_replaced_are_removed(bench: Bench) -> None:
    export = await exported(bench)
    export.detach()
    os.kill(export.pid, signal.SIGKILL)
    (bench.folder / "base.raw").unlink()
    assert await bench.adopt() is None
    assert not export.path.exists()


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 2 MiB, which can be made larger."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def enlarge(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=32m", folder], check=True)


async def test_writes_wait_while_the_disk_of_the_host_is_full(bench: Bench, small: Path) -> None:
    disk = small / "disk.qcow2"
    qcow2.create_overlay(disk, bench.folder / "base.raw", form="raw")
    export = await bench.export(disk)
    guest = Guest(export, bench.model)
    dice = random.Random(3)
    try:

        def fill() -> None:
            for at in range(0, 8 * MIB, MIB):
                guest.write(at, dice.randbytes(MIB))
            guest.sync()

        writing = asyncio.create_task(asyncio.to_thread(fill))
        await asyncio.wait({writing}, timeout=0)  # it has begun
        guest.write(8 * MIB, bytes(range(256)) * 16)  # so that there is something to sync
        with pytest.raises(CapacityError):
            while True:  # what the page cache has taken does not fit: to freeze it must fail
                await export.rebase(small / f"{os.urandom(4).hex()}.qcow2")
        assert not writing.done()
        await asyncio.to_thread(enlarge, small)
        await writing
        await export.rebase(small / "next.qcow2")
        await asyncio.to_thread(guest.verify)
    finally:
        await asyncio.to_thread(enlarge, small)
        guest.close()
    await export.close()
    assert contents(small / "next.qcow2") == bench.model
