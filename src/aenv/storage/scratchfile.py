"""A ``ScratchDisk`` as a file that programs and loop devices open: FUSE, spoken with the kernel directly.

The mount point is a file, which the mount covers: its root is the file itself, so that there are no names to look up.
The process that serves must be another one than those that use the file, for the kernel holds on to a request until
it is answered: a process that waits for its own answer cannot even be killed.

Numbers and structures: ``aenv.storage.layerd.protocol``.
"""

import ctypes
import errno
import os
import select
import struct
from collections.abc import Callable
from pathlib import Path

from aenv.errors import AenvError, CapacityError
from aenv.storage.layerd import protocol
from aenv.storage.layerd.mount import MS_NODEV, MS_NOEXEC, MS_NOSUID, MountError
from aenv.storage.layerd.protocol import FOREVER, IN_HEADER, ROOT, FuseError, Op
from aenv.storage.scratch import ScratchDisk

LARGEST = 1 << 20  # bytes of one request: 256 pages, the kernel's own limit (fs.fuse.max_pages_limit)
_WRITE_IN = struct.Struct("<QQIIQII")  # fh, offset, size, write_flags, lock_owner, flags, padding
_WRITE_OUT = struct.Struct("<I4x")
_FALLOCATE_IN = struct.Struct("<QQQII")  # fh, offset, length, mode, padding
_HEAD = IN_HEADER.size + _WRITE_IN.size
_WRITE, _FLUSH, _FALLOCATE = 16, 25, 43
_BIG_WRITES = 1 << 5
_FLAGS = protocol.Flag.ASYNC_READ | protocol.Flag.MAX_PAGES | _BIG_WRITES
_FOPEN_DIRECT_IO = 1  # the file's users keep what they need: no pages of it a second time
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 0x01, 0x02, 0x10  # fallocate(2)
_MAX_BACKGROUND = 64

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


def mount(path: Path) -> int:
    """Cover the file ``path`` with what will be served: the device's descriptor. Raises MountError.

    The kernel's first request is answered by ``ScratchFile.serve``; until then whoever opens the file waits.
    """
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(
            f"Disks of images cannot be mounted: /dev/fuse: {error.strerror}.",
            "Load the kernel module fuse (modprobe fuse) and give /dev/fuse to this container.",
        ) from error
    options = f"fd={fd},rootmode=100000,user_id={os.getuid()},group_id={os.getgid()},allow_other,max_read={LARGEST}"
    if _libc.mount(b"aenv-scratch", os.fsencode(path), b"fuse", MS_NOSUID | MS_NODEV | MS_NOEXEC, options.encode()):
        number = ctypes.get_errno()
        os.close(fd)
        raise MountError(
            f"Disks of images cannot be mounted: {os.strerror(number)}.",
            "Converting images needs CAP_SYS_ADMIN and FUSE.",
        )
    return fd


class ScratchFile:
    """Answers the kernel. ``failure`` is what went wrong first: the file's users may not have noticed it."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._disk: ScratchDisk | None = None
        self._head = bytearray(_HEAD)
        self._data = memoryview(bytearray(LARGEST + protocol.PAGE))
        self._discard = False
        self.failure: AenvError | OSError | None = None

    def show(self, disk: ScratchDisk) -> None:
        """What the file is, before anybody opens it."""
        self._disk = disk

    def discard(self) -> None:
        """From now on nothing that is written matters."""
        self._discard = True

    def serve(self, others: int, other: Callable[[], bool]) -> None:
        """Until the file is unmounted, or ``other``, called when descriptor ``others`` is readable, says no."""
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        poll.register(others, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == others:
                    if not other():
                        return
                elif not self._one():
                    return

    def _one(self) -> bool:
        """Answer one request; False when the file is no longer mounted."""
        try:
            length = os.readv(self._device, (self._head, self._data))
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # the request was taken back
                return True
            if error.errno == errno.ENODEV:
                return False
            raise
        _, opcode, unique, *_ = IN_HEADER.unpack_from(self._head)
        if opcode in protocol.NO_REPLY:
            return True
        try:
            payload = self._answer(opcode, memoryview(self._head)[IN_HEADER.size : length])
        except FuseError as error:
            self._reply((protocol.error_reply(unique, error.number),))
        except (AenvError, OSError) as error:
            self.failure = self.failure or error
            number = errno.ENOSPC if isinstance(error, CapacityError) else errno.EIO
            self._reply((protocol.error_reply(unique, number),))
        else:
            self._reply((protocol.reply_header(unique, len(payload)), payload))
        return True

    def _reply(self, parts: tuple[bytes | bytearray | memoryview, ...]) -> None:
        try:
            os.writev(self._device, parts)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):  # whoever asked no longer waits
                raise

    def _answer(self, opcode: int, body: memoryview) -> bytes:
        if opcode == Op.INIT:
            return _initialised(body)
        disk = self._disk
        assert disk is not None, "the file is opened after ``show``"
        if opcode == Op.READ:
            _, offset, size, _ = protocol.READ_IN.unpack_from(body)
            return disk.read(offset, max(0, min(size, disk.size - offset)))
        if opcode == _WRITE:
            _, offset, size, *_ = _WRITE_IN.unpack_from(body)
            if not self._discard:
                self._write(disk, offset, self._data[:size])
            return _WRITE_OUT.pack(size)
        if opcode == Op.GETATTR:
            a = protocol.Attributes(ROOT, disk.size, protocol.S_IFREG | 0o600, os.getuid(), 0)
            return protocol.ATTR_OUT.pack(FOREVER, 0, 0) + protocol.attributes(a)
        if opcode == Op.OPEN:
            return protocol.open_reply(0, _FOPEN_DIRECT_IO)
        if opcode == _FALLOCATE:
            return self._fallocate(disk, body)
        if opcode in (Op.RELEASE, _FLUSH, Op.DESTROY):
            return b""
        # FSYNC too, which the kernel takes for success: what is not sealed need not survive anything.
        raise FuseError(errno.ENOSYS)

    def _write(self, disk: ScratchDisk, offset: int, data: memoryview) -> None:
        if offset + len(data) > disk.size:
            raise FuseError(errno.ENOSPC)
        disk.write(offset, data)

    def _fallocate(self, disk: ScratchDisk, body: memoryview) -> bytes:
        """Zeros: how file systems are made, and how they clear tables."""
        _, offset, length, mode, _ = _FALLOCATE_IN.unpack_from(body)
        if not mode & (_PUNCH_HOLE | _ZERO_RANGE) or offset + length > disk.size:
            raise FuseError(errno.EOPNOTSUPP)
        if not self._discard:
            disk.zero(offset, length)
        return b""


def _initialised(body: memoryview) -> bytes:
    major, minor, readahead, flags = protocol.INIT_IN.unpack_from(body)
    if major != protocol.MAJOR or minor < protocol.MIN_MINOR:
        raise FuseError(errno.EPROTO)
    return protocol.INIT_OUT.pack(
        major, min(minor, protocol.MINOR), readahead, flags & _FLAGS, _MAX_BACKGROUND, _MAX_BACKGROUND * 3 // 4,
        LARGEST, 1, LARGEST // protocol.PAGE, 0, 0,
    )  # fmt: skip
