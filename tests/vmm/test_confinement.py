"""QEMU in its jail: what it sees and may do, while its VM boots, is restored, saved and compacted."""

# ruff: noqa: ASYNC240 - nothing else runs on a test's event loop

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.storage import qcow2
from aenv.storage.merge import merge_layers
from aenv.vmm.jail_root import NULL
from aenv.vmm.protocol import MemoryImage
from aenv.vmm.qemu import STATE, QemuVm
from aenv.vmm.qemu_record import Record
from aenv.vmm.qemu_vmm import QemuVmm, memory_limit
from tests.node.process import wait_for
from tests.vmm.conftest import SHAPE, Children, Frozen, Namespaces, ask
from tests.vmm.test_jail import mounts_of, reached_the_host, status_of

pytestmark = pytest.mark.skipif(os.environ.get("AENV_TEST_JAIL") == "off", reason="AENV_TEST_JAIL=off")


def files_of(vm: QemuVm) -> set[str]:
    """Every file that the process can name, but for the null device that each jail has."""
    root = Path(f"/proc/{vm.pid}/root")
    return {f"/{path.relative_to(root)}" for path in root.rglob("*") if not path.is_dir()} - {NULL}


def given(vm: QemuVm, frozen: Frozen, *layers: Path) -> set[str]:
    """What a VM that runs needs."""
    disks = {str(path) for layer in layers for path in qcow2.backing_chain(layer)}
    return {str(vm.directory / STATE), str(frozen.memory.base), *disks}


async def has_only(vm: QemuVm, expected: set[str]) -> None:
    """What QEMU has read and needs no more goes while the guest runs already, perhaps while we look."""

    def looks_so() -> bool:
        try:
            return files_of(vm) == expected
        except FileNotFoundError:
            return False

    await asyncio.to_thread(wait_for, looks_so, f"{vm.id} to have only its files", 20)


async def test_a_restored_vm_has_its_own_files_and_no_right(
    vmm: QemuVmm, children: Children, frozen: Frozen, tmp_path: Path
) -> None:
    vm = await children.restore("a", frozen)
    assert await ask(vm, "sum") == frozen.memory_sum
    status = status_of(vm.pid)
    user = int(status["Uid"].split()[0])
    assert user >= 1_880_000_000 and status["Uid"] == status["Gid"] == " ".join([str(user)] * 4)
    assert status["Groups"] == "" and status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert int(status["Seccomp_filters"]) == 2, "QEMU's own and the platform's"
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0, kind
    assert status["NSpid"].split()[-1] == "1"
    # Firmware and device state were read, and are gone.
    await has_only(vm, given(vm, frozen, tmp_path / "a.qcow2"))
    mounts = mounts_of(vm.pid)
    assert {path for path in mounts if path not in ("/", "/dev")} == files_of(vm)
    writable = {path for path, options in mounts.items() if "rw" in options}
    assert writable == {"/", "/dev", str(tmp_path / "a.qcow2"), str(vm.directory / STATE)}
    assert all({"nosuid", "noexec"} <= set(options) for options in mounts.values())
    for path in ("/", "/dev"):
        there = Path(f"/proc/{vm.pid}/root{path}").stat()
        assert there.st_uid == 0 and there.st_mode & 0o022 == 0, "it could make files there"
    for fd in Path(f"/proc/{vm.pid}/fd").iterdir():
        assert not fd.is_dir(), f"an open folder is a way out: {fd.readlink()}"
    assert Path(f"/proc/{vm.pid}/cwd").readlink() == Path("/")
    # Others' guests and the server cannot be read by it even if it knew where.
    assert Path(f"/proc/{vm.pid}/ns/net").stat().st_ino == Path(f"/run/netns/{vm.network.netns}").stat().st_ino

    groups = vmm.jailer.groups(vm.id)
    assert groups and all(str(vm.pid) in (group / "cgroup.procs").read_text().split() for group in groups)
    limits = [group / name for group in groups for name in ("memory.max", "memory.limit_in_bytes")]
    values = {int(file.read_text()) for file in limits if file.exists()}
    assert values == {memory_limit(SHAPE, vmm.platform.accelerator)}


async def test_a_waiting_process_is_confined_already(children: Children) -> None:
    vm = await children.spawn("a")
    firmware = files_of(vm) - {str(vm.directory / STATE)}
    assert firmware and all(path.startswith("/usr/share/") and path.endswith(".bin") for path in firmware)
    assert int(status_of(vm.pid)["CapEff"], 16) == 0
    assert not Path(f"/proc/{vm.pid}/root/etc").exists()


async def test_layers_are_given_and_taken_as_the_disk_changes(
    children: Children, frozen: Frozen, tmp_path: Path
) -> None:
    vm = await children.restore("a", frozen)
    first, second, third = tmp_path / "a.qcow2", tmp_path / "second.qcow2", tmp_path / "third.qcow2"
    user = first.stat().st_uid
    assert user != 0
    written = await ask(vm, "dwrite 1 1")
    await vm.rebase_disk(second)
    # A frozen layer is others' base from now on: not this one's to write any more, open or not.
    assert (first.stat().st_uid, first.stat().st_mode & 0o777) == (0, 0o644)
    assert (second.stat().st_uid, second.stat().st_mode & 0o777) == (user, 0o600)
    mounts = mounts_of(vm.pid)
    assert "ro" in mounts[str(first)] and "rw" in mounts[str(second)]
    await vm.rebase_disk(third)
    assert await ask(vm, "dsum 1") == written
    assert await vm.disk() == third

    merged = tmp_path / "merged.qcow2"
    await merge_layers(second, frozen.disk, "qcow2", merged)
    await vm.replace_backing(merged)
    assert files_of(vm) == given(vm, frozen, third), "merged layers would stay on the host's disk"
    assert str(merged) in files_of(vm) and str(first) not in files_of(vm)
    assert await ask(vm, "dsum 1") == written

    # Another VM, of another user, builds on what this one has frozen.
    await vm.stop()
    await vm.capture(tmp_path / "state", tmp_path / "delta")
    fourth = tmp_path / "fourth.qcow2"
    await vm.rebase_disk(fourth)
    await vm.cont()
    memory = MemoryImage(frozen.memory.base, tmp_path / "delta")
    child = await children.restore("b", replace(frozen, memory=memory, state=tmp_path / "state", disk=third))
    assert await ask(child, "dsum 1") == written == await ask(vm, "dsum 1")
    assert (tmp_path / "b.qcow2").stat().st_uid not in (0, user)


async def test_an_adopted_vm_is_as_confined_and_goes_on(
    vmm: QemuVmm, children: Children, frozen: Frozen, tmp_path: Path
) -> None:
    vm = await children.restore("a", frozen)
    before = given(vm, frozen, tmp_path / "a.qcow2")
    await has_only(vm, before)
    assert await ask(vm, "ping") == "pong"
    vm.detach()
    adopted = await vmm.adopt(vm.id)
    assert adopted is not None
    await adopted.rebase_disk(tmp_path / "later.qcow2")
    assert files_of(adopted) == before | {str(tmp_path / "later.qcow2")}
    written = await ask(adopted, "dwrite 1 7")
    await adopted.stop()
    await adopted.capture(tmp_path / "state", tmp_path / "delta")
    await adopted.cont()
    assert await ask(adopted, "dsum 1") == written
    groups = vmm.jailer.groups(vm.id)
    await adopted.kill()
    assert not any(group.exists() for group in groups)


async def test_a_server_that_died_before_it_had_confined_a_process(
    vmm: QemuVmm, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("aenv.vmm.jail.Jail.enclose", lambda *_: None)
        vm = await children.spawn("a")
    vm.detach()
    assert await vmm.adopt(vm.id) is None
    await asyncio.wait_for(vm.wait(), 5)
    assert vm.id not in vmm.known() and not any(group.exists() for group in vmm.jailer.groups(vm.id))


async def test_killing_leaves_nothing(vmm: QemuVmm, children: Children, frozen: Frozen, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    assert reached_the_host(tmp_path) == []
    groups, user = vmm.jailer.groups(vm.id), Record.read(vm.directory)
    assert user is not None and (link := Path("/run/aenv-users") / str(user.user)).is_symlink()
    await vm.kill()
    assert not any(group.exists() for group in groups) and not link.is_symlink()
    assert not vm.directory.exists() and not Path(f"/proc/{vm.pid}").exists()
    assert reached_the_host(tmp_path) == []


async def test_a_header_that_names_a_file_of_the_host(children: Children, frozen: Frozen, tmp_path: Path) -> None:
    """As a VMM that a guest took over could write it into its disk before that was frozen."""
    up = "/.." * (len(tmp_path.parts) - 1)
    for number, named in enumerate(("/etc/passwd", "/etc/../etc/passwd", f"{tmp_path}{up}/etc/passwd")):
        evil = tmp_path / f"evil{number}.qcow2"
        evil.write_bytes(qcow2.encode_overlay(64 << 20, named, "raw"))
        overlay = tmp_path / f"o{number}.qcow2"
        qcow2.create_overlay(overlay, evil)
        vm = await children.spawn(f"v{number}")
        with pytest.raises(VmmError, match="no layer of a disk"):
            await vm.restore(frozen.memory, frozen.state, overlay)
        assert "/etc/passwd" not in files_of(vm)


async def test_a_process_that_names_another_disk_is_not_believed(
    children: Children, frozen: Frozen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``Vm.disk`` is what a recovering server records as a sandbox's disk."""
    vm = await children.restore("a", frozen)
    assert await vm.disk() == tmp_path / "a.qcow2"
    for named in ("/etc/shadow", str(frozen.disk)):
        answer = [{"inserted": {"node-name": "root", "file": named}}]

        async def execute(command: str, *_: object, lie: object = answer) -> object:
            return lie

        with monkeypatch.context() as patch:
            patch.setattr(vm._qmp, "execute", execute)
            with pytest.raises(VmmError, match="was not given"):
                await vm.disk()


async def test_a_cold_boot_is_confined_before_the_guest_runs(
    vmm: QemuVmm, namespaces: Namespaces, tmp_path: Path
) -> None:
    with (tmp_path / "base.raw").open("wb") as file:
        file.truncate(8 << 20)
    disk = tmp_path / "disk.qcow2"
    qcow2.create_overlay(disk, tmp_path / "base.raw", form="raw")
    network = namespaces.take()
    vm = await vmm.boot("coldboot", SHAPE, network, disk, {})
    try:
        assert await ask(vm, "ping", 120) == "pong"
        memory = vm.console.parent / "memory"
        await has_only(vm, {str(memory), str(disk), str(tmp_path / "base.raw"), str(vm.directory / STATE)})
    finally:
        await vm.kill()
        namespaces.give_back(network)
        shutil.rmtree(vm.console.parent)


async def test_a_disk_that_cannot_be_opened_ends_a_boot(vmm: QemuVmm, namespaces: Namespaces, tmp_path: Path) -> None:
    network = namespaces.take()
    with pytest.raises(VmmError, match=r"nothing\.qcow2"):
        await vmm.boot("noboot", SHAPE, network, tmp_path / "nothing.qcow2", {})
    assert "noboot" not in vmm.known() and not any(group.exists() for group in vmm.jailer.groups("noboot"))
    namespaces.give_back(network)
