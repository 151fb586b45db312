"""Pauses and snapshots without memory: only the disk is kept, and what comes back is a boot of it."""

import json
import os
import signal
import time
from pathlib import Path

import httpx
import pytest
from e2b import GuestUnresponsiveException, Sandbox, SandboxException
from e2b.exceptions import ServiceBusyException

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for
from tests.node.test_recovery import _die_during, _vm_pid, assert_nothing_leaked, restart


def boot_id(sandbox: Sandbox) -> str:
    return sandbox.commands.run("cat /proc/sys/kernel/random/boot_id").stdout.strip()


def snapshot_of(node: NodeProcess, sandbox: Sandbox) -> dict[str, object]:
    record = json.loads(node.records("sandboxes")[sandbox.sandbox_id])
    found: dict[str, object] = json.loads(node.records("snapshots")[record["snapshot_id"]])
    return found


def test_a_pause_without_memory_keeps_files_and_boots(create: Create, node: NodeProcess, api: httpx.Client) -> None:
    sandbox = create(envs={"COLOUR": "green"}, secure=True)
    sandbox.commands.run("sleep 1000", background=True, timeout=0)
    before = boot_id(sandbox)
    # Written the moment before the pause, and synced by nobody.
    sandbox.files.write("late", "not lost")
    assert sandbox.pause(mode="filesystem")
    assert sandbox.get_info().state == "paused"
    path = f"/sandboxes/{sandbox.sandbox_id}"
    assert api.get(path).json()["pauseMode"] == "filesystem"
    assert snapshot_of(node, sandbox)["memory_base"] is None
    folder = node.home / "snapshots" / str(snapshot_of(node, sandbox)["id"])
    assert list(folder.iterdir()) == []
    assert not sandbox.pause(), "paused already"

    sandbox.connect()
    assert boot_id(sandbox) != before
    assert sandbox.files.read("late") == "not lost"
    assert "sleep" not in [process.cmd for process in sandbox.commands.list()]
    said = sandbox.commands.run("echo $COLOUR; hostname; id -un")
    assert said.stdout.split() == ["green", sandbox.sandbox_id, "user"]
    log = sandbox.commands.run("sudo dmesg | grep -i ext4").stdout
    assert "recovery complete" not in log and "error" not in log.lower(), log
    answer = httpx.get(
        f"{node.url}/files", params={"path": "/etc/hostname"}, headers={"e2b-sandbox-id": sandbox.sandbox_id}
    )
    assert answer.status_code == 401, "its token is asked for again"
    guest = float(sandbox.commands.run("date +%s.%N").stdout)
    assert abs(guest - time.time()) < 2.0


def test_after_a_boot_memory_is_kept_again(create: Create) -> None:
    sandbox = create()
    sandbox.pause(mode="filesystem")
    sandbox.connect()
    counter = sandbox.commands.run(
        "n=0; while true; do n=$((n+1)); echo $n > /dev/shm/count; sleep 0.1; done", background=True, timeout=0
    )
    booted = boot_id(sandbox)
    # The first capture after a boot is of all memory, the next ones are of what changed.
    for _ in range(2):
        before = int(sandbox.commands.run("cat /dev/shm/count").stdout)
        sandbox.pause()
        sandbox.connect()
        assert boot_id(sandbox) == booted
        assert counter.pid in [process.pid for process in sandbox.commands.list()]
        assert int(sandbox.commands.run("sleep 0.3; cat /dev/shm/count").stdout) > before
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    assert boot_id(child) == booted


def test_forks_of_a_booted_sandbox_and_of_a_disk(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("f", "disk")
    sandbox.pause(mode="filesystem")
    cold = sandbox.fork(count=2)
    assert all(isinstance(child, Sandbox) for child in cold), cold
    ids = {boot_id(child) for child in cold if isinstance(child, Sandbox)}
    assert len(ids) == 2, "each child boots on its own"
    assert sandbox.get_info().state == "paused"

    sandbox.connect()
    booted = boot_id(sandbox)
    sandbox.commands.run("echo memory > /dev/shm/f")
    warm = sandbox.fork(count=2)
    for child in warm:
        assert isinstance(child, Sandbox), child
        assert boot_id(child) == booted
        assert child.commands.run("cat f /dev/shm/f").stdout == "diskmemory\n"
    # The source was captured in place and runs on.
    assert sandbox.commands.run("cat /dev/shm/f").stdout == "memory\n"
    sandbox.kill()
    wait_for(lambda: sandbox.sandbox_id not in node.records("sandboxes"), "the source to go")
    for child in warm:
        assert isinstance(child, Sandbox)
        assert child.commands.run("cat /dev/shm/f").stdout == "memory\n"


def test_a_reboot_ignores_memory_and_keeps_the_disk(create: Create) -> None:
    sandbox = create()
    before = boot_id(sandbox)
    sandbox.files.write("f", "flushed")
    sandbox.commands.run("sync; echo gone > /dev/shm/f")
    sandbox.pause()
    rebooted = Sandbox.connect(sandbox.sandbox_id, on_resume="reboot")
    assert boot_id(rebooted) != before
    assert rebooted.files.read("f") == "flushed"
    assert not rebooted.files.exists("/dev/shm/f")


def test_traffic_does_not_boot_a_sandbox(create: Create, node: NodeProcess) -> None:
    sandbox = create(lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.pause(mode="filesystem")
    answer = httpx.get(
        f"{node.url}/files",
        params={"path": "/etc/hostname"},
        headers={"e2b-sandbox-id": sandbox.sandbox_id, "e2b-sandbox-port": "49983"},
    )
    assert answer.status_code >= 400
    assert sandbox.get_info().state == "paused"
    sandbox.connect()
    assert sandbox.commands.run("echo up").stdout == "up\n"


def test_the_end_of_life_may_keep_the_disk_only(create: Create, node: NodeProcess, api: httpx.Client) -> None:
    sandbox = create(timeout=3, lifecycle={"on_timeout": {"action": "pause", "mode": "filesystem"}})
    sandbox.files.write("f", "kept")
    wait_for(lambda: sandbox.get_info().state == "paused", "the sandbox to be paused at its end")
    assert snapshot_of(node, sandbox)["memory_base"] is None
    sandbox.connect(timeout=60)
    assert sandbox.files.read("f") == "kept"
    refused = api.post(
        "/v2/sandboxes", json={"templateID": "base", "autoPauseMemory": False, "autoResume": {"enabled": True}}
    )
    assert refused.status_code == 400
    assert "autoPauseMemory" in refused.json()["message"]


# Takes the guest's network card down; nothing of the host reaches the agent then.
UNPLUG = """
import fcntl, socket, struct, time
time.sleep(0.5)
fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, struct.pack("16sh22x", b"eth0", 0))
"""


def _answers(sandbox: Sandbox) -> bool:
    try:
        return sandbox.commands.run("echo yes", request_timeout=3, timeout=3).stdout == "yes\n"
    except (SandboxException, httpx.HTTPError):
        return False


def test_a_guest_that_does_not_answer_is_not_paused_carelessly(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("unplug.py", UNPLUG)
    sandbox.commands.run("sudo python3 unplug.py", background=True, timeout=0)
    wait_for(lambda: not _answers(sandbox), "the guest to fall silent")
    for options in ({"mode": "filesystem"}, {"strict": True}):
        with pytest.raises(ServiceBusyException, match="does not answer"):
            sandbox.pause(retries=0, **options)
        assert sandbox.get_info().state == "running"
    assert sandbox.pause(), "with its memory it can be paused all the same"
    # That memory would bring the silent agent back.
    info = sandbox.get_info()
    assert info.envd_unresponsive_at_pause
    for attempt in (sandbox.connect, lambda: Sandbox.connect(sandbox.sandbox_id), lambda: sandbox.fork(count=1)):
        with pytest.raises(GuestUnresponsiveException, match="did not answer"):
            attempt()
    sandbox.connect(on_resume="reboot")
    assert sandbox.files.read("unplug.py") == UNPLUG
    assert not sandbox.get_info().envd_unresponsive_at_pause
    assert sandbox.pause() and sandbox.get_info().envd_unresponsive_at_pause is None
    sandbox.connect()
    assert sandbox.commands.run("echo again").stdout == "again\n"


def test_death_during_a_pause_without_memory_and_during_a_boot(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("f", "kept")
    _die_during(node, lambda: sandbox.pause(mode="filesystem"), "pausing")
    assert sandbox.get_info().state in ("running", "paused")
    sandbox.connect()
    # Were its disk still frozen, this would hang.
    sandbox.files.write("f", "written after")
    sandbox.pause(mode="filesystem")
    _die_during(node, sandbox.connect, "resuming")
    assert sandbox.get_info().state in ("running", "paused")
    sandbox.connect()
    assert sandbox.files.read("f") == "written after"
    assert_nothing_leaked(node)


def test_a_booted_sandbox_outlives_the_server_and_can_still_be_captured(create: Create, node: NodeProcess) -> None:
    sandbox = create(secure=True)
    sandbox.pause(mode="filesystem")
    sandbox.connect()
    booted = boot_id(sandbox)
    restart(node)
    assert boot_id(sandbox) == booted
    sandbox.commands.run("echo x > /dev/shm/f")
    sandbox.pause()
    restart(node)
    sandbox.connect()
    assert sandbox.commands.run("cat /dev/shm/f").stdout == "x\n"
    assert boot_id(sandbox) == booted
    assert_nothing_leaked(node)


def test_a_booted_vm_that_dies_falls_back_to_the_disk(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("f", "before the pause")
    sandbox.pause(mode="filesystem")
    sandbox.connect()
    sandbox.files.write("f", "after it")
    os.kill(_vm_pid(node, sandbox.sandbox_id), signal.SIGKILL)
    wait_for(lambda: sandbox.get_info().state == "paused", "the sandbox to fall back to its pause")
    sandbox.connect()
    assert sandbox.files.read("f") == "before the pause"


def test_a_disk_that_cannot_boot_leaves_the_sandbox_paused(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.pause(mode="filesystem")
    disk = str(snapshot_of(node, sandbox)["disk"])
    layer: Path = node.home / "layers" / f"{disk}.qcow2"
    saved = layer.read_bytes()
    layer.write_bytes(b"not a disk")
    with pytest.raises(SandboxException):
        sandbox.connect()
    assert sandbox.get_info().state == "paused"
    layer.write_bytes(saved)
    sandbox.connect()
    assert sandbox.commands.run("echo up").stdout == "up\n"
    assert_nothing_leaked(node)
