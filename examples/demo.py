"""`make demo`: start a node if none runs, and live one sandbox's whole life through the official E2B SDK.

The node keeps running afterwards; `make stop` ends it. What this prints are wall-clock times of SDK calls.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table

CHILDREN = 16
START_DEADLINE = 900.0  # seconds; a first start builds the base image and boots it once

HOME = Path(os.environ.get("AENV_HOME", "/var/lib/aenv"))
PORT = int(os.environ.get("AENV_PORT", "8000"))
URL = f"http://127.0.0.1:{PORT}"
PID_FILE = HOME / "demo-server.pid"
LOG_FILE = HOME / "demo-server.log"
LOG_PREFIX = re.compile(r"^\S+ \[(info +\] )?")  # time and level of a line of the log; other levels than info stay

console = Console(highlight=False)
Result = TypeVar("Result")


def say(text: str) -> None:
    """Print a line that only the terminal itself may break, so that paths and commands can be copied."""
    console.print(text, soft_wrap=True)


def healthy() -> bool:
    try:
        return httpx.get(f"{URL}/health", timeout=2).is_success
    except httpx.HTTPError:
        return False


def start_node() -> None:
    """Start `aenv-server` in the background unless it answers already, showing its log until it is ready."""
    if healthy():
        say(f"[bold]node[/]      already running at {URL}")
        return
    HOME.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    server = Path(sys.executable).parent / "aenv-server"
    with LOG_FILE.open("w") as log:
        process = subprocess.Popen(
            [server, "--home", HOME, "--port", str(PORT), "--stop-sandboxes"],
            env={**os.environ, "AENV_LOG_FORMAT": "console"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    PID_FILE.write_text(str(process.pid))
    say(f"[bold]node[/]      starting aenv-server (pid {process.pid}, log {LOG_FILE})")
    shown, ready = 0, False
    while not ready:
        ended, ready = process.poll() is not None, healthy()
        seconds = time.monotonic() - started
        text = LOG_FILE.read_text()
        complete = text.rfind("\n") + 1
        for line in text[shown:complete].splitlines():
            console.print(f"{seconds:8.1f} s  {LOG_PREFIX.sub('', line)}", style="dim", markup=False, soft_wrap=True)
        shown = complete
        if ended:
            sys.exit(f"demo: aenv-server ended with status {process.returncode}; its log is {LOG_FILE}")
        if seconds > START_DEADLINE:
            sys.exit(f"demo: aenv-server was not ready after {START_DEADLINE:.0f} s; its log is {LOG_FILE}")
        time.sleep(0.1)
    say(f"[bold]node[/]      ready at {URL} after {time.monotonic() - started:.1f} s")


def api_key() -> str:
    """The key of the node that answers, which may have been started on another home."""
    file = HOME / "api-key"
    key = os.environ.get("AENV_API_KEY") or (file.read_text().strip() if file.exists() else "")
    if httpx.get(f"{URL}/nodes", headers={"X-API-Key": key}, timeout=10).status_code == 401:
        sys.exit(
            f"demo: the node at {URL} has another key than {file}: set AENV_HOME to its home, or another AENV_PORT"
        )
    return key


def stop_node() -> None:
    """End the demo's node, which pauses the sandboxes that run."""
    try:
        pid = int(PID_FILE.read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError, ValueError):
        console.print("no demo node is running")
        return
    if b"aenv-server" not in command:
        console.print("no demo node is running")
        return
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists() and b"aenv-server" in Path(f"/proc/{pid}/cmdline").read_bytes():
        time.sleep(0.05)
    PID_FILE.unlink(missing_ok=True)
    console.print("node stopped")


class Timeline:
    """A table of steps with their milliseconds, which grows on the terminal."""

    def __init__(self) -> None:
        title = "One life of a sandbox, timed at the calls of the E2B SDK"
        self._table = Table(title=title, title_justify="left", caption_justify="left")
        self._table.add_column("step")
        self._table.add_column("ms", justify="right", min_width=5)
        self._table.add_column("what was seen", min_width=30)
        self._live = Live(self._table, console=console, auto_refresh=False)

    def __enter__(self) -> "Timeline":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        if not console.is_terminal:
            console.line()  # which Live prints on a terminal only

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        seen: list[str] = []
        self._table.caption = f"{name} …"
        self._live.refresh()
        started = time.perf_counter()
        yield seen.append
        elapsed = (time.perf_counter() - started) * 1000
        self._table.add_row(name, f"{elapsed:,.0f}", "; ".join(seen))
        self._table.caption = None
        self._live.refresh()


def in_parallel(work: Callable[[int], Result], count: int) -> list[Result]:
    with ThreadPoolExecutor(count) as executor:
        return list(executor.map(work, range(count)))


def expect(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"demo failed: {what}")


def live(timeline: Timeline) -> None:
    from e2b import Sandbox

    with timeline.step("create from base") as saw:
        sandbox = Sandbox.create("base", timeout=600, metadata={"made-by": "demo"})
        saw(sandbox.sandbox_id)
    children: list[Sandbox] = []
    try:
        with timeline.step("first command") as saw:
            kernel = sandbox.commands.run("uname -sr && whoami && pwd").stdout.split("\n")
            saw(", ".join(filter(None, kernel)))
        with timeline.step("another command") as saw:
            saw(sandbox.commands.run("python3 -c 'print(6 * 7)'").stdout.strip())
        with timeline.step("write a file, read it back") as saw:
            sandbox.files.write("notes.txt", "remember me\n")
            text = sandbox.files.read("notes.txt")
            expect(text == "remember me\n", f"the file came back as {text!r}")
            saw(repr(text))
        with timeline.step("start a background process"):
            sandbox.commands.run(
                "n=0; while true; do n=$((n+1)); echo $n > /tmp/count; sleep 0.2; done", background=True, timeout=0
            )
            sandbox.commands.run("until [ -s /tmp/count ]; do sleep 0.1; done")
        before = int(sandbox.commands.run("cat /tmp/count").stdout)
        with timeline.step("pause") as saw:
            sandbox.pause()
            saw("memory is on disk, the VM process is gone")
        with timeline.step("resume (VM running)"):
            sandbox.connect(timeout=600)
        with timeline.step("first command after resume") as saw:
            sandbox.commands.run(f'until [ "$(cat /tmp/count)" -gt {before} ]; do sleep 0.1; done', timeout=30)
            after = int(sandbox.commands.run("cat /tmp/count").stdout)
            expect(sandbox.files.read("notes.txt") == text, "the file did not survive")
            saw(f"the process counted on from {before} to {after}; the file is there")
        with timeline.step(f"fork into {CHILDREN} (all running)") as saw:
            outcomes = sandbox.fork(count=CHILDREN, timeout=600)
            failed = [str(outcome) for outcome in outcomes if isinstance(outcome, Exception)]
            expect(not failed, f"{len(failed)} children did not start: {failed[:1]}")
            children = [outcome for outcome in outcomes if isinstance(outcome, Sandbox)]
            saw(f"{len(children)} children")
        with timeline.step("every child answers a command") as saw:
            texts = in_parallel(lambda n: children[n].commands.run("cat notes.txt").stdout, CHILDREN)
            expect(set(texts) == {text}, f"children saw {set(texts)}")
            saw("each sees its parent's file")
        with timeline.step("children diverge") as saw:
            in_parallel(lambda n: children[n].files.write("notes.txt", f"child {n}\n"), CHILDREN)
            texts = in_parallel(lambda n: children[n].files.read("notes.txt"), CHILDREN)
            expect(texts == [f"child {n}\n" for n in range(CHILDREN)], f"children read {texts}")
            expect(sandbox.files.read("notes.txt") == text, "a child changed its parent")
            saw("each its own text; the parent's is unchanged")
        with timeline.step(f"kill all {CHILDREN + 1}"):
            in_parallel(lambda n: [*children, sandbox][n].kill(), CHILDREN + 1)
    finally:
        for leftover in [*children, sandbox]:
            leftover.kill()


def explain() -> None:
    console.print("\nThe node keeps running ([bold]make stop[/] ends it). Point your own E2B code at it:\n")
    say(
        f"""  export E2B_API_URL={URL}
  export E2B_SANDBOX_URL={URL}
  export E2B_API_KEY=$(cat {HOME}/api-key)

and change nothing else:

  from e2b import Sandbox
  with Sandbox.create("base") as sandbox:
      print(sandbox.commands.run("echo hello").stdout)
"""
    )


def main() -> None:
    if "--stop" in sys.argv[1:]:
        stop_node()
        return
    if os.geteuid() != 0:
        sys.exit("demo: run it as root; sandboxes need network namespaces and tap devices")
    start_node()
    os.environ["E2B_API_URL"] = os.environ["E2B_SANDBOX_URL"] = URL
    os.environ["E2B_API_KEY"] = api_key()
    with Timeline() as timeline:
        live(timeline)
    explain()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("demo: interrupted; a node that was started goes on (make stop ends it)")
