"""A VMM process: started inside a network namespace, outliving the server, found again by pid and start time."""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from aenv.errors import VmmError

CLONE_NEWNET = 0x40000000  # namespaces(7)
NETNS_DIRECTORY = Path("/run/netns")
DEATH_TIMEOUT = 5.0  # seconds until a killed process is gone
TUN_DEVICE = "/dev/net/tun"
TUNSETIFF, TUNSETOWNER = 0x400454CA, 0x400454CC  # linux/if_tun.h
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
T = TypeVar("T")


def start_time(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat`` (clock ticks since boot, proc_pid_stat(5)); None when gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def apart(work: Callable[[], T]) -> T:
    """Call ``work`` in a thread that ends with it, whatever it did to itself: namespaces, user, rights."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="apart")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def enter_network(netns: str) -> None:
    """This thread, and what it starts, in another network namespace for good. Only in ``apart``."""
    try:
        target = os.open(NETNS_DIRECTORY / netns, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise VmmError(f"Network namespace {netns!r} cannot be entered: {error}.") from error
    try:
        if _libc.setns(target, CLONE_NEWNET):
            code = ctypes.get_errno()
            raise VmmError(f"setns failed: {os.strerror(code)}.")
    finally:
        os.close(target)


def launch(
    argv: Sequence[str],
    netns: str | None,
    errors: Path,
    pass_fds: Iterable[int],
    *,
    output: Path | None = None,
    directory: Path = Path("/"),
    prepare: Callable[[], None] | None = None,
) -> int:
    """Start a process in its own session with nothing of ours attached; its pid. Call in a worker thread.

    What it prints is appended to ``errors``, its standard output to ``output`` where that is given. It works in
    ``directory``. ``prepare`` is called in the thread that starts it, which then ends.

    That thread enters the namespace, and the child inherits that and what ``prepare`` did: unlike ``nsenter`` or
    ``setpriv`` this needs no second exec, and unlike ``preexec_fn`` it lets ``subprocess`` use vfork, which does not
    copy the server's page tables.
    """

    def start() -> subprocess.Popen[bytes]:
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(errors.open("ab"))
            out = stack.enter_context(output.open("ab")) if output else log
            if netns is not None:
                enter_network(netns)
            if prepare is not None:
                prepare()
            try:
                started = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=log,
                    pass_fds=tuple(pass_fds),
                    start_new_session=True,
                    cwd=directory,
                    env={"PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"), "LANG": "C"},
                )
            except OSError as error:
                raise VmmError(f"{argv[0]} cannot be started: {error}.", "Is it installed?") from error
        # A core would be a guest's memory. From this thread, which is the same user, that takes no right.
        with contextlib.suppress(OSError):
            resource.prlimit(started.pid, resource.RLIMIT_CORE, (0, 0))
        return started

    process = apart(start)
    # ``Process`` reaps it; Popen must neither do that nor warn that nobody did.
    process.returncode = 0
    return process.pid


def open_tap(netns: str, name: str) -> int:
    """A descriptor of the tap device of that name in a network namespace, for a VMM that may not open it itself.

    Raises VmmError. The device has virtio-net headers, one queue, and exists already.
    """

    def attach() -> int:
        enter_network(netns)
        return attach_tap(netns, name)

    return apart(attach)


def attach_tap(netns: str, name: str) -> int:
    """``open_tap`` in a thread that is in that network namespace already."""
    try:
        fd = os.open(TUN_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            socket.if_nametoindex(name)  # TUNSETIFF would make one
            fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI | IFF_VNET_HDR))
        except BaseException:
            os.close(fd)
            raise
        return fd
    except OSError as error:
        raise VmmError(f"The tap device {name} of {netns} cannot be used: {error}.") from error


def give_tap(netns: str, name: str, user: int) -> None:
    """Let a user without rights open a tap device by its name, in a thread that is in that network namespace already.

    Raises VmmError.
    """
    fd = attach_tap(netns, name)
    try:
        fcntl.ioctl(fd, TUNSETOWNER, user)
    except OSError as error:
        raise VmmError(f"The tap device {name} of {netns} cannot be given away: {error}.") from error
    finally:
        os.close(fd)


def find_by_argument(argument: str) -> list[int]:
    """Pids of processes that have ``argument`` among their arguments."""
    wanted = argument.encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "cmdline").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def end_by_argument(argument: str) -> None:
    """Kill the processes that have ``argument`` among their arguments, and wait until they hold nothing any more."""
    for pid in find_by_argument(argument):
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                poll.poll(DEATH_TIMEOUT * 1000)
            finally:
                os.close(descriptor)


def tail(log: Path, limit: int = 2000) -> str:
    """The end, at most ``limit`` bytes, of what a process printed; empty when it printed nothing."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit))
        return file.read(limit).decode(errors="replace").strip()
    return ""


class Process:
    """A running process, ours or adopted, watched through a pidfd, so that its pid can never be mistaken.

    Made on the event loop, which reaps it when it is our child: no zombie is left whether or not anyone waits.
    """

    def __init__(self, pid: int, expected_start: int | None = None) -> None:
        """Raises ProcessLookupError when it is gone, or not the one that started at ``expected_start``."""
        self.pid = pid
        self._status: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._fd = os.pidfd_open(pid)
        start = start_time(pid)
        if start is None and expected_start is None:
            start = 0  # our own child, dead already: the pidfd says so as soon as the loop looks
        if start is None or (expected_start is not None and start != expected_start):
            os.close(self._fd)
            raise ProcessLookupError(f"Process {pid} is not the one that was started.")
        self.start = start
        self._loop.add_reader(self._fd, self._on_end)

    @property
    def alive(self) -> bool:
        if self._fd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._fd, 0)
        except ProcessLookupError:
            return False
        return start_time(self.pid) is not None  # an unreaped zombie still takes signals

    def send(self, number: signal.Signals) -> None:
        """Signal it; nothing happens when it has ended."""
        if self._fd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._fd, number)

    async def wait(self) -> int | None:
        """Exit status as in ``subprocess`` (negative: signal); None when it was not our child."""
        await self._ended.wait()
        return self._status

    def _on_end(self) -> None:
        self._loop.remove_reader(self._fd)
        with contextlib.suppress(ChildProcessError):
            _, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status)
        os.close(self._fd)
        self._fd = -1
        self._ended.set()
