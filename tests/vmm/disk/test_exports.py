"""What every way of exporting a disk must do, against a plain copy of the disk in memory."""

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.storage import qcow2
from aenv.storage.merge import merge_layers
from aenv.vmm.disk.protocol import DiskExport

from .conftest import MIB, SIZE, Bench, Guest, check, contents


async def step(guest: Guest, dice: random.Random, times: int) -> None:
    def work() -> None:
        for _ in range(times):
            guest.random_step(dice)

    await asyncio.to_thread(work)


async def test_reads_and_writes_go_to_the_top_of_the_chain(bench: Bench, seeded: random.Random) -> None:
    before = (bench.folder / "base.raw").read_bytes()
    export = await bench.export()
    assert await export.disk() == bench.disk
    guest = Guest(export, bench.model)
    try:
        guest.verify()
        await step(guest, seeded, 150)
        guest.verify()
    finally:
        guest.close()
    await export.close()
    assert check(bench.disk) and contents(bench.disk) == bench.model
    assert (bench.folder / "base.raw").read_bytes() == before, "the base is never written"
    assert list(bench.runtime.iterdir()) == [], "nothing is left of an export that was closed"


async def test_close_may_be_repeated(bench: Bench) -> None:
    export = await bench.export()
    await export.close()
    await export.close()


async def test_a_frozen_file_has_all_that_was_written_before_and_nothing_that_came_after(
    bench: Bench, seeded: random.Random
) -> None:
    export = await bench.export()
    guest = Guest(export, bench.model)
    frozen: list[tuple[Path, bytes]] = []
    try:
        for number in range(1, 4):
            await step(guest, seeded, 60)
            was, now = bytes(guest.model), bench.folder / f"{number}.qcow2"
            frozen.append((await export.disk(), was))
            await export.rebase(now)
            assert await export.disk() == now
            # No fsync by the guest is needed for this.
            assert contents(frozen[-1][0]) == was
        await step(guest, seeded, 60)
        guest.verify()
    finally:
        guest.close()
    await export.close()
    for path, was in frozen:
        check(path)
        assert contents(path) == was
    assert contents(bench.folder / "3.qcow2") == bench.model
    assert qcow2.backing_chain(bench.folder / "3.qcow2")[-1] == bench.folder / "base.raw"


async def test_rebase_while_the_guest_writes(bench: Bench, seeded: random.Random) -> None:
    """Each 4 KiB block holds a number that only grows: a frozen file is a moment, never before what it must hold."""
    export = await bench.export()
    guest = Guest(export, bench.model)
    blocks, done, stop = 64, 0, False
    more = asyncio.Event()
    loop = asyncio.get_running_loop()

    def writer() -> None:
        nonlocal done
        while not stop:
            done += 1
            guest.write(done % blocks * 256 * 1024, done.to_bytes(8, "big") * 512)
            loop.call_soon_threadsafe(more.set)

    def written(image: bytes) -> int:
        return max(int.from_bytes(image[n * 256 * 1024 :][:8], "big") for n in range(blocks))

    for n in range(blocks):
        guest.write(n * 256 * 1024, bytes(4096))
    work = asyncio.create_task(asyncio.to_thread(writer))
    try:
        for number in range(1, 5):
            target = done + 100
            while done < target:
                more.clear()
                await more.wait()
            before, path = done - 1, await export.disk()
            await export.rebase(bench.folder / f"{number}.qcow2")
            image = await asyncio.to_thread(contents, path)
            assert written(image) >= before, "a write that was acknowledged is missing"
    finally:
        stop = True
        await work
        guest.verify()
        guest.close()


async def test_a_rebase_that_fails_changes_nothing(bench: Bench, seeded: random.Random) -> None:
    export = await bench.export()
    guest = Guest(export, bench.model)
    try:
        with pytest.raises((VmmError, OSError)):
            await export.rebase(bench.folder / "missing" / "1.qcow2")
        taken = bench.folder / "taken.qcow2"
        taken.write_text("not a disk")
        with pytest.raises((VmmError, OSError)):
            await export.rebase(taken)
        assert taken.read_text() == "not a disk"
        assert await export.disk() == bench.disk
        await step(guest, seeded, 20)
        guest.verify()
    finally:
        guest.close()


async def test_layers_below_are_replaced_by_one_while_the_guest_writes(bench: Bench, seeded: random.Random) -> None:
    export = await bench.export()
    guest = Guest(export, bench.model)
    try:
        for number in range(1, 4):
            await step(guest, seeded, 40)
            await export.rebase(bench.folder / f"{number}.qcow2")
        merged = bench.folder / "merged.qcow2"
        await merge_layers(bench.folder / "2.qcow2", bench.folder / "base.raw", "raw", merged)
        writing = asyncio.create_task(step(guest, seeded, 100))
        await export.replace_backing(merged)
        await writing
        assert qcow2.read_header(bench.folder / "3.qcow2").backing == merged
        for number in range(3):
            (bench.folder / f"{number}.qcow2").unlink()
        guest.verify()
        assert open_files(export, bench.folder) == {"3.qcow2", "merged.qcow2", "base.raw"}
        await export.rebase(bench.folder / "4.qcow2")
        await step(guest, seeded, 40)
        guest.verify()
    finally:
        guest.close()
    await export.close()
    check(bench.folder / "3.qcow2")
    assert contents(bench.folder / "4.qcow2") == bench.model


def open_files(export: DiskExport, folder: Path) -> set[str]:
    """Which files of ``folder`` the daemon holds open, deleted ones too."""
    pid = export.pid  # type: ignore[attr-defined]
    links = [entry.readlink() for entry in Path(f"/proc/{pid}/fd").iterdir()]
    return {link.name for link in links if link.parent == folder}


async def test_grow(bench: Bench, seeded: random.Random) -> None:
    export = await bench.export()
    guest = Guest(export, bench.model)
    await step(guest, seeded, 40)
    for size in (SIZE + 3 * MIB, 600 * MIB):  # the second needs another L1 entry
        await export.grow(size)
        guest.close()
        guest = Guest(export, bench.model)
        with export.path.open("rb") as file:
            assert file.seek(0, os.SEEK_END) == size
        bench.model.extend(bytes(size - len(bench.model)))
        guest.write(size - 4096, b"end!" * 1024)
        guest.write(SIZE - 4096, b"over" * 2048)
    try:
        guest.verify()
        with pytest.raises(VmmError):
            await export.grow(SIZE)
    finally:
        guest.close()
    await export.close()
    check(bench.disk)
    assert contents(bench.disk) == bench.model


async def test_a_server_that_died_finds_its_export_again(bench: Bench, seeded: random.Random) -> None:
    export = await bench.export()
    guest = Guest(export, bench.model)
    try:
        await step(guest, seeded, 20)
        export.detach()  # type: ignore[attr-defined]
        again = await bench.adopt()
        assert again is not None
        assert (again.path, await again.disk()) == (export.path, bench.disk)
        await again.rebase(bench.folder / "1.qcow2")
        await step(guest, seeded, 20)
        guest.verify()
    finally:
        guest.close()
    await again.close()
    assert contents(bench.folder / "1.qcow2") == bench.model


async def test_nothing_to_adopt(bench: Bench) -> None:
    assert await bench.adopt() is None
    export = await bench.export()
    await export.close()
    assert await bench.adopt() is None


async def test_a_daemon_that_was_never_noted_is_ended(bench: Bench) -> None:
    export = await bench.export()
    export.detach()  # type: ignore[attr-defined]
    pid = export.pid  # type: ignore[attr-defined]
    (bench.runtime / "export.json").unlink()
    watch = os.pidfd_open(pid)
    try:
        assert await bench.adopt() is None
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(watch, ended.set)
        await ended.wait()
        asyncio.get_running_loop().remove_reader(watch)
    finally:
        os.close(watch)
    assert list(bench.runtime.iterdir()) == []
    second = await bench.export()
    assert await second.disk() == bench.disk


async def test_a_disk_that_cannot_be_opened_says_why(bench: Bench) -> None:
    for name, text in (("absent.qcow2", None), ("text.qcow2", "not a disk")):
        path = bench.folder / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(VmmError, match=name):
            await bench.export(path)
        assert list(bench.runtime.iterdir()) == []


async def test_a_missing_layer_is_named(bench: Bench) -> None:
    shutil.move(bench.folder / "base.raw", bench.folder / "gone")
    with pytest.raises(VmmError, match=r"base\.raw"):
        await bench.export()


async def test_a_killed_daemon_loses_nothing_that_was_flushed(bench: Bench, seeded: random.Random) -> None:
    export = await bench.export()
    guest = Guest(export, bench.model)
    try:
        await step(guest, seeded, 60)
        await export.rebase(bench.folder / "1.qcow2")
        os.kill(export.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert contents(bench.disk) == bench.model
    finally:
        guest.close()
