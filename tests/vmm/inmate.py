"""A program in a jail that does what a guest would that has broken out of its VMM (``guest/escape.c``)."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from aenv.vmm.jail import Jail, Jailer
from aenv.vmm.jail_root import Share

MIB = 1 << 20


def build(folder: Path) -> Path | None:
    """The program, where every user can start it; None without a compiler."""
    source = Path(__file__).with_name("guest") / "escape.c"
    program = folder / "escape"
    command = ["gcc", "-O2", "-static", "-s", "-pthread", "-o", str(program), str(source)]
    if shutil.which("gcc") is None or subprocess.run(command, check=False).returncode:
        return None
    return program


class Inmate:
    """One process, launched and, unless told otherwise, enclosed. ``close`` it."""

    def __init__(
        self, jailer: Jailer, program: Path, folder: Path, shares: list[Share], *, memory: int = 512 * MIB
    ) -> None:
        self.folder = folder
        folder.mkdir()
        self.jail: Jail = jailer.prepare(folder.name, folder, jailer.limits(1, memory))
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                argv = [str(program), str(theirs.fileno())]
                self.pid = self.jail.launch(argv, None, folder / "log", [theirs.fileno()])
            try:
                self.jail.limit()
            except BaseException:
                self.kill()
                raise
        except BaseException:
            ours.close()
            self.jail.close()
            raise
        ours.settimeout(60)
        self._link = ours
        self._lines = ours.makefile("r")
        assert self._lines.readline() == "ready\n"
        self.jail.enclose(shares)

    def ask(self, line: str) -> str:
        self._link.sendall(line.encode() + b"\n")
        return self._lines.readline().strip()

    def kill(self) -> int:
        """Its exit status, negative for a signal."""
        os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            self.kill()
        self._lines.close()
        self._link.close()
        self.jail.close()
