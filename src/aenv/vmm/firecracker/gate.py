"""Holding Firecracker at two points inside a request, where it does nothing else and guest memory stays as it is.

Pausing the virtual CPUs is not enough: devices go on. A packet that arrives is put into guest memory, also of a
paused VM, and also right after a snapshot was loaded. Device state and memory of different moments make a guest whose
network is dead ("id 0 is not a head"). Firecracker runs devices and requests in one thread, so a request that waits
stops both.

Saving waits in ``write``: state goes into a pipe that is smaller than it is (``StatePipe``). Loading waits in
``open`` of the console's file, which comes after memory was mapped and before the devices that use it (``OpenGate``).
"""

import asyncio
import contextlib
import ctypes
import fcntl
import os
import select
import struct
import threading
from concurrent.futures import Future, InvalidStateError
from pathlib import Path

from aenv.errors import VmmError

# linux/fanotify.h
FAN_CLOEXEC, FAN_NONBLOCK, FAN_CLASS_CONTENT = 1, 2, 4
FAN_MARK_ADD, FAN_OPEN_PERM, FAN_ALLOW, AT_FDCWD = 1, 0x10000, 1, -100
EVENT = struct.Struct("=IBBHQii")  # event_len, vers, reserved, metadata_len, mask, fd, pid
READ = 64 << 10  # bytes at once
LARGEST_STATE = 10_000_000  # bytes that Firecracker would load

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fanotify_mark.argtypes = [ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p]


class OpenGate:
    """One process waits when it opens a regular file: a permission event of fanotify(7). There are none for devices.

    All others pass. A thread of its own lets them: among them is this server, which reads consoles, also on its event
    loop. The gate opens when it is closed, and when this server dies.
    """

    def __init__(self, path: Path, pid: int) -> None:
        """``pid`` is to wait. Raises VmmError."""
        flags = FAN_CLASS_CONTENT | FAN_CLOEXEC | FAN_NONBLOCK
        fd: int = _libc.fanotify_init(flags, os.O_RDONLY | os.O_CLOEXEC | os.O_LARGEFILE)
        if fd < 0 or _libc.fanotify_mark(fd, FAN_MARK_ADD, FAN_OPEN_PERM, AT_FDCWD, os.fsencode(path)):
            code = ctypes.get_errno()
            if fd >= 0:
                os.close(fd)
            raise VmmError(
                f"{path} cannot be watched: {os.strerror(code)}.",
                "Restoring needs CAP_SYS_ADMIN and a kernel with CONFIG_FANOTIFY_ACCESS_PERMISSIONS.",
            )
        self._reached: Future[None] = Future()
        self._closing, theirs = os.pipe2(os.O_CLOEXEC)[::-1]
        threading.Thread(target=self._serve, args=(fd, theirs, pid), daemon=True, name="gate").start()

    async def reached(self) -> None:
        """Until the process waits at the gate. On the event loop. Raises OSError when that cannot be told."""
        await asyncio.wrap_future(self._reached)

    def close(self) -> None:
        """Let it pass; idempotent."""
        if self._closing >= 0:
            os.close(self._closing)
            self._closing = -1

    def _serve(self, fd: int, closing: int, pid: int) -> None:
        held: list[int] = []
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.register(closing, select.POLLIN)
        try:
            while closing not in (ready for ready, _ in poll.poll()):
                held += _let_pass(fd, pid)
                if held:
                    with contextlib.suppress(InvalidStateError):  # it is known, or nobody waits for it any more
                        self._reached.set_result(None)
        except OSError as error:
            with contextlib.suppress(InvalidStateError):
                self._reached.set_exception(error)
        finally:
            for file in (fd, *held, closing):  # the first lets all pass
                os.close(file)


def _let_pass(fd: int, pid: int) -> list[int]:
    """Answer what others than ``pid`` wait for; what the questions of that process stay open with.

    The kernel knows a question by its descriptor's number, which must not be another's meanwhile.
    """
    held = []
    with contextlib.suppress(BlockingIOError):
        events = os.read(fd, READ)
        while events:
            length, _, _, _, _, file, opener = EVENT.unpack_from(events)
            events = events[length:]
            if file >= 0 and opener == pid:
                held.append(file)
            elif file >= 0:
                os.write(fd, struct.pack("=iI", file, FAN_ALLOW))
                os.close(file)
    return held


class StatePipe:
    """A named pipe that Firecracker writes device state to: once it has ``started`` it waits until that is read."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._capacity = fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, 4096)

    async def started(self) -> None:
        """Until the first of it has come. On the event loop."""
        await _readable(self._fd)

    def read(self) -> bytes:
        """All of it. Blocks: in a worker thread. Raises VmmError when the writer never had to wait."""
        os.set_blocking(self._fd, True)
        parts = []
        while part := os.read(self._fd, READ):
            parts.append(part)
        state = b"".join(parts)
        if not self._capacity < len(state) <= LARGEST_STATE:
            raise VmmError(f"Firecracker's device state has {len(state)} bytes, for a pipe of {self._capacity}.")
        return state

    def close(self) -> None:
        """Whoever waits to write gets an error; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def let_go(path: Path) -> None:
    """Read what a process wrote, or waits to write, to the pipe of a server that has died; nothing if there is none.

    Blocks for some milliseconds. Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.set_blocking(fd, True)
        while os.read(fd, READ):
            pass
    finally:
        os.close(fd)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
