"""``aenv exec``, ``upload``, ``download`` and ``port-forward`` without a terminal."""

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.cli.conftest import AENV, TIMEOUT, Run, Spawn, finished
from tests.node.process import wait_for

INTERRUPTIBLE = ["env", "--default-signal=INT"]  # jobs that a shell runs in the background ignore it, tests as well

# -- exec


def test_streams_input_and_exit_code(aenv: Run, sandbox: str) -> None:
    done = aenv("exec", sandbox, "echo out; echo err >&2; exit 7", check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "out\n", "err\n")
    assert aenv("exec", sandbox, "cat", text="a\nb").stdout == "a\nb"
    assert aenv("exec", sandbox, "wc", "-c", text="x" * 3_000_000).stdout.strip() == "3000000"
    assert aenv("exec", "-n", sandbox, "wc", "-c", text="not passed on").stdout.strip() == "0"
    assert aenv("exec", sandbox, "true", text="nobody reads this" * 10_000).returncode == 0


def test_bytes_are_passed_on_as_they_are(environment: dict[str, str], sandbox: str) -> None:
    data = os.urandom(2_000_000)
    done = subprocess.run(
        [AENV, "exec", sandbox, "cat"], input=data, capture_output=True, env=environment, timeout=TIMEOUT
    )
    assert done.stdout == data


def test_user_folder_environment_and_words(aenv: Run, sandbox: str) -> None:
    script = "id -un; pwd; echo $A $HERE; printf '<%s>' \"$@\""
    options = ["-u", "root", "-w", "/srv", "-e", "A=b c", "-e", "HERE"]
    done = aenv("exec", *options, sandbox, "sh", "-c", script, "sh", "x y", "-e", "", HERE="from here")
    assert done.stdout == "root\n/srv\nb c from here\n<x y><-e><>"
    assert aenv("exec", sandbox, "--", "ls", "-d", "/tmp").stdout == "/tmp\n"
    assert aenv("exec", sandbox, "python3", "-c", "print(6 * 7)").stdout == "42\n"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("kill -9 $$",), 137, ""),
        (("nothing-here",), 127, "error: executable 'nothing-here' not found in PATH"),
        (("/nothing/here",), 127, "error: "),
        (("/etc/passwd",), 126, "error: "),
        (("/etc",), 126, "error: "),
        (("nothing-here; exit 9",), 9, "bash: line 1: nothing-here: "),
        (("-w", "/nothing", "true"), 125, "error: "),
        (("-u", "nobody-here", "true"), 125, "error: "),
        (("-t", "true"), 125, "error: -t needs a terminal as standard input and output.\nLeave it out.\n"),
    ],
)
def test_codes_of_what_went_wrong(
    aenv: Run, sandbox: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = aenv("exec", *arguments[:-1], sandbox, arguments[-1], check=False)
    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert bool(message) == bool(done.stderr)


def test_a_paused_sandbox_is_said_to_be_paused(aenv: Run, clean: None) -> None:
    made = aenv("start", "-q").stdout.strip()
    aenv("pause", made)
    done = aenv("exec", made, "true", check=False)
    assert (done.returncode, done.stderr) == (
        125,
        f"error: Sandbox {made} is paused.\nResume it with `aenv resume {made}`.\n",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_ends_in_the_sandbox_too(
    aenv: Run, environment: dict[str, str], sandbox: str, number: signal.Signals
) -> None:
    mark = f"marked-{number}"
    child = subprocess.Popen(
        [*INTERRUPTIBLE, AENV, "exec", sandbox, f"exec -a {mark} sleep 1000"],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for(lambda: mark in aenv("exec", sandbox, "ps", "-eo", "args").stdout, "the command to run")
    child.send_signal(number)
    _, errors = child.communicate(timeout=TIMEOUT)
    assert child.returncode == 128 + number
    assert errors == b""
    assert mark not in aenv("exec", sandbox, "ps", "-eo", "args").stdout


def test_a_reader_that_has_enough_ends_the_command(aenv: Run, environment: dict[str, str], sandbox: str) -> None:
    done = subprocess.run(
        f"{AENV} exec {sandbox} 'exec -a endless yes' | head -1; exit ${{PIPESTATUS[0]}}",
        shell=True, executable="/bin/bash", env=environment, capture_output=True, text=True, timeout=TIMEOUT,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (141, "y\n", "")
    assert "endless" not in aenv("exec", sandbox, "ps", "-eo", "args").stdout


# -- upload and download


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    made = tmp_path / "tree"
    (made / "sub").mkdir(parents=True)
    (made / "a").write_text("A")
    (made / "sub" / "run").write_text("#!/bin/sh\n")
    (made / "sub" / "run").chmod(0o755)
    (made / "link").symlink_to("a")
    return made


def test_files(aenv: Run, terminal: Spawn, sandbox: str, tmp_path: Path) -> None:
    data = os.urandom(5_000_000)
    (tmp_path / "data").write_bytes(data)
    (tmp_path / "data").chmod(0o755)
    aenv("upload", sandbox, str(tmp_path / "data"))
    aenv("upload", sandbox, str(tmp_path / "data"), "new/folder/")
    aenv("upload", "-u", "root", sandbox, str(tmp_path / "data"), "/srv/renamed")
    listed = aenv("exec", sandbox, "stat -c '%n %U %s' data new/folder/data /srv/renamed").stdout
    assert listed == "data user 5000000\nnew/folder/data user 5000000\n/srv/renamed root 5000000\n"
    (tmp_path / "into").mkdir()
    aenv("download", sandbox, "data", cwd=tmp_path / "into")
    aenv("download", sandbox, "new/folder/data", "into/other", cwd=tmp_path)
    assert (tmp_path / "into/data").read_bytes() == (tmp_path / "into/other").read_bytes() == data
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == ["data", "other"]
    code, shown = finished(terminal("download", sandbox, "data", str(tmp_path / "third")))
    assert code == 0
    assert shown.replace("\r", "").endswith(f"{sandbox}:data -> {tmp_path / 'third'}\n")


def test_folders(aenv: Run, sandbox: str, tree: Path, tmp_path: Path) -> None:
    aenv("upload", sandbox, str(tree), "copy")
    aenv("upload", sandbox, str(tree / "a"), str(tree / "sub"), "several")
    found = aenv("exec", sandbox, "find copy several | sort; readlink copy/link; stat -c %a copy/sub/run").stdout
    assert found.split() == [
        *("copy", "copy/a", "copy/link", "copy/sub", "copy/sub/run"),
        *("several", "several/a", "several/sub", "several/sub/run"),
        *("a", "755"),
    ]
    back = tmp_path / "back"
    aenv("download", sandbox, "copy", str(back))
    assert (back / "a").read_text() == "A"
    assert str((back / "link").readlink()) == "a"
    assert (back / "sub/run").stat().st_mode & 0o777 == 0o755
    (back / "a").write_text("changed")
    (back / "mine").write_text("stays")
    aenv("exec", sandbox, "mkdir inside && mv copy inside/back")
    aenv("download", sandbox, "inside/back", str(tmp_path))
    assert ((back / "a").read_text(), (back / "mine").read_text()) == ("A", "stays")
    assert aenv("exec", sandbox, "ls /tmp").stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "tree"]


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ("file('../escaped')", "../escaped"),
        ("link('out', '..'), file('out/escaped')", "out"),
        ("link('in', '.'), link('in/out', '../..')", "in/out"),
        ("link('etc', '/etc')", "etc"),
        ("hard('shadow', '../../etc/shadow')", "shadow"),
    ],
)
def test_a_guest_cannot_write_outside_of_the_folder(
    aenv: Run, sandbox: str, tmp_path: Path, members: str, name: str
) -> None:
    # Its tar is what packs: one that packs names and links that lead out of the folder.
    evil = f"""if True:
        import io, sys, tarfile
        def make(name, kind, to):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, to
            tar.addfile(info, io.BytesIO())
        file = lambda name: make(name, tarfile.REGTYPE, "")
        link = lambda name, to: make(name, tarfile.SYMTYPE, to)
        hard = lambda name, to: make(name, tarfile.LNKTYPE, to)
        with tarfile.open(sys.argv[sys.argv.index("-cf") + 1], "w") as tar:
            {members}
    """
    aenv("exec", "-u", "root", sandbox, "mkdir -p /evil && cat > /usr/local/bin/tar.py", text=evil)
    wrapper = '#!/bin/sh\nexec python3 /usr/local/bin/tar.py "$@"\n'
    aenv("exec", "-u", "root", sandbox, "cat > /usr/local/bin/tar && chmod +x /usr/local/bin/tar", text=wrapper)
    try:
        done = aenv("download", sandbox, "/evil", str(tmp_path / "into"), check=False)
    finally:
        aenv("exec", "-u", "root", sandbox, "rm -r /usr/local/bin/tar /usr/local/bin/tar.py /evil")
    assert done.returncode == 1
    assert done.stderr == f"error: The folder from the sandbox has {name!r}, which leads out of it.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("upload", "{id}", "missing"), "missing does not exist."),
        (("upload", "{id}", "{here}", "/proc/x"), "'/proc/x' does not exist"),
        (("download", "{id}", "missing"), "There is no missing in the sandbox."),
        (("download", "{id}", "/etc/hostname", "no/such/folder/x"), "cannot be written: No such file or directory."),
    ],
)
def test_what_cannot_be_copied(
    aenv: Run, sandbox: str, tree: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    words = [word.format(id=sandbox, here=tree / "a") for word in arguments]
    done = aenv(*words, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["tree"]


# -- ports


@contextmanager
def forwarding(environment: dict[str, str], *arguments: str) -> Iterator[list[str]]:
    """``aenv port-forward`` until the block is left; the local places."""
    argv = [*INTERRUPTIBLE, AENV, "port-forward", *arguments]
    child = subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        count = sum(bool(re.fullmatch(r"[\d:]+", word)) for word in arguments)
        yield [child.stderr.readline().split(" -> ")[0] for _ in range(count)]
    finally:
        child.send_signal(signal.SIGINT)
        try:
            assert child.wait(TIMEOUT) == 130
        finally:
            child.kill()
            child.stderr.close()


def test_http_and_anything_else(aenv: Run, environment: dict[str, str], sandbox: str) -> None:
    serve = "(setsid python3 -m http.server -b 127.0.0.1 {} >/dev/null 2>&1 &)\n"
    aenv("exec", sandbox, "mkdir web; cd web; echo hello > index.html\n" + serve.format(8100) + serve.format(8200))
    with forwarding(environment, sandbox, ":8100", ":8200") as (one, two):
        wait_for(lambda: httpx.get(one).text == "hello\n", "the server in the sandbox")
        with httpx.Client() as client:  # which would keep its connection
            assert [client.get(f"{place}/index.html").text for place in (one, two, one)] == ["hello\n"] * 3
            assert client.get(f"{one}/missing").status_code == 404
    echo = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 8300))\n"
        "while True:\n    c, _ = server.accept()\n    c.sendall(b'> ' + c.recv(100))\n    c.close()\n"
    )
    aenv("exec", sandbox, "cat > echo.py; (setsid python3 echo.py >/dev/null 2>&1 &)", text=echo)
    wait_for(lambda: ":206C" in aenv("exec", sandbox, "cat", "/proc/net/tcp").stdout, "the server to listen")
    with forwarding(environment, sandbox, "--tcp", ":8300") as (place,):
        host, _, port = place.partition(":")
        for _ in range(2):
            with socket.create_connection((host, int(port)), TIMEOUT) as connection:
                connection.sendall(b"\x00 no http")
                assert connection.makefile("rb").read() == b"> \x00 no http"


def test_a_port_that_is_taken(aenv: Run, sandbox: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = aenv("port-forward", sandbox, f"{port}:80", check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"error: Port {port} on 127.0.0.1 cannot be used: Address already in use.\nChoose another: LOCAL:80.\n"
    )
    assert json.loads(aenv("ls").stdout)
