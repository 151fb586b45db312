"""A real node for tests: its own home, port, addresses and names, so that it runs beside any other node."""

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx

from tests.node import slots

Result = TypeVar("Result")

# Kernel, initramfs and base image are content-keyed and survive between runs; everything else is made anew.
CACHE = Path(os.environ.get("AENV_TEST_CACHE", "/var/cache/aenv-tests"))
RUNTIME_NOTE = ".runtime"  # in a home: where its sockets are
START_TIMEOUT = 900.0  # seconds: the first start on a machine builds the base image


def wait_for(condition: Callable[[], Result], what: str, timeout: float = 60.0, interval: float = 0.02) -> Result:
    """The first true value of ``condition``; fails the test when it does not come within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        if value := condition():
            return value
        assert time.monotonic() < deadline, f"waited {timeout:.0f} s for {what}"
        time.sleep(interval)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def commands() -> Iterator[tuple[int, bytes]]:
    """Pid and command line, as /proc has it, of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "cmdline").read_bytes()


class NodeProcess:
    """One ``aenv-server`` on a home; can be killed and started again on the same home."""

    def __init__(self, folder: Path, *, prefix: str | None = None, cidr: str | None = None, **settings: str) -> None:
        """``prefix`` and ``cidr`` of its network slots are ones that nothing here uses, unless they are given."""
        prefix, cidr = prefix or slots.next_prefix(), cidr or slots.free_network()
        # Beside the artefacts: the base image becomes a layer by a hard link.
        self.home = CACHE / "homes" / f"{prefix}-{os.getpid()}"
        self.log = folder / "server.log"
        self.runtime = folder / "run"
        self.prefix = prefix
        self.cidr = cidr
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("AENV_", "E2B_"))},
            "AENV_HOME": str(self.home),
            "AENV_RUNTIME": str(self.runtime),
            "AENV_HOST": "127.0.0.1",
            "AENV_PORT": str(self.port),
            "AENV_SLOT_PREFIX": prefix,
            "AENV_SLOT_CIDR": cidr,
            "AENV_LOG_LEVEL": "debug",
            "AENV_LOG_FORMAT": "console",
            **{f"AENV_{name.upper()}": value for name, value in settings.items()},
        }
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, **settings: str) -> None:
        """Change settings; they hold from the next start."""
        self._environment |= {f"AENV_{name.upper()}": value for name, value in settings.items()}

    @property
    def api_key(self) -> str:
        return (self.home / "api-key").read_text().strip()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *arguments: str) -> None:
        (CACHE / "artifacts").mkdir(parents=True, exist_ok=True)
        if not self.home.exists():
            remove_dead()
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / RUNTIME_NOTE).write_text(str(self.runtime))
        if not (self.home / "artifacts").exists():
            (self.home / "artifacts").symlink_to(CACHE / "artifacts")
        server = Path(sys.executable).parent / "aenv-server"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [server, *arguments], env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_for(self._healthy, "the node to become ready", START_TIMEOUT)

    def _healthy(self) -> bool:
        assert self._process is not None
        status = self._process.poll()
        assert status is None, f"aenv-server ended with {status}:\n{self.log.read_text()[-4000:]}"
        try:
            return httpx.get(f"{self.url}/health", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def kill9(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def terminate(self) -> int:
        """SIGTERM; the exit status."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)

    def restart(self, **settings: str) -> None:
        """Stop and start again with other settings on top; running sandboxes stay."""
        self.terminate()
        self._environment |= {f"AENV_{name.upper()}": value for name, value in settings.items()}
        self.start()

    def records(self, table: str) -> dict[str, str]:
        """Rows of the node's database as another process sees them: id to JSON document."""
        database = sqlite3.connect(f"file:{self.home}/aenv.db?mode=ro", uri=True, timeout=5)
        try:
            return dict(database.execute(f"SELECT id, doc FROM {table}"))
        finally:
            database.close()

    def vm_pids(self) -> list[int]:
        """Processes of VMs of this home, whoever started them."""
        return vm_pids(self.home)

    def layer_server_pids(self) -> list[int]:
        """The layer server that serves this node, and its keeper."""
        return layer_server_pids(self.runtime)

    def kill_layer_server(self) -> None:
        """It and its keeper."""
        kill_layer_server(self.runtime)

    def namespaces(self) -> list[str]:
        return namespaces(self.prefix)

    def destroy(self) -> None:
        """End everything of this node, also what a failed test left."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        clear(self.home, self.runtime, self.prefix)
        slots.release(self.cidr)


def vm_pids(home: Path) -> list[int]:
    named = f"{home}/".encode()
    return [
        pid
        for pid, command in commands()
        if command.split(b"\0")[0].rpartition(b"/")[2].startswith(b"qemu-system") and named in command
    ]


def layer_server_pids(runtime: Path) -> list[int]:
    named = str(runtime).encode()
    return [pid for pid, command in commands() if b"aenv.storage.layerd" in command and named in command]


def kill_layer_server(runtime: Path) -> None:
    """Server and keeper. Each starts the other again, so neither may run while the other dies."""
    for sent in (signal.SIGSTOP, signal.SIGKILL):
        for pid in layer_server_pids(runtime):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sent)
    wait_for(lambda: not layer_server_pids(runtime), "the layer server to end")


def namespaces(prefix: str) -> list[str]:
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.glob(f"{prefix}-*")) if folder.exists() else []


def clear(home: Path, runtime: Path, prefix: str) -> None:
    """End and remove everything of a test's node whose server has ended."""
    # Everything below goes by this path: another one would be somebody else's files and processes.
    assert home.parent == CACHE / "homes" and home.name.startswith(f"{prefix}-") and prefix, home
    for pid in vm_pids(home):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not vm_pids(home), "VMs to end")
    for pattern in (f"aenv-{prefix}.*", f"*/aenv-{prefix}.*"):  # control groups of version 2, and 1
        for group in Path("/sys/fs/cgroup").glob(pattern):
            with contextlib.suppress(OSError):
                group.rmdir()
    kill_layer_server(runtime)
    subprocess.run(["umount", "--lazy", runtime / "layers"], check=False, stderr=subprocess.DEVNULL)
    for name in namespaces(prefix):
        subprocess.run(["ip", "netns", "delete", name], check=False)
    # A namespace takes its links along, a little later; one that lost its name first keeps them.
    for name in slots.links(prefix):
        subprocess.run(["ip", "link", "delete", name], check=False, stderr=subprocess.DEVNULL)
    subprocess.run(["nft", "delete", "table", "ip", f"aenv_net_{prefix}"], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(home, ignore_errors=True)


def remove_dead() -> None:
    """What runs left that were killed, as far as their process is gone: homes, VMs, namespaces, links."""
    for home in (CACHE / "homes").glob("*-*"):
        prefix, _, pid = home.name.rpartition("-")
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            try:
                runtime = Path((home / RUNTIME_NOTE).read_text())
            except OSError:
                runtime = home / "run"  # a name that no process has
            clear(home, runtime, prefix)
