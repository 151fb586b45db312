"""`/freeze` and `/unfreeze` in cgroups of a cgroup2 mounted for the test."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import PtySize

from tests.envd.daemon import Envd, Reply, wait_until

BUSY = "while :; do :; done"
FIELDS = {"requested", "frozen", "notFrozen", "failed", "unobservable", "sweepMs", "waitMs"}


@pytest.fixture(scope="module")
def hierarchy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cgroup2 mount of our own; hosts have theirs in different places, or none."""
    mount = tmp_path_factory.mktemp("cgroup2")
    subprocess.run(["mount", "-t", "cgroup2", "none", mount], check=True)
    yield mount
    subprocess.run(["umount", mount], check=True)


@pytest.fixture
def root(hierarchy: Path) -> Iterator[Path]:
    """The group that a daemon makes its commands' groups in."""
    group = hierarchy / f"aenv-test-{os.getpid()}"
    group.mkdir()
    yield group
    (group / "cgroup.kill").write_text("1")
    wait_until(lambda: "populated 0" in (group / "cgroup.events").read_text(), "the end of what the test started")
    for inner in [*(g for g in group.iterdir() if g.is_dir()), group]:
        inner.rmdir()


@pytest.fixture
def envd(root: Path) -> Iterator[Envd]:
    daemon = Envd("127.0.0.1", 0, "--cgroup", str(root))
    yield daemon
    daemon.stop()


def post(envd: Envd, path: str) -> Reply:
    return envd.request("POST", path)


def cpu_ticks(pid: int) -> int:
    """User and system time of a process in clock ticks (proc_pid_stat(5), fields 14 and 15)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def burn(ticks: int) -> None:
    """Let time pass in which a process that runs would have used the processor: as much as this one uses."""
    process = subprocess.Popen(["sh", "-c", BUSY])
    try:
        wait_until(lambda: cpu_ticks(process.pid) >= ticks, "some processor time")
    finally:
        process.kill()
        process.wait()


def group_of(pid: int) -> str:
    line = next(x for x in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if x.startswith("0::"))
    return line.rpartition("/")[2]


def test_commands_terminals_and_daemons_live_in_their_groups(envd: Envd, root: Path) -> None:
    sandbox = envd.sandbox()
    sandbox.commands.run("setsid sh -c 'sleep 1000 & exec sleep 1000' >/dev/null 2>&1 </dev/null &")
    daemonized = wait_until(lambda: [int(p) for p in (root / "user/cgroup.procs").read_text().split()], "the daemon")
    assert {group_of(pid) for pid in daemonized} == {"user"}
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80))
    assert group_of(terminal.pid) == "pty"
    assert group_of(envd.process.pid) not in ("user", "pty")
    terminal.kill()


def test_processor_time_stops_and_goes_on(envd: Envd) -> None:
    command = envd.sandbox().commands.run(BUSY, background=True)
    wait_until(lambda: cpu_ticks(command.pid) > 2, "the loop")
    reply = post(envd, "/freeze?maxWaitMs=10000")
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    result = reply.json()
    assert set(result) == FIELDS and all(isinstance(v, int) for v in result.values())
    counts = {name: result[name] for name in ("requested", "frozen", "notFrozen", "failed", "unobservable")}
    assert counts == {"requested": 2, "frozen": 2, "notFrozen": 0, "failed": 0, "unobservable": 0}

    stopped_at = cpu_ticks(command.pid)
    burn(20)
    assert cpu_ticks(command.pid) == stopped_at
    assert envd.rpc("process.Process/List", {}).json()["processes"], "envd itself goes on"

    assert post(envd, "/unfreeze").status == 204
    wait_until(lambda: cpu_ticks(command.pid) > stopped_at, "the loop to go on")
    command.kill()


def test_without_a_wait_the_answer_is_empty(envd: Envd, root: Path) -> None:
    for path in ("/freeze", "/freeze?maxWaitMs=0", "/freeze?maxWaitMs=-5"):
        reply = post(envd, path)
        assert (reply.status, reply.body) == (204, b"")
    assert (root / "user/cgroup.freeze").read_text() == "1\n"
    assert post(envd, "/freeze?maxWaitMs=soon").status == 400
    for _ in range(2):
        assert post(envd, "/unfreeze").status == 204
    assert (root / "user/cgroup.freeze").read_text() == "0\n"


def test_a_frozen_command_can_be_killed(envd: Envd) -> None:
    command = envd.sandbox().commands.run("trap '' TERM; " + BUSY, background=True)
    assert post(envd, "/freeze?maxWaitMs=10000").json()["frozen"] == 2
    assert command.kill()
    wait_until(lambda: envd.rpc("process.Process/List", {}).json() in ({}, {"processes": []}), "its end")
    assert post(envd, "/unfreeze").status == 204


def test_commands_wait_for_the_thaw_and_init_thaws(envd: Envd) -> None:
    assert post(envd, "/freeze").status == 204
    late = envd.stream("process.Process/Start", [{"process": {"cmd": "true"}}], {"Connect-Timeout-Ms": "300"})
    assert late[1]["error"]["code"] == "deadline_exceeded"
    outputs: list[str] = []
    starters = [
        threading.Thread(target=lambda n=n: outputs.append(envd.sandbox().commands.run(f"echo {n}").stdout))
        for n in range(20)  # more than envd has worker threads
    ]
    for starter in starters:
        starter.start()
    assert envd.sandbox().files.write("/tmp/while-frozen", "x").name == "while-frozen"
    assert not outputs
    assert post(envd, "/init").status == 204
    for starter in starters:
        starter.join()
    assert sorted(int(text) for text in outputs) == list(range(20))


@pytest.fixture
def silent(tmp_path: Path) -> Iterator[Path]:
    """A file system whose server never answers: who looks into it cannot be stopped, only killed."""
    server = os.open("/dev/fuse", os.O_RDWR)
    folder = tmp_path / "silent"
    folder.mkdir()
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    subprocess.run(["mount", "-i", "-t", "fuse", "-o", options, "none", folder], check=True, pass_fds=[server])
    yield folder
    os.close(server)
    subprocess.run(["umount", "-l", folder], check=True)


def hangs(pid: int) -> bool:
    """Whether a process waits for an answer of the silent mount: only then nothing but a kill ends its sleep."""
    return Path(f"/proc/{pid}/wchan").read_text() in ("fuse_get_req", "request_wait_answer")


def test_what_does_not_stop_is_reported(envd: Envd, silent: Path) -> None:
    stuck = envd.sandbox().commands.run(f"exec ls {silent}", background=True, user="root")
    wait_until(lambda: hangs(stuck.pid), "it to hang")
    result = post(envd, "/freeze?maxWaitMs=50").json()
    assert (result["requested"], result["frozen"], result["notFrozen"]) == (2, 1, 1)
    assert result["waitMs"] >= 50
    assert post(envd, "/unfreeze").status == 204
    stuck.kill()


def test_one_operation_at_a_time_and_init_cuts_it_short(envd: Envd, root: Path, silent: Path) -> None:
    stuck = envd.sandbox().commands.run(f"exec ls {silent}", background=True, user="root")
    wait_until(lambda: hangs(stuck.pid), "it to hang")
    replies: list[Reply] = []
    waiting = threading.Thread(target=lambda: replies.append(post(envd, "/freeze?maxWaitMs=600000")))
    waiting.start()
    wait_until(lambda: (root / "user/cgroup.freeze").read_text() == "1\n", "the freeze to be issued")
    for path in ("/freeze", "/freeze?maxWaitMs=1", "/unfreeze"):
        reply = post(envd, path)
        assert (reply.status, reply.json()["code"]) == (503, 503)
    assert post(envd, "/init").status == 204
    waiting.join()
    assert replies[0].status == 200 and replies[0].json()["notFrozen"] == 1
    assert (root / "user/cgroup.freeze").read_text() == "0\n"
    stuck.kill()


def test_what_the_guest_froze_itself_stays_frozen(envd: Envd, root: Path) -> None:
    (root / "engine").mkdir()
    (root / "engine/cgroup.freeze").write_text("1")
    assert post(envd, "/freeze?maxWaitMs=10000").json()["frozen"] == 3
    assert post(envd, "/unfreeze").status == 204
    assert (root / "engine/cgroup.freeze").read_text() == "1\n"
    assert (root / "user/cgroup.freeze").read_text() == "0\n"


def test_a_command_runs_although_somebody_removed_its_group(envd: Envd, root: Path) -> None:
    (root / "user").rmdir()
    assert envd.sandbox().commands.run("echo here").stdout == "here\n"
    assert post(envd, "/freeze?maxWaitMs=10000").json()["frozen"] == 1


def test_not_without_a_cgroup() -> None:
    daemon = Envd()
    try:
        for path in ("/freeze", "/freeze?maxWaitMs=10", "/unfreeze"):
            reply = post(daemon, path)
            assert reply.status == 501 and "--cgroup" in reply.json()["message"]
        assert post(daemon, "/init").status == 204
    finally:
        daemon.stop()
