"""The life of a sandbox as an E2B user lives it, on real microVMs."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import httpx
import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    NotFoundException,
    Sandbox,
    SandboxException,
)
from e2b.exceptions import InvalidArgumentException

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for


def test_commands_run_as_user_in_their_home_on_their_own_kernel(create: Create) -> None:
    sandbox = create()
    result = sandbox.commands.run("id -un; pwd; uname -r; echo oops >&2")
    user, folder, kernel = result.stdout.split()
    assert (user, folder) == ("user", "/home/user")
    assert int(kernel.split(".")[0]) >= 6
    assert result.stderr == "oops\n"
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("exit 7")
    assert failed.value.exit_code == 7
    assert sandbox.commands.run("sudo -n id -u").stdout.strip() == "0"
    assert sandbox.commands.run("id -un", user="root").stdout.strip() == "root"
    tools = sandbox.commands.run("python3 --version && pip --version && git --version && curl --version")
    assert tools.exit_code == 0


def test_environment_reaches_commands(create: Create) -> None:
    sandbox = create(envs={"COLOUR": "green", "SHAPE": "round"})
    output = sandbox.commands.run("echo $COLOUR $SHAPE $E2B_SANDBOX_ID", envs={"SHAPE": "square"}).stdout
    assert output.split() == ["green", "square", sandbox.sandbox_id]


def test_files_round_trip(create: Create) -> None:
    sandbox = create()
    blob = bytes(range(256)) * 4096
    sandbox.files.write("deep/er/blob", blob)
    assert bytes(sandbox.files.read("deep/er/blob", format="bytes")) == blob
    assert [entry.name for entry in sandbox.files.list("deep")] == ["er"]
    sandbox.files.rename("deep/er/blob", "moved")
    assert sandbox.files.exists("moved") and not sandbox.files.exists("deep/er/blob")
    sandbox.files.remove("moved")
    with pytest.raises(NotFoundException):
        sandbox.files.read("moved")


def test_pause_and_resume_keep_processes_files_and_the_time(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("kept", "yes")
    counter = sandbox.commands.run(
        "n=0; while true; do n=$((n+1)); echo $n > count; sleep 0.1; done", background=True, timeout=0
    )
    wait_for(lambda: sandbox.files.exists("count") and sandbox.files.read("count"), "the counter to start")
    running = len(node.vm_pids())
    sandbox.pause()
    assert sandbox.get_info().state == "paused"
    wait_for(lambda: len(node.vm_pids()) <= running, "the VM of the paused sandbox to go")
    before = int(_count(sandbox))
    assert sandbox.is_running()
    wait_for(lambda: int(_count(sandbox)) > before, "the counter to go on")
    assert sandbox.files.read("kept") == "yes"
    assert counter.pid in [process.pid for process in sandbox.commands.list()]
    guest = float(sandbox.commands.run("date +%s.%N").stdout)
    assert abs(guest - time.time()) < 2.0  # a slow answer is not a wrong clock; the exact bound is below


def _count(sandbox: Sandbox) -> str:
    return Sandbox.connect(sandbox.sandbox_id).files.read("count").strip() or "0"


def test_the_guest_clock_is_right_after_a_long_pause(create: Create) -> None:
    """Bounds the error by the moments before and after the question, whatever the machine's load."""
    sandbox = create()
    sandbox.pause()
    time.sleep(3)  # the time that the guest must not miss
    sandbox.connect()
    best = 10.0
    for _ in range(5):
        before = time.time()
        guest = float(sandbox.commands.run("date +%s.%N").stdout)
        after = time.time()
        best = min(best, max(before - guest, guest - after, 0.0))
    assert best < 0.1


def test_entropy_differs_between_lives_of_one_snapshot(create: Create) -> None:
    sandbox = create()
    children = sandbox.fork(count=3)
    assert all(isinstance(child, Sandbox) for child in children)
    seen = {_random(child) for child in (sandbox, *children) if isinstance(child, Sandbox)}
    assert len(seen) == 4


def _random(sandbox: Sandbox) -> str:
    return sandbox.commands.run("head -c 16 /dev/urandom | od -An -tx1").stdout


def test_fork_children_see_the_past_and_have_their_own_future(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("story", "once")
    sandbox.commands.run("while true; do sleep 1; done", background=True, timeout=0)
    pid = sandbox.commands.list()[0].pid
    children = sandbox.fork(count=4)
    forks = [child for child in children if isinstance(child, Sandbox)]
    assert len(forks) == 4, children
    assert len({child.sandbox_id for child in forks} | {sandbox.sandbox_id}) == 5

    def diverge(number: int) -> tuple[str, str, int]:
        child = forks[number]
        before = child.files.read("story")
        child.files.write("story", f"child {number}")
        return before, child.commands.run("cat story; hostname").stdout, child.commands.list()[0].pid

    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(diverge, range(4)))
    for number, (before, after, child_pid) in enumerate(results):
        assert before == "once"
        assert after == f"child {number}{forks[number].sandbox_id}\n"
        assert child_pid == pid
    assert sandbox.files.read("story") == "once"


def test_fork_from_paused_and_fork_of_a_fork(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("f", "1")
    sandbox.pause()
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    assert sandbox.get_info().state == "paused"
    child.files.write("f", "2")
    (grandchild,) = child.fork(count=1)
    assert isinstance(grandchild, Sandbox)
    child.kill()
    assert grandchild.files.read("f") == "2"
    grandchild.pause()
    grandchild.connect()
    assert grandchild.files.read("f") == "2"
    sandbox.connect()
    assert sandbox.files.read("f") == "1"


def test_many_pauses_keep_the_disk_intact(create: Create) -> None:
    """More pauses than the disk chain may be deep, so that layers are merged on the way."""
    sandbox = create()
    for turn in range(15):
        sandbox.files.write(f"turn-{turn}", str(turn))
        sandbox.pause()
        sandbox.connect()
    for turn in range(15):
        assert sandbox.files.read(f"turn-{turn}") == str(turn)
    assert sandbox.commands.run("sudo dmesg | grep -iE 'ext4.*error|I/O error' | wc -l").stdout.strip() == "0"


def test_secure_sandboxes_demand_their_token(create: Create, node: NodeProcess) -> None:
    sandbox = create(secure=True)
    assert sandbox.commands.run("echo in").stdout == "in\n"
    sandbox.pause()
    sandbox.connect()
    assert sandbox.commands.run("echo again").stdout == "again\n"
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    assert child.commands.run("echo child").stdout == "child\n"
    # A child does not open with its parent's token, nor anything without one.
    for token in (sandbox._envd_access_token, "wrong", None):
        headers = {"e2b-sandbox-id": child.sandbox_id} | ({"X-Access-Token": token} if token else {})
        answer = httpx.get(f"{node.url}/files", params={"path": "/etc/hostname"}, headers=headers)
        assert answer.status_code == 401, answer.text


def test_timeout_pauses_or_kills(create: Create) -> None:
    paused = create(timeout=2, lifecycle={"on_timeout": "pause"})
    killed = create(timeout=2, lifecycle={"on_timeout": "kill"})
    wait_for(lambda: paused.get_info().state == "paused", "the sandbox to be paused at its end")
    wait_for(lambda: not _exists(killed.sandbox_id), "the sandbox to be killed at its end")
    assert Sandbox.connect(paused.sandbox_id).commands.run("echo back").stdout == "back\n"


def _exists(sandbox_id: str) -> bool:
    try:
        Sandbox.get_info(sandbox_id)
    except NotFoundException:
        return False
    return True


def test_set_timeout_moves_the_end(create: Create) -> None:
    sandbox = create(timeout=300)
    sandbox.set_timeout(30)
    end = sandbox.get_info().end_at
    assert 0 < (end - datetime.now(UTC)).total_seconds() <= 30
    with pytest.raises(SandboxException):
        sandbox.set_timeout(10**7)


def test_traffic_wakes_a_paused_sandbox_that_asks_for_it(create: Create) -> None:
    sandbox = create(lifecycle={"on_timeout": "pause", "auto_resume": True})
    sandbox.files.write("f", "awake")
    sandbox.pause()
    assert sandbox.get_info().state == "paused"
    with ThreadPoolExecutor(4) as executor:  # many at once: one resume
        texts = list(executor.map(lambda _: sandbox.files.read("f"), range(4)))
    assert texts == ["awake"] * 4
    assert sandbox.get_info().state == "running"


def test_listing_finds_by_metadata_and_state(create: Create) -> None:
    mark = f"mark-{time.time_ns()}"
    made = [create(metadata={"mark": mark, "n": str(n)}) for n in range(3)]
    made[0].pause()
    from e2b import SandboxQuery, SandboxState

    found: list[str] = []
    pages = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}), limit=2)
    while pages.has_next:
        found += [info.sandbox_id for info in pages.next_items()]
    assert found == [sandbox.sandbox_id for sandbox in reversed(made)]
    only = Sandbox.list(query=SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED])).next_items()
    assert [info.sandbox_id for info in only] == [made[0].sandbox_id]


def test_wrong_requests_raise_what_the_sdk_documents(create: Create, node: NodeProcess) -> None:
    with pytest.raises(NotFoundException):
        Sandbox.connect("nosuchsandbox")
    with pytest.raises((NotFoundException, SandboxException), match="no-such-template"):
        Sandbox.create("no-such-template")
    with pytest.raises(AuthenticationException):
        Sandbox.create("base", api_key="e2b_" + "0" * 40)
    sandbox = create()
    with pytest.raises(InvalidArgumentException):
        sandbox.commands.run("true", cwd="/no/such/folder")
    with pytest.raises(SandboxException, match="1 to 16"):
        sandbox.fork(count=17)
    sandbox.pause()
    with pytest.raises(SandboxException):
        sandbox.set_timeout(60)
    sandbox.kill()
    assert not sandbox.kill()
    with pytest.raises(NotFoundException):
        sandbox.connect()


def test_output_is_complete_and_in_order(create: Create) -> None:
    sandbox = create()
    lines = sandbox.commands.run("seq 1 20000").stdout.split()
    assert lines == [str(n) for n in range(1, 20001)]


def test_many_sandboxes_at_once(create: Create) -> None:
    with ThreadPoolExecutor(6) as executor:
        made = list(executor.map(lambda _: create(), range(6)))
        answers = list(executor.map(lambda s: s.commands.run("hostname").stdout.strip(), made))
    assert answers == [sandbox.sandbox_id for sandbox in made]


def test_a_stream_of_output_arrives_while_the_command_runs(create: Create) -> None:
    sandbox = create()
    first = threading.Event()
    go_on = "/tmp/go-on"
    done: list[str] = []

    def watch() -> None:
        result = sandbox.commands.run(
            f"echo first; until [ -e {go_on} ]; do sleep 0.1; done; echo last",
            on_stdout=lambda _: first.set(),
            timeout=60,
        )
        done.append(result.stdout)

    thread = threading.Thread(target=watch)
    thread.start()
    assert first.wait(60), "the first line came only with the last"
    sandbox.files.write(go_on, "")
    thread.join(60)
    assert done == ["first\nlast\n"]
