"""Commands and terminals through the official SDK."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2b import (
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    TimeoutException,
)

from tests.envd.daemon import Envd, wait_until

NOBODY = "nobody"  # Its shell start-up files are empty on every host, so commands start fast.


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_output_and_exit_code(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2", user=NOBODY)
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("out\n", "err\n", 0, None)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo before; exit 37", user=NOBODY)
    assert (failed.value.exit_code, failed.value.stdout) == (37, "before\n")
    assert failed.value.error == "exit status 37"


def test_many_fast_commands_lose_nothing(envd: Envd, sandbox: Sandbox) -> None:
    lines = 3000
    wanted = "".join(f"{n} {'x' * 60}\n" for n in range(lines))
    script = f"i=0; while [ $i -lt {lines} ]; do echo $i {'x' * 60}; i=$((i+1)); done"

    def run(_: int) -> bool:
        return sandbox.commands.run(script, user=NOBODY).stdout == wanted

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(run, range(200)))
    wait_until(lambda: not envd.children(), "the end of all children")
    assert sandbox.commands.list() == []


def test_no_descriptors_leak(envd: Envd, sandbox: Sandbox) -> None:
    sandbox.commands.run("true", user=NOBODY)
    before = envd.descriptors
    for _ in range(50):
        sandbox.commands.run("echo x", user=NOBODY)
    wait_until(lambda: envd.descriptors <= before + 1, "closing all pipes")


def test_large_output_with_interleaved_streams(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("seq 1 300000; seq 1 100000 >&2", user=NOBODY)
    assert result.stdout == "".join(f"{n}\n" for n in range(1, 300001))
    assert result.stderr == "".join(f"{n}\n" for n in range(1, 100001))


def test_kill_ends_the_whole_group(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 1000 & echo $!; wait", background=True, user=NOBODY)
    child = int(next(iter(handle))[0] or "0")
    assert alive(child) and alive(handle.pid)
    assert [p.pid for p in sandbox.commands.list()] == [handle.pid]
    assert handle.kill()
    wait_until(lambda: not alive(child), "the end of the grandchild")
    with pytest.raises(CommandExitException) as killed:
        handle.wait()
    assert killed.value.error == "signal: killed"
    assert not sandbox.commands.kill(handle.pid)


def test_a_background_grandchild_does_not_hold_the_end_and_lives_on(sandbox: Sandbox) -> None:
    script = "(while :; do echo tick; sleep 0.05; done) & echo $!"
    result = sandbox.commands.run(script, user=NOBODY, timeout=30)
    child = next(int(word) for word in result.stdout.split() if word != "tick")  # which it may have said already
    try:
        # It goes on writing to the pipe that nobody listens to: that must not kill it.
        written = Path(f"/proc/{child}/io").read_text
        start = written()
        wait_until(lambda: written() != start and alive(child), "output of the grandchild")
    finally:
        os.kill(child, 9)


def test_output_of_process_substitution_is_complete(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo hello > >(cat)", user=NOBODY)
    assert result.stdout == "hello\n"


def test_disconnected_process_is_not_blocked(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("seq 1 1000000; echo done > /tmp/envd-test-$$; sleep 1000", background=True)
    handle.disconnect()
    marker = Path(f"/tmp/envd-test-{handle.pid}")
    wait_until(marker.exists, "the end of the output")
    assert sandbox.commands.kill(handle.pid)
    marker.unlink()


def test_connect_sees_later_output_and_the_end(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("read line; echo got $line; exit 3", background=True, stdin=True, user=NOBODY)
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    assert again.pid == handle.pid
    again.send_stdin("words\n")
    with pytest.raises(CommandExitException) as ended:
        again.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (3, "got words\n")
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(handle.pid)


def test_stdin(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("cat", background=True, stdin=True, user=NOBODY)
    data = "0123456789abcdef" * 20000
    reader: list[str] = []
    thread = threading.Thread(target=lambda: reader.append(handle.wait().stdout))
    thread.start()
    sandbox.commands.stream_input(handle.pid, [data, data])
    sandbox.commands.send_stdin(handle.pid, "end")
    handle.close_stdin()
    thread.join(30)
    assert reader == [data + data + "end"]


def test_stdin_is_empty_by_default(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("cat; echo $?", user=NOBODY).stdout == "0\n"


def test_terminal(sandbox: Sandbox) -> None:
    output = bytearray()
    handle = sandbox.pty.create(PtySize(rows=20, cols=70), user=NOBODY, cwd="/tmp")
    done = threading.Event()

    def read() -> None:
        with contextlib.suppress(CommandExitException):
            handle.wait(on_pty=output.extend)
        done.set()

    threading.Thread(target=read).start()
    sandbox.pty.send_stdin(handle.pid, b"stty size\n")
    wait_until(lambda: b"20 70" in output, "the size")
    sandbox.pty.resize(handle.pid, PtySize(rows=33, cols=99))
    sandbox.pty.send_stdin(handle.pid, b"stty size; tty; pwd\n")
    wait_until(lambda: b"33 99" in output and b"/dev/pts/" in output, "the new size")
    sandbox.pty.send_stdin(handle.pid, b"exit 4\n")
    assert done.wait(20)


def test_working_directory(sandbox: Sandbox, tmp_path: Path) -> None:
    assert sandbox.commands.run("pwd", cwd=str(tmp_path), user="root").stdout == f"{tmp_path}\n"
    with pytest.raises(InvalidArgumentException, match="cwd '/no/such/dir' does not exist"):
        sandbox.commands.run("pwd", cwd="/no/such/dir")
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        sandbox.commands.run("pwd", cwd="/etc/passwd")


def test_a_default_directory_out_of_reach_is_replaced(fresh: Envd, tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    body = json.dumps({"defaultUser": NOBODY, "defaultWorkdir": str(locked)})
    assert fresh.request("POST", "/init", body).status == 204
    assert fresh.sandbox().commands.run("pwd").stdout == "/\n"
    with pytest.raises(InvalidArgumentException, match="working directory: permission denied"):
        fresh.sandbox().commands.run("pwd", cwd=str(locked))


def test_user_and_environment(sandbox: Sandbox) -> None:
    shown = "id -un; echo $HOME $USER $LOGNAME; echo $GIVEN"
    result = sandbox.commands.run(shown, user=NOBODY, envs={"GIVEN": "a b"})
    assert result.stdout == "nobody\n/nonexistent nobody nobody\na b\n"
    assert sandbox.commands.run("id -u; cat /proc/self/oom_score_adj", user="root").stdout.split()[0] == "0"
    with pytest.raises(Exception, match="unknown user no-such-user"):
        sandbox.commands.run("true", user="no-such-user")


def test_each_command_has_its_own_session(sandbox: Sandbox) -> None:
    stat = sandbox.commands.run("cat /proc/$$/stat; echo $$", user=NOBODY).stdout.splitlines()
    fields = stat[0].rsplit(")", 1)[1].split()
    assert fields[2] == fields[3] == stat[1]


def test_the_deadline_ends_the_command(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 1000", timeout=1, user=NOBODY)
    wait_until(lambda: not sandbox.commands.list(), "the end of the command")
