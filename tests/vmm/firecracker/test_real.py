"""The hypervisor boundary against real Firecracker VMs (``conftest.py`` says when they are skipped)."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.storage import lsmt, qcow2
from aenv.vmm import process
from aenv.vmm.firecracker.options import FirecrackerOptions, RateLimit
from aenv.vmm.firecracker.vm import FirecrackerVm
from aenv.vmm.firecracker.vmm import FirecrackerVmm
from aenv.vmm.protocol import MachineShape, MemoryImage, NetworkAttachment
from tests.vmm.conftest import GuestFiles, Namespaces
from tests.vmm.firecracker.conftest import Children, Frozen, make, say, snapshot


async def test_children_of_one_snapshot_are_independent(children: Children, frozen: Frozen) -> None:
    made = await asyncio.gather(*(children.restore(name, frozen) for name in "abcd"))
    for vm in made:
        assert await say(vm, "sum") == frozen.memory_sum
        assert await say(vm, "dsum 3") == frozen.disk_sum
        assert await say(vm, "reseeds") == "1"
    a, b = made[:2]
    assert int(await say(a, "count")) < frozen.count + 3000, "it went on from the snapshot, not from a later time"
    written, filled = await say(a, "dwrite 3 99"), await say(a, "fill 4 99")
    assert (await say(a, "dsum 3"), await say(a, "sum")) == (written, filled)
    assert (await say(b, "dsum 3"), await say(b, "sum")) == (frozen.disk_sum, frozen.memory_sum)


async def test_a_delta_restores_over_the_same_base(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    expected = await say(vm, "fill 6 42"), await say(vm, "dwrite 5 43")
    await vm.stop()
    await vm.stop()
    stats = await vm.capture(tmp_path / "state", tmp_path / "delta")
    await vm.rebase_disk(tmp_path / "later.qcow2")
    assert 6 << 20 < stats.memory_bytes < 64 << 20
    await vm.cont()
    # The source diverges; the child must not see it.
    await say(vm, "fill 6 1")
    await say(vm, "dwrite 5 1")
    again = replace(
        frozen,
        memory=MemoryImage(frozen.memory.base, tmp_path / "delta"),
        state=tmp_path / "state",
        disk=tmp_path / "a.qcow2",
    )
    child = await children.restore("b", again)
    assert (await say(child, "sum"), await say(child, "dsum 5")) == expected
    assert await say(child, "reseeds") == "2", "the generation id is new, though the delta has the old one"

    # A second capture of the same VM, and one of the child, are relative to the base again: chains never grow.
    await vm.stop()
    await vm.capture(tmp_path / "state3", tmp_path / "delta3")
    await vm.cont()
    await child.stop()
    await child.capture(tmp_path / "state2", tmp_path / "delta2")
    await child.rebase_disk(tmp_path / "child.qcow2")
    await asyncio.to_thread(lsmt.compose, frozen.memory.base, tmp_path / "delta2", tmp_path / "composed", False)
    last = replace(again, memory=MemoryImage(tmp_path / "composed", None), state=tmp_path / "state2")
    grandchild = await children.restore("c", replace(last, disk=tmp_path / "b.qcow2"))
    assert (await say(grandchild, "sum"), await say(grandchild, "dsum 5")) == expected
    assert await say(grandchild, "reseeds") == "3"
    with pytest.raises(VmmError, match="already"):
        await grandchild.restore(frozen.memory, frozen.state, frozen.disk)


async def test_packets_that_arrive_meanwhile_do_no_harm(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    """Firecracker puts them into memory also of a paused VM, and of one whose memory is not complete yet."""
    vm = await children.restore("a", frozen)
    image, state, disk = frozen.memory, frozen.state, tmp_path / "a.qcow2"
    for number in range(3):
        filled = await say(vm, f"fill 2 {number}")
        await vm.stop()
        with packets(vm.network):
            await vm.capture(tmp_path / f"state{number}", tmp_path / f"delta{number}")
        await vm.rebase_disk(tmp_path / f"later{number}.qcow2")
        await vm.kill()
        image, state = MemoryImage(frozen.memory.base, tmp_path / f"delta{number}"), tmp_path / f"state{number}"
        again = replace(frozen, memory=image, state=state, disk=disk)
        vm = await children.spawn(f"b{number}")
        with packets(vm.network):
            vm = await children.fill(vm, f"b{number}", again)
        disk = tmp_path / f"b{number}.qcow2"
        assert await say(vm, "sum") == filled


async def test_memory_that_the_guest_freed_is_taken_back_and_stays_out_of_captures(
    children: Children, frozen: Frozen, tmp_path: Path
) -> None:
    vm = await children.restore("a", frozen)
    await say(vm, "fill 100 3")
    kept = resident(vm.pid)
    await say(vm, "release")
    await until(lambda: resident(vm.pid) < kept - (80 << 20))
    await vm.stop()
    stats = await vm.capture(tmp_path / "state", tmp_path / "delta")
    assert stats.memory_bytes < 40 << 20
    await vm.rebase_disk(tmp_path / "later.qcow2")
    await vm.cont()
    again = replace(
        frozen,
        memory=MemoryImage(frozen.memory.base, tmp_path / "delta"),
        state=tmp_path / "state",
        disk=tmp_path / "a.qcow2",
    )
    child = await children.restore("b", again)
    expected = await say(vm, "fill 60 9"), await say(child, "fill 60 9")
    assert (await say(vm, "sum"), await say(child, "sum")) == expected


async def test_the_disk_grows_and_changes_its_backing(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    size = int(await say(vm, "dsize"))
    await vm.grow_disk(size + (16 << 20))
    await until(lambda: says(vm, "dsize", str(size + (16 << 20))))
    written = await say(vm, f"dwrite {(size >> 20) + 15} 4")
    assert await vm.disk() == tmp_path / "a.qcow2"
    await vm.rebase_disk(tmp_path / "b.qcow2")
    assert await vm.disk() == tmp_path / "b.qcow2"
    assert await say(vm, f"dsum {(size >> 20) + 15}") == written


async def test_a_vm_outlives_its_server(
    fc: FirecrackerVmm, children: Children, frozen: Frozen, tmp_path: Path
) -> None:
    waiting, running = await children.spawn("w"), await children.restore("a", frozen)
    filled = await say(running, "fill 5 5")
    waiting.detach()
    running.detach()
    assert {waiting.id, running.id} <= set(fc.known())
    found = await fc.adopt(running.id)
    spare = await fc.adopt(waiting.id)
    assert found is not None and spare is not None
    assert await say(found, "sum") == filled
    await found.stop()
    stats = await found.capture(tmp_path / "state", tmp_path / "delta")
    assert stats.memory_bytes > 5 << 20
    await found.rebase_disk(tmp_path / "later.qcow2")
    again = replace(
        frozen,
        memory=MemoryImage(frozen.memory.base, tmp_path / "delta"),
        state=tmp_path / "state",
        disk=tmp_path / "a.qcow2",
    )
    overlay = tmp_path / "spare.qcow2"
    qcow2.create_overlay(overlay, again.disk)
    await spare.restore(again.memory, again.state, overlay)
    assert await say(spare, "sum") == filled
    for vm in (found, spare):
        await vm.kill()
        assert not vm.alive and vm.id not in fc.known()
    assert await fc.adopt(running.id) is None


async def test_a_process_that_died_is_swept(fc: FirecrackerVmm, children: Children, frozen: Frozen) -> None:
    vm = await children.restore("a", frozen)
    os.kill(vm.pid, signal.SIGKILL)
    await vm.wait()
    vm.detach()
    assert await fc.adopt(vm.id) is None
    assert vm.id not in fc.known()


async def test_a_torn_state_is_refused_with_firecrackers_own_words(
    children: Children, frozen: Frozen, tmp_path: Path
) -> None:
    torn = tmp_path / "torn"
    torn.write_bytes(frozen.state.read_bytes()[:-100])
    with pytest.raises(VmmError, match="/snapshot/load"):
        await children.restore("a", replace(frozen, state=torn))


async def test_memory_above_the_devices(
    fc: FirecrackerVmm, children: Children, namespaces: Namespaces, tmp_path: Path
) -> None:
    """3 GiB and more are in two pieces."""
    shape = MachineShape(2, 4096)
    frozen = await snapshot(fc, namespaces, tmp_path, shape)
    vm = await children.restore("a", frozen, shape)
    assert await say(vm, "sum") == frozen.memory_sum
    # The kernel takes high memory first, which is in the second piece.
    filled = await say(vm, "fill 300 8", 200)
    await vm.stop()
    await vm.capture(tmp_path / "state2", tmp_path / "delta2")
    await vm.rebase_disk(tmp_path / "later.qcow2")
    await vm.kill()
    again = replace(
        frozen,
        memory=MemoryImage(frozen.memory.base, tmp_path / "delta2"),
        state=tmp_path / "state2",
        disk=tmp_path / "a.qcow2",
    )
    child = await children.restore("b", again, shape)
    assert await say(child, "sum") == filled


async def test_limits_are_those_of_the_node(
    fc: FirecrackerVmm, guest_files: GuestFiles, namespaces: Namespaces, frozen: Frozen, tmp_path: Path
) -> None:
    """A snapshot that knew no limit runs under one, and without it again."""
    limited = await make(fc.binary, guest_files, tmp_path, FirecrackerOptions(disk=RateLimit(bandwidth=2 << 20)))
    slow, fast = Children(limited, namespaces, tmp_path), Children(fc, namespaces, tmp_path)
    try:
        vm = await slow.restore("slow", frozen)
        config = await vm.configuration()
        assert config["drives"][0]["rate_limiter"]["bandwidth"]["size"] == 2 << 20
        await vm.stop()
        await vm.capture(tmp_path / "state", tmp_path / "delta")
        again = replace(frozen, memory=MemoryImage(frozen.memory.base, tmp_path / "delta"), state=tmp_path / "state")
        config = await (await fast.restore("fast", again)).configuration()
        assert not (config["drives"][0]["rate_limiter"] or {}).get("bandwidth")
    finally:
        await slow.close()
        await fast.close()
        limited.close()


@contextlib.contextmanager
def packets(network: NetworkAttachment) -> Iterator[None]:
    """Broadcasts to the guest, as fast as they go, from before the body until after it."""
    ended, began = threading.Event(), threading.Event()

    def send() -> None:
        process.enter_network(network.netns)
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as wire:
            wire.bind((network.tap, 0))
            while not ended.is_set():
                with contextlib.suppress(OSError):  # nobody has opened the tap yet, or its queue is full
                    wire.send(b"\xff" * 6 + b"\x02" * 6 + b"\x88\xb5" + bytes(100))
                began.set()

    thread = threading.Thread(target=process.apart, args=(send,))
    thread.start()
    try:
        began.wait()
        yield
    finally:
        ended.set()
        thread.join()


def resident(pid: int) -> int:
    """Bytes of memory that the process has (statm of proc(5))."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def says(vm: FirecrackerVm, command: str, answer: str) -> bool:
    return await say(vm, command) == answer


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout: float = 60) -> None:
    async with asyncio.timeout(timeout):
        while True:
            answer = condition()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.02)
