"""`kill -9` of the server at any moment, and a restart: nothing is lost and nothing leaks."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from e2b import NotFoundException, Sandbox

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for


def states(node: NodeProcess) -> dict[str, str]:
    return {key: json.loads(doc)["state"] for key, doc in node.records("sandboxes").items()}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def restart(node: NodeProcess) -> None:
    node.kill9()
    node.start()


def assert_nothing_leaked(node: NodeProcess) -> None:
    """Every VM, namespace and file belongs to a recorded sandbox, template or the warm pool."""
    sandboxes = [json.loads(doc) for doc in node.records("sandboxes").values()]
    held = [s for s in sandboxes if s["state"] == "running"]
    assert all(s["state"] in ("running", "paused") for s in sandboxes), states(node)
    warm = 2
    wait_for(lambda: len(node.vm_pids()) == len(held) + warm, f"{len(held)} VMs and {warm} warm ones")
    # Files that go are renamed first and removed behind that.
    wait_for(lambda: not list((node.home / "layers").glob(".*")), "files aside to be removed")
    layers = {name.split(".")[0] for name in names(node.home / "layers")}
    volumes = {name for name in node.records("layers") if name.startswith("v-")}
    assert layers == set(node.records("layers")) - volumes
    images = [node.home / "images" / kind for kind in ("volumes", "native")]
    wait_for(lambda: all(names(path) <= volumes for path in images if path.exists()), "disks of images to go")
    assert names(node.home / "snapshots") == set(node.records("snapshots"))
    assert names(node.home / "memory") == set(node.records("memory"))
    vms = {s["vm_id"] for s in held}
    assert vms <= names(node.home / "vms")


def test_running_and_paused_sandboxes_outlive_the_server(create: Create, node: NodeProcess) -> None:
    running, paused = create(secure=True), create()
    running.files.write("f", "running")
    paused.files.write("f", "paused")
    paused.pause()
    vms = set(node.vm_pids())
    restart(node)
    assert vms & set(node.vm_pids())
    assert running.files.read("f") == "running"
    assert running.get_info().state == "running"
    assert paused.get_info().state == "paused"
    paused.connect()
    assert paused.files.read("f") == "paused"
    (child,) = running.fork(count=1)
    assert isinstance(child, Sandbox)
    assert child.files.read("f") == "running"
    running.pause()
    running.connect()
    assert running.files.read("f") == "running"
    assert_nothing_leaked(node)


def _die_during(node: NodeProcess, action: Callable[[], object], sandbox_state: str) -> None:
    """Kill the server the moment its journal shows a sandbox in ``sandbox_state``, while ``action`` runs.

    Should the state pass unseen, the server dies right after the action: what follows must hold then, too.
    """

    def act() -> None:
        try:
            action()
        except Exception:
            return  # the server died under it: that is the point

    thread = threading.Thread(target=act)
    thread.start()
    wait_for(
        lambda: sandbox_state in states(node).values() or not thread.is_alive(),
        f"a sandbox in state {sandbox_state}",
        interval=0.001,
    )
    node.kill9()
    thread.join(120)
    node.start()


def test_death_during_create(create: Create, node: NodeProcess) -> None:
    before = set(states(node))
    _die_during(node, create, "starting")
    assert set(states(node)) == before
    assert_nothing_leaked(node)
    assert create().commands.run("echo ok").stdout == "ok\n"


def test_death_during_pause(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("f", "kept")
    _die_during(node, sandbox.pause, "pausing")
    assert sandbox.get_info().state in ("running", "paused")
    sandbox.connect()
    assert sandbox.files.read("f") == "kept"
    assert_nothing_leaked(node)


def test_death_during_resume(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("f", "kept")
    sandbox.pause()
    _die_during(node, sandbox.connect, "resuming")
    sandbox.connect()
    assert sandbox.files.read("f") == "kept"
    assert_nothing_leaked(node)


def test_death_during_fork(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("f", "kept")
    _die_during(node, lambda: sandbox.fork(count=4), "starting")
    assert sandbox.files.read("f") == "kept"
    sandbox.files.write("f", "written after")
    sandbox.pause()
    sandbox.connect()
    assert sandbox.files.read("f") == "written after"
    assert_nothing_leaked(node)


def test_death_during_kill(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    _die_during(node, sandbox.kill, "deleting")
    with pytest.raises(NotFoundException):
        sandbox.get_info()
    assert_nothing_leaked(node)


def test_a_vm_that_dies_takes_nobody_with_it(create: Create, node: NodeProcess) -> None:
    never_paused, once_paused, bystander = create(), create(), create()
    once_paused.files.write("f", "before the pause")
    once_paused.pause()
    once_paused.connect()
    once_paused.files.write("f", "after it")
    never_paused.commands.run("echo the end is near > /dev/console", user="root")
    for sandbox in (never_paused, once_paused):
        os.kill(_vm_pid(node, sandbox.sandbox_id), signal.SIGKILL)
    wait_for(lambda: never_paused.sandbox_id not in states(node), "the record of the dead sandbox to go")
    with pytest.raises(NotFoundException):
        never_paused.get_info()
    reported = re.search(rf"lost its VM.*status.*the end is near.*{never_paused.sandbox_id}", node.log.read_text())
    assert reported
    assert "the VMM said" not in reported.group()
    # What was paused once goes back to that moment instead of being lost.
    wait_for(lambda: once_paused.get_info().state == "paused", "the sandbox to fall back to its pause")
    once_paused.connect()
    assert once_paused.files.read("f") == "before the pause"
    assert bystander.commands.run("echo fine").stdout == "fine\n"


def test_a_vm_that_hangs_does_not_keep_the_node_from_starting(create: Create, node: NodeProcess) -> None:
    hanging, bystander = create(), create()
    hanging.files.write("f", "before the pause")
    hanging.pause()
    hanging.connect()
    pid = _vm_pid(node, hanging.sandbox_id)
    os.kill(pid, signal.SIGSTOP)
    restart(node)
    assert bystander.commands.run("echo fine").stdout == "fine\n"
    assert pid not in node.vm_pids()
    assert hanging.get_info().state == "paused"
    hanging.connect()
    assert hanging.files.read("f") == "before the pause"
    assert_nothing_leaked(node)


def _vm_pid(node: NodeProcess, sandbox_id: str) -> int:
    vm_id = json.loads(node.records("sandboxes")[sandbox_id])["vm_id"]
    for pid in node.vm_pids():
        if vm_id.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"no process of VM {vm_id}")


def test_sigterm_leaves_sandboxes_running_and_can_pause_them(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("f", "x")
    assert node.terminate() == 0
    assert len(node.vm_pids()) == 1, "only the sandbox's own VM outlives the server"
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{node.url}/health")
    node.start("--stop-sandboxes")
    assert sandbox.files.read("f") == "x"
    assert node.terminate() == 0
    assert not node.vm_pids()
    assert set(states(node).values()) <= {"paused"}
    node.start()
    sandbox.connect()
    assert sandbox.files.read("f") == "x"


def test_a_second_server_on_the_same_home_is_refused(node: NodeProcess, tmp_path: Path) -> None:
    import subprocess
    import sys

    result = subprocess.run(
        [Path(sys.executable).parent / "aenv-server", "--home", node.home, "--host", "127.0.0.1", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 1
    assert "Another aenv-server runs" in result.stderr
    assert "Traceback" not in result.stderr
