"""A daemon that serves one disk: started so that it outlives the server, noted in a file, found again, ended.

Its runtime directory says everything: ``export.json`` (written by rename), a control socket that was listening
before the daemon started, and its errors. A server that dies between starting a daemon and noting it leaves a process
that has the directory's marker among its arguments, by which ``sweep`` finds it.
"""

import asyncio
import ctypes
import errno
import os
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from aenv.errors import VmmError
from aenv.vmm import process
from aenv.vmm.record import read_note, write_note

RECORD = "export.json"
SOCKET = "disk.sock"
ERRORS = "disk.log"
PID = "disk.pid"
STATE = "disk.state"
MARKERS = (PID, STATE)  # the path of one of these files is an argument of each daemon
MNT_DETACH = 2  # umount(2)
END_TIMEOUT = 20.0  # seconds for a daemon to write what it holds and end; some ms on an idle host

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Record:
    """What ``adopt`` needs. ``start`` guards against a reused pid; ``kind`` is the exporter's."""

    kind: str
    pid: int
    start: int

    def write(self, directory: Path) -> None:
        write_note(directory / RECORD, asdict(self))

    @classmethod
    def read(cls, directory: Path, kind: str) -> "Record | None":
        """None when there is none of that kind."""
        found = _record(directory)
        return cls(kind, found["pid"], found["start"]) if found and found["kind"] == kind else None


def kind_of(directory: Path) -> str | None:
    """What exported the disk of that directory; None when nothing is noted."""
    found = _record(directory)
    return str(found["kind"]) if found else None


def _record(directory: Path) -> dict[str, Any] | None:
    try:
        found = read_note(directory / RECORD)
        return {"kind": str(found["kind"]), "pid": int(found["pid"]), "start": int(found["start"])}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def start(directory: Path, argv: Callable[[int], list[str]], more: Sequence[int] = ()) -> int:
    """Start a daemon whose control socket is already listening; its pid. Call in a worker thread.

    ``argv`` makes the command line, given the number of the inherited socket. ``more``: what else it inherits.
    """
    path = directory / SOCKET
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(4)
        listener.setblocking(False)
        return process.launch(argv(listener.fileno()), None, directory / ERRORS, [listener.fileno(), *more])


async def end(proc: process.Process) -> None:
    """Wait for a daemon that was told to end, at most ``END_TIMEOUT``; then it is killed."""
    try:
        async with asyncio.timeout(END_TIMEOUT):
            await proc.wait()
    except TimeoutError:
        proc.send(signal.SIGKILL)
        await proc.wait()


def sweep(directory: Path) -> None:
    """Remove what a daemon of that directory left behind, and a daemon that was never noted."""
    for marker in MARKERS:
        process.end_by_argument(str(directory / marker))
    for name in (RECORD, SOCKET, ERRORS, PID):
        (directory / name).unlink(missing_ok=True)


def detach_mount(path: Path) -> None:
    """Unmount ``path`` wherever it is mounted, also when the daemon behind it is gone; nothing if it is not."""
    while _libc.umount2(os.fsencode(path), MNT_DETACH) == 0:
        pass
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOENT):  # not a mount point; nothing there
        raise VmmError(f"{path} cannot be unmounted: {os.strerror(code)}.")


def said(directory: Path) -> str:
    """The end of what the daemon printed."""
    return process.tail(directory / ERRORS)
