"""A sandbox's whole life under KVM, through the official SDK, on each hypervisor.

The lab is 10 to 50 times slower than hardware: budgets are generous, and nothing here measures time.
"""

import re
import time
from pathlib import Path

import httpx
import pytest
from e2b import CommandExitException, NotFoundException, Sandbox

from tests.lab.conftest import LIFE, PATIENCE, WARM, Create, LabNode
from tests.node.process import wait_for

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("e2b_environment")]

KVM_STATISTICS = Path("/sys/kernel/debug/kvm")
COUNT = "n=0; while true; do n=$((n+1)); echo $n > /dev/shm/n; sleep 0.2; done"


def run(sandbox: Sandbox, command: str) -> str:
    return sandbox.commands.run(command, timeout=PATIENCE).stdout


def counting(sandbox: Sandbox) -> int:
    """Start a process that counts in memory; its pid."""
    handle = sandbox.commands.run(COUNT, background=True, timeout=0)
    wait_for(lambda: counted(sandbox), "the counter to start", PATIENCE)
    return int(handle.pid)


def counted(sandbox: Sandbox) -> int:
    return int(run(sandbox, "cat /dev/shm/n 2>/dev/null || echo 0").strip() or "0")


def resumed(sandbox: Sandbox) -> Sandbox:
    return Sandbox.connect(sandbox.sandbox_id, timeout=LIFE, request_timeout=PATIENCE)


def guest_exits(pid: int) -> int:
    """How often the processor left the guest of a process for its kernel, as the kernel counted."""
    return sum(int((folder / "exits").read_text()) for folder in KVM_STATISTICS.glob(f"{pid}-*"))


def test_a_guest_really_runs_on_kvm(create: Create, node: LabNode, api: httpx.Client) -> None:
    sandbox = create()
    pid = node.machine_of(sandbox)
    devices = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    assert {"anon_inode:kvm-vm", "anon_inode:kvm-vcpu:0"} <= devices
    before = guest_exits(pid)
    assert before > 0
    assert run(sandbox, "cat /sys/devices/system/clocksource/clocksource0/current_clocksource") == "kvm-clock\n"
    assert guest_exits(pid) > before
    # And what it restores from says so.
    snapshots = list(node.records("snapshots").values())
    assert snapshots
    for snapshot in snapshots:
        assert re.search(rf'"vmm": ?"{node.vmm}"', snapshot)
        assert re.search(r'"accelerator": ?"kvm"', snapshot)


def test_commands_and_files(create: Create) -> None:
    sandbox = create()
    assert run(sandbox, "id -un; pwd").split() == ["user", "/home/user"]
    with pytest.raises(CommandExitException) as failed:
        run(sandbox, "exit 7")
    assert failed.value.exit_code == 7
    blob = bytes(range(256)) * 1024
    sandbox.files.write("deep/er/blob", blob)
    assert bytes(sandbox.files.read("deep/er/blob", format="bytes")) == blob
    assert run(sandbox, "sha256sum < deep/er/blob; python3 -c 'print(6*7)'").split()[-1] == "42"
    assert [entry.name for entry in sandbox.files.list("deep")] == ["er"]


def test_pause_and_resume_keep_memory_processes_and_the_clock(create: Create, node: LabNode) -> None:
    sandbox = create()
    sandbox.files.write("kept", "yes")
    pid = counting(sandbox)
    machine = node.machine_of(sandbox)
    sandbox.pause()
    assert sandbox.get_info().state == "paused"
    wait_for(lambda: machine not in node.machines(), "the VM of the paused sandbox to go", PATIENCE)
    resumed(sandbox)
    before = counted(sandbox)
    assert before > 0
    wait_for(lambda: counted(sandbox) > before, "the counter to go on", PATIENCE)
    assert pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.files.read("kept") == "yes"
    # Between two looks at this clock the guest's lies; the restore set it.
    earliest = time.time()
    guest = float(run(sandbox, "date +%s.%N"))
    assert earliest - 0.5 <= guest <= time.time() + 0.5
    # Once more: the second capture is of a restored machine.
    run(sandbox, "echo again > twice; sync")
    sandbox.pause()
    resumed(sandbox)
    assert sandbox.files.read("twice") == "again\n"


def test_a_fork_of_four_is_four_machines_that_share_the_past_only(create: Create, node: LabNode) -> None:
    sandbox = create()
    sandbox.files.write("f", "before")
    pid = counting(sandbox)
    children = sandbox.fork(count=4, timeout=LIFE, request_timeout=PATIENCE)
    assert all(isinstance(child, Sandbox) for child in children), children
    forks = [child for child in children if isinstance(child, Sandbox)]
    assert len({node.machine_of(each) for each in (sandbox, *forks)}) == 5
    for number, child in enumerate(forks):
        assert child.files.read("f") == "before"
        assert pid in [process.pid for process in child.commands.list()]
        child.files.write("f", f"child {number}")
    assert [child.files.read("f") for child in forks] == [f"child {number}" for number in range(4)]
    assert sandbox.files.read("f") == "before"
    assert len({run(child, "cat /proc/sys/kernel/random/uuid") for child in forks}) == 4
    assert [run(child, "hostname").strip() for child in forks] == [child.sandbox_id for child in forks]


def test_a_snapshot_starts_sandboxes_and_leaves_its_source_alone(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("f", "then")
    pid = counting(sandbox)
    snapshot = sandbox.create_snapshot(request_timeout=PATIENCE)
    try:
        sandbox.files.write("f", "later")
        first, second = create(snapshot.snapshot_id), create(snapshot.snapshot_id)
        for child in (first, second):
            assert child.files.read("f") == "then"
            assert pid in [process.pid for process in child.commands.list()]
        # A snapshot of what was started from a snapshot.
        first.files.write("f", "first")
        again = first.create_snapshot(request_timeout=PATIENCE)
        try:
            assert create(again.snapshot_id).files.read("f") == "first"
        finally:
            Sandbox.delete_snapshot(again.snapshot_id)
        assert sandbox.files.read("f") == "later"
        assert second.files.read("f") == "then"
    finally:
        Sandbox.delete_snapshot(snapshot.snapshot_id)


def test_sandboxes_outlive_a_killed_server_and_are_adopted(create: Create, node: LabNode) -> None:
    running, paused = create(), create()
    running.files.write("f", "running")
    paused.files.write("f", "paused")
    pid = counting(running)
    paused.pause()
    machine = node.machine_of(running)
    node.kill9()
    assert machine in node.machines()
    node.start()
    assert node.machine_of(running) == machine
    assert running.files.read("f") == "running"
    assert pid in [process.pid for process in running.commands.list()]
    before = counted(running)
    wait_for(lambda: counted(running) > before, "the counter to go on", PATIENCE)
    # An adopted machine does all that another does.
    (child,) = running.fork(count=1, timeout=LIFE, request_timeout=PATIENCE)
    assert isinstance(child, Sandbox)
    assert child.files.read("f") == "running"
    running.pause()
    resumed(running)
    assert running.files.read("f") == "running"
    resumed(paused)
    assert paused.files.read("f") == "paused"


def test_a_killed_sandbox_leaves_nothing(create: Create, node: LabNode) -> None:
    sandbox = create()
    machine = node.machine_of(sandbox)
    sandbox.kill()
    wait_for(lambda: machine not in node.machines(), "its VM to end", PATIENCE)
    wait_for(lambda: sandbox.sandbox_id not in node.records("sandboxes"), "its record to go", PATIENCE)
    with pytest.raises(NotFoundException):
        sandbox.get_info()
    wait_for(lambda: len(node.machines()) <= WARM, "no VMs but the warm one", PATIENCE)
