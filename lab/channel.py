"""How programs reach a lab: SSH to a port of this host's loopback, all calls over one connection."""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.checkout import listing
from lab.settings import CHECKOUT, ROOT

REFUSED = 255  # ssh's own status: no connection, or a lost one


@dataclass(frozen=True, slots=True)
class Channel:
    port: int
    key: Path
    control: Path  # folder of the shared connection's socket

    def _options(self) -> list[str]:
        pairs = {
            "StrictHostKeyChecking": "no",  # a machine of this host's, made a moment ago
            "UserKnownHostsFile": "/dev/null",
            "LogLevel": "ERROR",
            "ControlMaster": "auto",
            "ControlPath": str(self.control / "ssh"),
            "ControlPersist": "600",
            "ServerAliveInterval": "30",
            "ServerAliveCountMax": "10",
        }
        options = ["-i", str(self.key)]
        for name, value in pairs.items():
            options += ["-o", f"{name}={value}"]
        return options

    def argv(self, command: str | None, *, terminal: bool = False) -> list[str]:
        argv = ["ssh", *self._options(), "-p", str(self.port), *(["-t"] if terminal else []), "root@127.0.0.1"]
        return argv if command is None else [*argv, command]

    def call(self, command: str | None = None, env: Mapping[str, str] | None = None) -> int:
        """Run a shell command in the lab on this process's streams; its status. None: a login shell."""
        assignments = "".join(f"export {name}={shlex.quote(value)}; " for name, value in (env or {}).items())
        if command is None and assignments:
            command = "exec bash -l"
        line = None if command is None else f"{assignments}{command}"
        return subprocess.call(self.argv(line, terminal=command is None or sys.stdout.isatty()))

    def answers(self, timeout: float) -> bool:
        """Whether the lab runs a command within ``timeout`` seconds."""
        try:
            done = subprocess.run(self.argv("true"), capture_output=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    def put_tree(self, base: Path, names: Sequence[str], target: Path) -> None:
        """Copy files below ``base`` into ``target`` in the lab, holes and times kept. CalledProcessError."""
        command = f"mkdir -p {shlex.quote(str(target))} && tar -xSf - -C {shlex.quote(str(target))}"
        listed = "\0".join(names).encode()
        tar = ["tar", "-cSf", "-", "--owner=0", "--group=0", "-C", str(base), "--null", "-T", "-"]
        with subprocess.Popen(tar, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as packing:
            assert packing.stdin is not None
            assert packing.stdout is not None
            with subprocess.Popen(self.argv(command), stdin=packing.stdout) as unpacking:
                packing.stdout.close()
                packing.stdin.write(listed)
                packing.stdin.close()
                status = unpacking.wait()
        for argv, code in ((tar, packing.returncode), (self.argv(command), status)):
            if code:
                raise subprocess.CalledProcessError(code, argv)

    def get_tree(self, source: str, names: str, target: Path) -> None:
        """Copy what the shell pattern ``names`` matches below ``source`` in the lab into ``target``."""
        target.mkdir(parents=True, exist_ok=True)
        command = f"cd {shlex.quote(source)} && tar --ignore-failed-read -cSf - {names}"
        with subprocess.Popen(self.argv(command), stdout=subprocess.PIPE) as packing:
            subprocess.run(["tar", "-xSf", "-", "-C", str(target)], stdin=packing.stdout, check=False)

    def sync(self) -> None:
        """Bring the checkout as it is now, uncommitted changes included. Files removed here stay there."""
        self.put_tree(ROOT, listing(ROOT), CHECKOUT)
