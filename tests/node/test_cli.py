"""The official E2B command line in a terminal, authenticated by E2B_API_KEY alone."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from e2b import Sandbox

from tests.node.conftest import Create
from tests.node.javascript import NODE, environment
from tests.node.process import NodeProcess, wait_for

TIMEOUT = 60  # seconds for one command
_ID = re.compile(r"\bi[a-z0-9]{19}\b")

Run = Callable[..., subprocess.CompletedProcess[str]]
Spawn = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture
def command(javascript: Path) -> list[str]:
    return [NODE, str(javascript / "node_modules/@e2b/cli/dist/index.js")]


@pytest.fixture
def cli_environment(node: NodeProcess, tmp_path: Path) -> dict[str, str]:
    """With a home of its own: no login of the machine's user takes part."""
    return environment(node, HOME=str(tmp_path), TERM="xterm")


@pytest.fixture
def run(command: list[str], cli_environment: dict[str, str]) -> Run:
    def call(*arguments: str, text: str | None = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*command, *arguments],
            env=cli_environment,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    return call


@pytest.fixture
def spawn(command: list[str], cli_environment: dict[str, str]) -> Iterator[Spawn]:
    """The command in a terminal of 100 columns."""
    started: list[pexpect.spawn[str]] = []

    def start(*arguments: str) -> "pexpect.spawn[str]":
        child = pexpect.spawn(
            command[0],
            [*command[1:], *arguments],
            env=cli_environment,
            encoding="utf-8",
            timeout=TIMEOUT,
            dimensions=(30, 100),
        )
        started.append(child)
        return child

    yield start
    for child in started:
        child.close(force=True)


@pytest.mark.compat("CLI", "create", "works")
def test_create_opens_a_terminal_in_a_new_sandbox(spawn: Spawn, create: Create) -> None:
    terminal = spawn("sandbox", "create", "base")
    terminal.expect(r"with sandbox ID.*?(i[a-z0-9]{19})")
    terminal.expect(r"\$ ")
    terminal.sendline("echo $((40+2)) $(id -un); stty size")
    terminal.expect(r"42 user\s+30 100")
    terminal.sendline("exit")
    terminal.expect("Closing terminal connection")
    terminal.expect(pexpect.EOF)


@pytest.mark.compat("CLI", "list", "works")
def test_create_detached_list_and_info(run: Run, create: Create) -> None:
    made = run("sandbox", "create", "base", "--detach", "--timeout", "120", "--lifecycle.ontimeout", "kill")
    found = _ID.search(made.stdout)
    assert found is not None, made.stdout
    listed = json.loads(run("sandbox", "list", "--format", "json").stdout)
    assert [item["sandboxId"] for item in listed] == [found[0]]
    table = run("sandbox", "list").stdout
    assert found[0] in table and "Running" in table
    info = json.loads(run("sandbox", "info", found[0], "--format", "json").stdout)
    assert info["state"] == "running"
    assert info["lifecycle"]["onTimeout"] == "kill"


@pytest.mark.compat("CLI", "connect", "works")
def test_connect_opens_a_terminal_in_a_running_sandbox(spawn: Spawn, create: Create) -> None:
    sandbox = create()
    sandbox.files.write("there", "already\n")
    terminal = spawn("sandbox", "connect", sandbox.sandbox_id)
    terminal.expect(r"\$ ")
    terminal.sendline("cat there")
    terminal.expect("already")
    terminal.expect(r"\$ ")  # before that the shell is not reading, and the terminal would swallow the key
    terminal.sendcontrol("d")
    terminal.expect("Closing terminal connection")
    terminal.expect(pexpect.EOF)
    assert sandbox.is_running()


@pytest.mark.compat("CLI", "commands", "works")
def test_exec_passes_output_input_and_exit_code(run: Run, create: Create) -> None:
    sandbox = create()
    script = "pwd; echo $A; echo oops >&2; exit 7"
    done = run("sandbox", "exec", "-e", "A=b", "-c", "/tmp", sandbox.sandbox_id, script, check=False)
    assert (done.returncode, done.stdout) == (7, "/tmp\nb\n")
    assert "oops" in done.stderr
    assert run("sandbox", "exec", "-u", "root", sandbox.sandbox_id, "id", "-u").stdout == "0\n"
    assert run("sandbox", "exec", sandbox.sandbox_id, "wc", "-c", text="x" * 100_000).stdout.strip() == "100000"
    background = run("sandbox", "exec", "--background", sandbox.sandbox_id, "sleep 300")
    pid = int(background.stderr.split()[-1])
    assert pid in [process.pid for process in sandbox.commands.list()]


@pytest.mark.compat("CLI", "logs", "works")
def test_logs_show_the_life_and_the_console(run: Run, create: Create) -> None:
    sandbox = create()
    sandbox.commands.run("echo said-on-the-console | sudo tee /dev/ttyS0")
    sandbox.pause()
    sandbox.connect()
    shown = wait_for(lambda: _with(run("sandbox", "logs", sandbox.sandbox_id).stdout, "resumed"), "the log")
    order = [shown.index(word) for word in ("created from template base", "paused", "resumed")]
    assert order == sorted(order)
    assert "said-on-the-console" in shown
    lines = run("sandbox", "logs", sandbox.sandbox_id, "--format", "json").stdout.strip().splitlines()
    assert json.loads(lines[0])["logger"] == "sandbox"


def _with(text: str, wanted: str) -> str:
    return text if wanted in text else ""


@pytest.mark.compat("CLI", "logs, follow", "works")
def test_logs_follow_until_the_sandbox_ends(spawn: Spawn, create: Create) -> None:
    sandbox = create()
    terminal = spawn("sandbox", "logs", "--follow", sandbox.sandbox_id)
    terminal.expect("created from template base")
    sandbox.commands.run("echo 'a new line' | sudo tee /dev/ttyS0")
    terminal.expect("a new line")
    sandbox.kill()
    terminal.expect("closed")
    terminal.expect(pexpect.EOF)


@pytest.mark.compat("CLI", "metrics", "works")
def test_metrics(run: Run, create: Create) -> None:
    sandbox = create()
    shown = run("sandbox", "metrics", sandbox.sandbox_id).stdout
    assert re.search(r"CPU.*Memory.*MiB.*Disk.*MiB", shown)
    lines = run("sandbox", "metrics", sandbox.sandbox_id, "--format", "json").stdout.strip().splitlines()
    sample = json.loads(lines[0])
    assert 0 < sample["memUsed"] < sample["memTotal"]


@pytest.mark.compat("CLI", "pause and connect", "works")
def test_pause_and_resume(run: Run, create: Create) -> None:
    sandbox = create()
    run("sandbox", "pause", sandbox.sandbox_id)
    assert sandbox.get_info().state == "paused"
    run("sandbox", "resume", sandbox.sandbox_id)
    assert sandbox.get_info().state == "running"


@pytest.mark.compat("CLI", "snapshots", "works")
def test_snapshots(run: Run, create: Create) -> None:
    sandbox = create()
    run("sandbox", "snapshot", "create", sandbox.sandbox_id)
    (snapshot,) = Sandbox.list_snapshots().next_items()
    assert snapshot.snapshot_id in run("sandbox", "snapshot", "list").stdout
    run("sandbox", "snapshot", "delete", snapshot.snapshot_id)
    assert not Sandbox.list_snapshots().next_items()


@pytest.mark.compat("CLI", "kill", "works")
def test_kill_one_and_all(run: Run, create: Create) -> None:
    one, two = create(), create()
    assert "has been killed" in run("sandbox", "kill", one.sandbox_id).stdout
    assert "wasn't found" in run("sandbox", "kill", one.sandbox_id).stderr
    assert "Killed 1 running sandboxes" in run("sandbox", "kill", "--all").stdout
    assert not two.is_running()


@pytest.mark.compat("CLI", "templates", "works")
def test_template_list(run: Run, create: Create) -> None:
    listed = run("template", "list", "--format", "json").stdout
    assert "base" in [alias for template in json.loads(listed) for alias in template["aliases"]]
    assert "base" in run("template", "list").stdout


@pytest.mark.compat("CLI", "errors", "works")
def test_a_wrong_key_is_said_to_be_wrong(run: Run, cli_environment: dict[str, str], create: Create) -> None:
    cli_environment["E2B_API_KEY"] = "e2b_" + "0" * 40
    done = run("sandbox", "list", check=False)
    assert done.returncode == 1
    assert "API key is not valid" in done.stderr
