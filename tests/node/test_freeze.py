"""The guest's processes frozen and thawed, by envd's endpoints of the node, on real microVMs."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from e2b import PtySize, Sandbox

from aenv.client.guest import ENVD_PORT
from aenv.network.addressing import slot_at
from aenv.network.settings import NetworkSettings
from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for

BUSY = "while :; do :; done"


@contextmanager
def control(node: NodeProcess, sandbox: Sandbox) -> Iterator[Callable[[str], httpx.Response]]:
    """POSTs straight to the sandbox's envd, as the node does."""
    settings = NetworkSettings(prefix=node.prefix, pool_cidr=node.cidr)
    host = slot_at(settings, json.loads(node.records("sandboxes")[sandbox.sandbox_id])["slot"]).host_address
    headers = {"X-Access-Token": sandbox._envd_access_token or ""}
    with httpx.Client(base_url=f"http://{host}:{ENVD_PORT}", headers=headers, timeout=60) as client:
        yield client.post


def watch(sandbox: Sandbox, pids: list[int]) -> None:
    """Start a process that leaves the commands' group, so that it is not frozen, and notes the others' times."""
    script = (
        "echo $$ > /sys/fs/cgroup/cgroup.procs; cd /home/user; while :; do"
        f" cat /proc/uptime {' '.join(f'/proc/{pid}/stat' for pid in pids)} > new 2>/dev/null; mv new noted;"
        " sleep 0.05; done"
    )
    sandbox.commands.run(script, background=True, user="root", timeout=0)
    wait_for(lambda: sandbox.files.exists("noted"), "the first note")


def noted(sandbox: Sandbox) -> tuple[float, dict[int, int]]:
    """The guest's uptime in seconds, and by pid user and system time in ticks (proc_pid_stat(5), fields 14, 15)."""
    uptime, *stats = sandbox.files.read("noted").splitlines()
    found = {}
    for line in stats:
        fields = line.rpartition(")")[2].split()
        found[int(line.split()[0])] = int(fields[11]) + int(fields[12])
    return float(uptime.split()[0]), found


def later(sandbox: Sandbox, seconds: float = 0.0) -> dict[int, int]:
    """What is noted when at least so much time has passed in the guest, wholly after this call."""

    def noted_after(uptime: float) -> tuple[float, dict[int, int]]:
        return wait_for(lambda: (now := noted(sandbox))[0] > uptime and now, "time to pass in the guest")  # type: ignore[return-value]

    # The next note may have been begun before.
    uptime, _ = noted_after(noted_after(noted(sandbox)[0])[0])
    return noted_after(uptime + seconds)[1]


def test_commands_terminals_and_daemons_stop_and_go_on(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.commands.run(f"setsid sh -c 'echo $$ > daemon; {BUSY}' >/dev/null 2>&1 </dev/null &")
    wait_for(lambda: sandbox.files.exists("daemon") and sandbox.files.read("daemon").strip(), "the daemon")
    command = sandbox.commands.run(BUSY, background=True, timeout=0)
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=0)
    sandbox.pty.send_stdin(terminal.pid, f"{BUSY}\n".encode())
    pids = [int(sandbox.files.read("daemon")), command.pid, terminal.pid]
    watch(sandbox, pids)
    before = noted(sandbox)[1]
    wait_for(lambda: all(noted(sandbox)[1][pid] > before[pid] for pid in pids), "all three to run")

    with control(node, sandbox) as post:
        result = post("/freeze?maxWaitMs=20000").json()
        assert result["notFrozen"] == result["failed"] == result["unobservable"] == 0
        assert result["frozen"] == result["requested"] >= 2
        stopped = later(sandbox)
        assert set(stopped) == set(pids)
        assert later(sandbox, 1.0) == stopped
        sandbox.files.write("written", "while frozen")
        assert terminal.kill(), "a frozen process can be killed"
        wait_for(lambda: terminal.pid not in noted(sandbox)[1], "its end")
        assert later(sandbox) == {pid: stopped[pid] for pid in pids[:2]}

        assert post("/unfreeze").status_code == 204
    wait_for(lambda: all(noted(sandbox)[1][pid] > stopped[pid] for pid in pids[:2]), "the others to go on")
    assert sandbox.files.read("written") == "while frozen"


def test_init_thaws_what_was_frozen_when_it_was_paused_or_forked(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    command = sandbox.commands.run(BUSY, background=True, timeout=0)
    watch(sandbox, [command.pid])

    def freeze() -> int:
        with control(node, sandbox) as post:
            assert post("/freeze?maxWaitMs=20000").json()["notFrozen"] == 0
        return later(sandbox)[command.pid]

    stopped = freeze()
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    wait_for(lambda: noted(child)[1][command.pid] > stopped, "the command to go on in the fork")
    assert child.commands.run("echo $E2B_SANDBOX_ID").stdout.strip() == child.sandbox_id
    # The source stood still as well, and is given the time as its children are.
    wait_for(lambda: noted(sandbox)[1][command.pid] > stopped, "the command to go on in the source")

    stopped = freeze()
    sandbox.pause()
    resumed = Sandbox.connect(sandbox.sandbox_id)
    wait_for(lambda: noted(resumed)[1][command.pid] > stopped, "the command to go on after the pause")
    assert resumed.commands.run("echo alive").stdout == "alive\n"


def test_only_the_node_can_freeze(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": sandbox._envd_access_token or ""}
    for path in ("/freeze", "/unfreeze"):
        assert httpx.post(f"{node.url}{path}", headers=headers).status_code == 403
