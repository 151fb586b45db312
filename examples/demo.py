"""`make demo`: start a node if none runs, and live one sandbox's whole life through the official E2B SDK.

The node keeps running afterwards; `make stop` ends it. What this prints are wall-clock times of SDK calls.
"""

import os
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
from rich.table import Table

CHILDREN = 16
START_DEADLINE = 900.0  # seconds; a first start builds the base image and boots it once

HOME = Path(os.environ.get("AENV_HOME", "/var/lib/aenv"))
PORT = int(os.environ.get("AENV_PORT", "8000"))
URL = f"http://127.0.0.1:{PORT}"
PID_FILE = HOME / "demo-server.pid"
LOG_FILE = HOME / "demo-server.log"

console = Console(highlight=False)
Result = TypeVar("Result")


def healthy() -> bool:
    try:
        return httpx.get(f"{URL}/health", timeout=2).is_success
    except httpx.HTTPError:
        return False


def start_node() -> None:
    """Start `aenv-server` in the background unless it answers already, showing its log until it is ready."""
    if healthy():
        console.print(f"[bold]node[/]      already running at {URL}")
        return
    HOME.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    server = Path(sys.executable).parent / "aenv-server"
    with LOG_FILE.open("w") as log:
        process = subprocess.Popen(
            [server, "--home", HOME, "--port", str(PORT)],
            env={**os.environ, "AENV_LOG_FORMAT": "console"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    PID_FILE.write_text(str(process.pid))
    console.print(f"[bold]node[/]      starting aenv-server (pid {process.pid}, log {LOG_FILE})")
    shown = 0
    while not healthy():
        if process.poll() is not None:
            sys.exit(f"aenv-server ended with status {process.returncode}:\n{LOG_FILE.read_text()[-2000:]}")
        if time.monotonic() - started > START_DEADLINE:
            sys.exit(f"aenv-server was not ready after {START_DEADLINE:.0f} s; see {LOG_FILE}")
        text = LOG_FILE.read_text()
        for line in text[shown:].splitlines(keepends=True):
            if line.endswith("\n"):
                shown += len(line)
                console.print(f"          {line.rstrip()}", style="dim", markup=False)
        time.sleep(0.1)
    console.print(f"[bold]node[/]      ready at {URL} after {time.monotonic() - started:.1f} s")


def stop_node() -> None:
    """End the demo's node. Sandboxes of the demo are killed by it; others are paused."""
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
    """Collects and prints steps with their milliseconds."""

    def __init__(self) -> None:
        self._table = Table(title="One life of a sandbox, through the official E2B SDK", title_justify="left")
        self._table.add_column("step")
        self._table.add_column("ms", justify="right")
        self._table.add_column("what was seen")

    @contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        seen: list[str] = []
        with console.status(name):
            started = time.perf_counter()
            yield seen.append
            elapsed = (time.perf_counter() - started) * 1000
        self._table.add_row(name, f"{elapsed:,.0f}", "; ".join(seen))
        console.print(f"  {elapsed:9,.0f} ms  {name:<44} [dim]{'; '.join(seen)}[/]")

    def show(self) -> None:
        console.print()
        console.print(self._table)


def in_parallel(work: Callable[[int], Result], count: int) -> list[Result]:
    with ThreadPoolExecutor(count) as executor:
        return list(executor.map(work, range(count)))


def expect(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"demo failed: {what}")


def live() -> None:
    from e2b import Sandbox

    timeline = Timeline()
    console.print("[bold]sandbox[/]   one whole life, timed at the SDK call")
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
    timeline.show()


def explain() -> None:
    console.print(
        f"""
The node keeps running ([bold]make stop[/] ends it). To point your own E2B code at it, set

  export E2B_API_URL={URL}
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
    os.environ["E2B_API_KEY"] = os.environ.get("AENV_API_KEY") or (HOME / "api-key").read_text().strip()
    live()
    explain()


if __name__ == "__main__":
    main()
