"""The hypervisor boundary against real VMs."""

# ruff: noqa: ASYNC221, ASYNC240 - nothing else runs on a test's event loop

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aenv.errors import CapacityError, VmmError
from aenv.storage import lsmt, qcow2
from aenv.storage.merge import merge_layers
from aenv.vmm.protocol import MachineShape, MemoryImage, NetworkAttachment
from aenv.vmm.qemu_vmm import QemuVmm
from tests.vmm.conftest import SHAPE, Children, Frozen, Namespaces, ask


async def test_children_of_one_snapshot_are_independent(children: Children, frozen: Frozen) -> None:
    a = await children.restore("a", frozen)
    assert int(await ask(a, "count")) < frozen.count + 10_000, "it went on from the snapshot, not from a later time"
    b = await children.restore("b", frozen)
    for vm in (a, b):
        assert await ask(vm, "sum") == frozen.memory_sum
        assert await ask(vm, "dsum 3") == frozen.disk_sum
    written, filled = await ask(a, "dwrite 3 99"), await ask(a, "fill 4 99")
    assert (await ask(a, "dsum 3"), await ask(a, "sum")) == (written, filled)
    assert (await ask(b, "dsum 3"), await ask(b, "sum")) == (frozen.disk_sum, frozen.memory_sum)


async def test_a_delta_restores_over_the_same_base(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    expected = await ask(vm, "fill 6 42"), await ask(vm, "dwrite 5 43")
    await vm.stop()
    stats = await vm.capture(tmp_path / "state", tmp_path / "delta")
    await vm.rebase_disk(tmp_path / "later.qcow2")
    assert stats.memory_bytes < 64 << 20
    assert stats.stall < 5
    await vm.cont()
    # The source diverges; the child must not see it.
    await ask(vm, "fill 6 1")
    await ask(vm, "dwrite 5 1")
    again = replace(
        frozen,
        memory=MemoryImage(frozen.memory.base, tmp_path / "delta"),
        state=tmp_path / "state",
        disk=tmp_path / "a.qcow2",
    )
    child = await children.restore("b", again)
    assert (await ask(child, "sum"), await ask(child, "dsum 5")) == expected

    # A delta of that child is relative to the base again, so chains never grow; composing gives the same guest.
    await child.stop()
    await child.capture(tmp_path / "state2", tmp_path / "delta2")
    await child.rebase_disk(tmp_path / "child.qcow2")
    await asyncio.to_thread(
        lsmt.compose, frozen.memory.base, tmp_path / "delta2", tmp_path / "composed", durable=False
    )
    last = replace(
        again,
        memory=MemoryImage(tmp_path / "composed", None),
        state=tmp_path / "state2",
        disk=tmp_path / "b.qcow2",
    )
    grandchild = await children.restore("c", last)
    assert (await ask(grandchild, "sum"), await ask(grandchild, "dsum 5")) == expected


async def test_memory_that_became_zero_stays_zero(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    zeroed = await ask(vm, "zero")
    await vm.stop()
    stats = await vm.capture(tmp_path / "state", tmp_path / "delta")
    await vm.rebase_disk(tmp_path / "later.qcow2")
    assert stats.zero_bytes >= 8 << 20
    memory = MemoryImage(frozen.memory.base, tmp_path / "delta")
    child = await children.restore(
        "b", replace(frozen, memory=memory, state=tmp_path / "state", disk=tmp_path / "a.qcow2")
    )
    assert await ask(child, "sum") == zeroed


async def test_the_disk_freezes_while_the_guest_runs(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    for number in range(1, 6):
        before = await ask(vm, f"dwrite 1 {number}")
        overlay = tmp_path / f"layer{number}.qcow2"
        await vm.rebase_disk(overlay)
        assert await ask(vm, "dsum 1") == before
    assert len(qcow2.backing_chain(overlay)) == 8  # 5 layers, a.qcow2, the snapshot's disk, the raw base
    with pytest.raises(FileExistsError):
        await vm.rebase_disk(overlay)
    assert await ask(vm, "dsum 1") == before
    check = subprocess.run(["qemu-img", "check", "-U", tmp_path / "layer3.qcow2"], capture_output=True, check=False)
    assert check.returncode == 0, check.stderr


async def test_two_vcpus_and_memory_above_four_gib(
    vmm: QemuVmm, children: Children, namespaces: Namespaces, tmp_path: Path
) -> None:
    shape = MachineShape(vcpus=2, memory_mib=4096)  # microvm maps what is over 3 GiB at the guest address 4 GiB
    with (tmp_path / "base.raw").open("wb") as file:
        file.truncate(8 << 20)
    qcow2.create_overlay(tmp_path / "disk.qcow2", tmp_path / "base.raw", form="raw")
    network = namespaces.take()
    vm = await vmm.boot("large", shape, network, tmp_path / "disk.qcow2", {})
    try:
        filled = await ask(vm, "fill 16 5", 120)
        await vm.stop()
        await vm.capture(tmp_path / "state", tmp_path / "delta")
        await vm.rebase_disk(tmp_path / "later.qcow2")
    finally:
        await vm.kill()
        namespaces.give_back(network)
    with lsmt.Layer(tmp_path / "delta") as layer:
        assert layer.virtual_size == 4 << 30
        assert int(layer.extents.offset.max()) > 3 << 30, "the kernel uses the upper memory first"
    await asyncio.to_thread(lsmt.compose, None, tmp_path / "delta", tmp_path / "memory", durable=False)
    for delta, name in ((None, "a"), (tmp_path / "delta2", "b")):
        child = await children.spawn(name, shape)
        overlay = tmp_path / f"{name}.qcow2"
        qcow2.create_overlay(overlay, tmp_path / ("disk.qcow2" if delta is None else "a.qcow2"))
        state = tmp_path / ("state" if delta is None else "state2")
        await child.restore(MemoryImage(tmp_path / "memory", delta), state, overlay)
        assert await ask(child, "sum") == filled
        await child.stop()
        await child.capture(tmp_path / "state2", tmp_path / "delta2")
        await child.rebase_disk(tmp_path / f"{name}-later.qcow2")


async def test_stop_and_cont_are_idempotent(children: Children, frozen: Frozen) -> None:
    vm = await children.restore("a", frozen)
    await vm.stop()
    await vm.stop()
    await vm.cont()
    await vm.cont()
    first = int(await ask(vm, "count"))
    await asyncio.sleep(0.2)
    assert int(await ask(vm, "count")) > first


async def test_a_killed_process_is_an_error_at_once(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    await vm.stop()
    os.kill(vm.pid, signal.SIGKILL)
    began = time.monotonic()
    for call in (vm.stop, vm.cont):
        with pytest.raises(VmmError):
            await call()
    with pytest.raises(VmmError):
        await vm.capture(tmp_path / "state", tmp_path / "delta")
    with pytest.raises(VmmError):
        await vm.rebase_disk(tmp_path / "later.qcow2")
    assert await vm.wait() == -signal.SIGKILL
    assert time.monotonic() - began < 2
    assert not vm.alive
    assert not Path(f"/proc/{vm.pid}").exists(), "no zombie is left"
    assert not list(tmp_path.glob("*state*")) and not list(tmp_path.glob("*delta*"))


async def test_death_during_a_restore(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.spawn("a")
    qcow2.create_overlay(tmp_path / "a.qcow2", frozen.disk)
    task = asyncio.create_task(vm.restore(frozen.memory, frozen.state, tmp_path / "a.qcow2"))
    await asyncio.sleep(0.003)
    os.kill(vm.pid, signal.SIGKILL)
    with pytest.raises(VmmError):
        await asyncio.wait_for(task, 5)


async def test_a_broken_state_is_refused(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.spawn("a")
    qcow2.create_overlay(tmp_path / "a.qcow2", frozen.disk)
    whole = frozen.state.read_bytes()
    (tmp_path / "torn").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(VmmError, match="device state"):
        await vm.restore(frozen.memory, tmp_path / "torn", tmp_path / "a.qcow2")


async def test_missing_files_are_refused(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.spawn("a")
    with pytest.raises(VmmError, match=r"nothing\.qcow2"):
        await vm.restore(frozen.memory, frozen.state, tmp_path / "nothing.qcow2")


async def test_adoption(vmm: QemuVmm, children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    await ask(vm, "fill 3 3")
    vm.detach()
    adopted = await vmm.adopt(vm.id)
    assert adopted is not None
    assert adopted.alive and adopted.pid == vm.pid and adopted.shape == SHAPE and vm.id in vmm.known()
    await adopted.stop()
    await adopted.capture(tmp_path / "state", tmp_path / "delta")
    await adopted.rebase_disk(tmp_path / "later.qcow2")
    await adopted.cont()
    memory = MemoryImage(frozen.memory.base, tmp_path / "delta")
    child = await children.restore(
        "b", replace(frozen, memory=memory, state=tmp_path / "state", disk=tmp_path / "a.qcow2")
    )
    assert await ask(child, "sum") == await ask(adopted, "sum")
    await adopted.kill()
    assert vm.id not in vmm.known()
    assert await vmm.adopt(vm.id) is None


async def test_adoption_cleans_up_after_the_dead(vmm: QemuVmm, children: Children, frozen: Frozen) -> None:
    vm = await children.restore("a", frozen)
    vm.detach()
    os.kill(vm.pid, signal.SIGKILL)
    await vm.wait()
    assert vm.id in vmm.known()
    assert await vmm.adopt(vm.id) is None
    assert vm.id not in vmm.known()


async def test_adoption_finds_a_process_whose_pid_was_never_noted(vmm: QemuVmm, children: Children) -> None:
    vm = await children.spawn("a")
    vm.detach()
    (vm.directory / "process.json").unlink()
    assert await vmm.adopt(vm.id) is None
    await asyncio.wait_for(vm.wait(), 5)
    assert vm.id not in vmm.known()


async def test_fingerprints(vmm: QemuVmm) -> None:
    here = vmm.fingerprint
    assert here.mismatches(here) == []
    other = replace(here, vmm_version="9.2.0", kernel_sha256="0" * 64)
    assert len(other.mismatches(here)) == 2
    assert "vmm version is 10." in other.mismatches(here)[0]


async def test_a_namespace_that_does_not_exist(vmm: QemuVmm) -> None:
    with pytest.raises(VmmError, match="namespace"):
        await vmm.spawn("nowhere", SHAPE, NetworkAttachment("no-such-netns", "tap0", "02:00:00:00:00:01"))
    assert "nowhere" not in vmm.known()


async def test_qemu_says_why_it_does_not_start(vmm: QemuVmm, children: Children) -> None:
    other = await children.spawn("a")
    network = replace(other.network, tap="lo")
    with pytest.raises(VmmError, match="lo"):
        await vmm.spawn("notap", SHAPE, network)
    assert "notap" not in vmm.known()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", directory], check=True)
    yield directory
    subprocess.run(["umount", "-l", directory], check=True)


async def test_a_full_disk_leaves_the_vm_as_it_was(
    children: Children, frozen: Frozen, small_disk: Path, tmp_path: Path
) -> None:
    vm = await children.restore("a", frozen)
    filled = await ask(vm, "fill 8 8")
    await vm.stop()
    with pytest.raises(CapacityError):
        await vm.capture(small_disk / "state", small_disk / "delta")
    assert list(small_disk.iterdir()) == []
    (small_disk / "filler").write_bytes(bytes(2 << 20))
    with pytest.raises(CapacityError):
        await vm.capture(small_disk / "state", small_disk / "delta")
    with pytest.raises(CapacityError):
        await vm.rebase_disk(small_disk / "overlay.qcow2")
    await vm.cont()
    assert await ask(vm, "sum") == filled
    await vm.stop()
    await vm.capture(tmp_path / "state", tmp_path / "delta")


async def test_a_guest_waits_while_the_disk_is_full(children: Children, frozen: Frozen, small_disk: Path) -> None:
    """An I/O error would shut its file system down for good, as ext4 does when its journal cannot be written."""
    vm = await children.spawn("a")
    overlay = small_disk / "a.qcow2"
    qcow2.create_overlay(overlay, frozen.disk)
    await vm.restore(frozen.memory, frozen.state, overlay)
    assert await ask(vm, "ping") == "pong"
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space"), filler.open("wb") as file:
        file.write(bytes(4 << 20))
    writing = asyncio.create_task(ask(vm, "dwrite 1 9"))
    await asyncio.sleep(3)
    assert not writing.done() and vm.alive
    filler.unlink()
    assert await ask(vm, "dsum 1") == await writing


async def test_a_guest_captured_while_the_disk_is_full_writes_on_elsewhere(
    children: Children, frozen: Frozen, small_disk: Path, tmp_path: Path
) -> None:
    vm = await children.spawn("a")
    overlay = small_disk / "a.qcow2"
    qcow2.create_overlay(overlay, frozen.disk)
    await vm.restore(frozen.memory, frozen.state, overlay)
    assert await ask(vm, "ping") == "pong"
    with pytest.raises(OSError, match="No space"), (small_disk / "filler").open("wb") as file:
        file.write(bytes(4 << 20))
    writing = asyncio.create_task(ask(vm, "dwrite 1 9", 20))
    await asyncio.sleep(2)
    await vm.stop()
    await vm.capture(tmp_path / "state", tmp_path / "delta")
    await vm.kill()
    await asyncio.gather(writing, return_exceptions=True)
    again = await children.spawn("b")
    qcow2.create_overlay(tmp_path / "b.qcow2", overlay)
    await again.restore(MemoryImage(frozen.memory.base, tmp_path / "delta"), tmp_path / "state", tmp_path / "b.qcow2")
    other = await children.restore("c", frozen)
    expected = await ask(other, "dwrite 1 9")
    assert await ask(again, "dsum 1") == expected


async def test_a_snapshot_of_another_size_is_refused(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.spawn("a", replace(SHAPE, memory_mib=SHAPE.memory_mib * 2))
    qcow2.create_overlay(tmp_path / "a.qcow2", frozen.disk)
    with pytest.raises(VmmError):
        await vm.restore(frozen.memory, frozen.state, tmp_path / "a.qcow2")


async def test_the_layers_below_a_running_disk_are_replaced(
    children: Children, frozen: Frozen, tmp_path: Path
) -> None:
    vm = await children.restore("a", frozen)
    sums, layers = {}, [tmp_path / "a.qcow2"]
    for number in range(1, 7):
        sums[number] = await ask(vm, f"dwrite {number} {number + 50}")
        layers.append(tmp_path / f"layer{number}.qcow2")
        await vm.rebase_disk(layers[-1])
    for turn, kept in ((1, frozen.disk), (2, frozen.disk)):
        active, merged = layers[-1], tmp_path / f"merged{turn}.qcow2"
        await merge_layers(layers[-2], kept, "qcow2", merged)
        writing = asyncio.create_task(ask(vm, f"dwrite {turn + 10} 77"))
        await vm.replace_backing(merged)
        assert qcow2.backing_chain(active)[1:] == [merged, *qcow2.backing_chain(frozen.disk)]
        sums[turn + 10] = await writing
        for layer in layers[:-1]:
            layer.unlink()
        used = {str(fd.readlink()) for fd in Path(f"/proc/{vm.pid}/fd").iterdir()}
        assert not [name for name in used if name.startswith(str(tmp_path)) and "deleted" in name]
        layers = [merged, active, tmp_path / f"over{turn}.qcow2"]
        assert {number: await ask(vm, f"dsum {number}") for number in sums} == sums
        await vm.rebase_disk(layers[-1])
        sums[turn] = await ask(vm, f"dwrite {turn} 99")
    await vm.stop()
    await vm.capture(tmp_path / "state", tmp_path / "delta")
    await vm.kill()
    child = await children.restore(
        "b",
        replace(
            frozen,
            memory=MemoryImage(frozen.memory.base, tmp_path / "delta"),
            state=tmp_path / "state",
            disk=layers[-1],
        ),
    )
    assert {number: await ask(child, f"dsum {number}") for number in sums} == sums


async def test_a_backing_that_is_missing_leaves_the_disk_as_it_was(
    children: Children, frozen: Frozen, tmp_path: Path
) -> None:
    vm = await children.restore("a", frozen)
    written = await ask(vm, "dwrite 2 3")
    before = qcow2.backing_chain(tmp_path / "a.qcow2")
    with pytest.raises(VmmError):
        await vm.replace_backing(tmp_path / "nothing.qcow2")
    assert qcow2.backing_chain(tmp_path / "a.qcow2") == before
    assert await ask(vm, "dsum 2") == written
