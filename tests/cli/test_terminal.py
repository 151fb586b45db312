"""Programs of a sandbox on the user's terminal."""

import re
import signal
import subprocess
import termios
from pathlib import Path

import pexpect
import pytest

from tests.cli.conftest import Run, Spawn, finished
from tests.node.process import NodeProcess, wait_for

pytestmark = pytest.mark.slow

PROMPT = r"[$#] $"


def settings(child: "pexpect.spawn[str]") -> list[object]:
    """Of the terminal, as the next program would find them."""
    return list(termios.tcgetattr(child.child_fd))


def shell(terminal: Spawn, *arguments: str, columns: int = 80) -> "pexpect.spawn[str]":
    """``aenv`` on a terminal, when the prompt of a shell in a sandbox is there."""
    child = terminal(*arguments, columns=columns)
    child.expect(PROMPT)
    return child


def test_start_opens_a_shell_that_leaves_its_sandbox(terminal: Spawn, aenv: Run, clean: None) -> None:
    child = terminal("start", "base", "--timeout", "10m", columns=100)
    child.expect(r"Sandbox (i[a-z0-9]{19}) started\.")
    assert child.match is not None
    made = child.match[1]
    child.expect(PROMPT)
    child.sendline("echo $((40+2)) $(id -un) $TERM; stty size")
    child.expect(r"42 user xterm-256color\r\n30 100")
    child.expect(PROMPT)
    child.sendcontrol("d")
    code, shown = finished(child)
    assert code == 0
    assert re.search(rf"Sandbox {made} runs on and is paused in (10m|9m \d+s)\. Back: aenv connect {made}", shown)
    assert made in aenv("ls", "-q").stdout

    aenv("pause", made)
    child = shell(terminal, "cn", made, "-u", "root", "-w", "/srv")
    child.sendline("pwd; id -un; exit 7")
    child.expect(r"/srv\r\nroot\r\n")
    assert finished(child)[0] == 7


def test_a_sandbox_for_the_time_of_a_shell(terminal: Spawn, aenv: Run, clean: None) -> None:
    child = terminal("start", "--rm")
    child.expect(r"Sandbox (i[a-z0-9]{19}) started\.")
    assert child.match is not None
    made = child.match[1]
    child.expect(PROMPT)
    child.sendline("exit")
    code, shown = finished(child)
    assert (code, f"Sandbox {made} deleted.\n" in shown) == (0, True)
    assert made not in aenv("ls", "-q").stdout


def test_keys_are_the_programs(terminal: Spawn, sandbox: str) -> None:
    child = shell(terminal, "connect", sandbox)
    # What the program itself says tells that it has the terminal; before that, keys would be the shell's.
    child.sendline("sh -c 'echo wai''ts; exec sleep 1000'")
    child.expect("waits")
    child.sendcontrol("c")
    child.expect(PROMPT)
    child.sendline("sh -c 'echo re''ady; exec cat'; echo over $?")
    child.expect("ready")
    child.sendline("typed")
    child.expect(r"typed\r\ntyped\r\n")
    child.sendcontrol("d")
    child.expect("over 0")
    child.expect(PROMPT)
    child.sendline("sh -c 'echo sle''eps; exec sleep 1000'")
    child.expect("sleeps")
    child.sendcontrol("z")
    child.expect(r"\[1\]\+ +Stopped")
    child.sendline("kill -9 %1; disown %1; exit 3")
    assert finished(child)[0] == 3


def test_the_terminals_size_follows(terminal: Spawn, sandbox: str) -> None:
    child = shell(terminal, "connect", sandbox)
    child.sendline("trap 'stty size' WINCH; stty size")
    child.expect("30 80")
    child.expect(PROMPT)
    child.setwinsize(41, 132)
    child.expect("41 132")
    child.sendline("exit")
    assert finished(child)[0] == 0


def test_a_program_that_owns_the_screen(terminal: Spawn, sandbox: str) -> None:
    child = terminal("exec", "-t", sandbox, "less", "/etc/services")
    child.expect_exact("\x1b[?1049h")
    child.expect("/etc/services")
    child.send("G")
    child.expect(r"\(END\)")
    child.setwinsize(10, 60)
    child.send("g")
    child.expect("Network services")
    child.send("q")
    code, shown = finished(child)
    assert code == 0
    assert "\x1b[?1049l" in shown


def test_the_terminal_is_as_before(environment: dict[str, str], sandbox: str) -> None:
    # A shell of this machine around it, whose terminal has to be in order afterwards.
    child = pexpect.spawn("/bin/sh", env={**environment, "PS1": "here> "}, encoding="utf-8", timeout=120)
    try:
        child.expect_exact("here> ")
        before = settings(child)
        child.sendline(f"aenv exec -t {sandbox} sh -c 'tty; exit 4'; echo code $?")
        child.expect(r"/dev/pts/\d+")
        child.expect("code 4")
        child.expect_exact("here> ")
        assert settings(child) == before
    finally:
        child.close(force=True)


def test_what_cannot_run_is_said_and_not_tried_again(terminal: Spawn, sandbox: str) -> None:
    code, shown = finished(terminal("exec", "-t", sandbox, "nothing-here", "x", NO_COLOR="1"))
    assert (code, shown) == (127, "error: executable 'nothing-here' not found in PATH\n")
    code, shown = finished(terminal("connect", sandbox, "--pid", "99999", NO_COLOR="1"))
    assert code == 1
    assert shown.startswith("error: ")
    assert "trying to get back" not in shown


def test_a_terminal_that_is_closed_leaves_a_shell_to_come_back_to(terminal: Spawn, aenv: Run, sandbox: str) -> None:
    child = shell(terminal, "connect", sandbox)
    child.sendline("echo pid=$$ && MARK=kept")
    child.expect(r"pid=(\d+)\r\n")
    assert child.match is not None
    pid = child.match[1]
    child.expect(PROMPT)
    child.close(force=True)
    assert pid in aenv("exec", sandbox, "ps", "-eo", "pid").stdout.split()
    child = terminal("connect", sandbox, "--pid", pid)
    child.sendline("echo mark=$MARK")
    child.expect("mark=kept")
    child.sendline("exit")
    assert finished(child)[0] == 0


def test_a_sandbox_that_is_paused_or_deleted_ends_its_shells(terminal: Spawn, aenv: Run, clean: None) -> None:
    made = aenv("start", "-q").stdout.strip()
    child = shell(terminal, "connect", made)
    aenv("pause", made)
    code, shown = finished(child)
    assert code == 1
    assert f"Sandbox {made} was paused." in shown
    found = re.search(r"`aenv (connect \S+ --pid \d+)` resumes it", shown)
    assert found is not None, shown
    child = terminal(*found[1].split())
    child.sendline("echo again $((40+2))")
    child.expect("again 42")
    aenv("rm", made)
    code, shown = finished(child)
    assert code == 1
    assert f"Sandbox {made} was deleted." in shown


@pytest.mark.parametrize("arguments", [("start", "base"), ("snapshot", "create", "{id}")])
def test_an_interrupted_command_leaves_nothing(
    environment: dict[str, str], aenv: Run, sandbox: str, arguments: tuple[str, ...], clean: None
) -> None:
    """Ctrl-C while the server works: what it makes all the same is deleted."""
    before = aenv("snapshot", "ls", "-q").stdout
    aenv_program = [word.format(id=sandbox) for word in ("aenv", *arguments)]
    child = subprocess.Popen(
        aenv_program, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for(lambda: _has_socket(child.pid), "the request")
    child.send_signal(signal.SIGINT)
    output, errors = child.communicate(timeout=120)
    if child.returncode == 0:  # it was quicker, and says what it made
        assert output
        return
    assert (child.returncode, output, errors.strip()) == (130, b"", b"")
    assert aenv("ls", "-q").stdout.split() == [sandbox]
    assert aenv("snapshot", "ls", "-q").stdout == before


def _has_socket(pid: int) -> bool:
    try:
        return any("socket:" in str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:
        return False


def test_a_server_that_restarts_is_found_again(terminal: Spawn, node: NodeProcess, aenv: Run, sandbox: str) -> None:
    child = shell(terminal, "connect", sandbox)
    child.sendline("MARK=kept")
    child.expect(PROMPT)
    node.kill9()
    child.expect("the connection was lost; trying to get back")
    node.start()
    child.sendline("echo mark=$MARK $((40+2))")
    child.expect("mark=kept 42")
    child.expect(PROMPT)
    child.sendline("exit")
    assert finished(child)[0] == 0


def test_giving_up_on_a_server_that_stays_away(terminal: Spawn, node: NodeProcess, sandbox: str) -> None:
    child = terminal("exec", "-t", sandbox, "less", "/etc/services", NO_COLOR="1")
    child.expect("Network services")
    node.kill9()
    try:
        child.expect("trying to get back, Ctrl-C gives up")
        child.sendcontrol("c")
        code, shown = finished(child)
    finally:
        node.start()
    assert code == 125
    assert "\x1b[?1049l" in shown
    assert re.search(rf"error: The connection was lost: .*\n.*`aenv connect {sandbox} --pid \d+` goes back", shown), (
        shown
    )
