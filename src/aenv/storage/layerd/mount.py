"""Making and removing the mount: mount(2), the INIT handshake, the kernel's read-ahead. Needs CAP_SYS_ADMIN."""

import contextlib
import ctypes
import errno
import os
import select
import threading
from pathlib import Path

from aenv import mountinfo
from aenv.errors import AenvError
from aenv.storage.layerd import protocol
from aenv.storage.layerd.protocol import Session

# sys/mount.h
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_NOATIME = 1, 2, 4, 8, 1024
MNT_DETACH, MNT_EXPIRE = 2, 4

SOURCE = "aenv-layers"
MAX_PAGES = 256  # of one read: 1 MiB, the kernel's own limit (fs.fuse.max_pages_limit)
# Reads ahead that the kernel may have under way. A file whose source hangs must not use up all of them.
MAX_BACKGROUND = 512

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


class MountError(AenvError):
    """The layer server's file system cannot be mounted."""


def make(path: Path) -> tuple[int, Session]:
    """Mount at ``path``, replacing the remains of a dead server; the device's descriptor and what was agreed.

    Raises MountError.
    """
    remove_dead(path)
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(
            f"The layer server cannot mount {path}: {error.strerror} ({error.filename}).",
            "Load the kernel module fuse (modprobe fuse) and give /dev/fuse to this container.",
        ) from error
    try:
        options = (
            f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},"
            f"allow_other,default_permissions,max_read={MAX_PAGES * protocol.PAGE}"
        )
        flags = MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_NOATIME
        if _libc.mount(SOURCE.encode(), os.fsencode(path), b"fuse", flags, options.encode()):
            number = ctypes.get_errno()
            raise MountError(
                f"The layer server cannot mount {path}: {os.strerror(number)}.",
                "It needs CAP_SYS_ADMIN in this mount namespace.",
            )
        try:
            session = _handshake(fd)
        except BaseException:
            _libc.umount2(os.fsencode(path), MNT_DETACH)
            raise
    except BaseException:
        os.close(fd)
        raise
    return fd, session


def _handshake(fd: int) -> Session:
    try:
        answer, session = protocol.initialise(os.read(fd, 1 << 16), MAX_PAGES, MAX_BACKGROUND)
    except protocol.FuseError:
        raise MountError(
            "This kernel's FUSE is too old for the layer server.", "Linux 5.4 or newer is needed."
        ) from None
    os.write(fd, answer)
    return session


class ReadAhead:
    """How much the kernel reads ahead of sequential reads, and around a page fault.

    The kernel copies the mount's value into each file as it is opened, after the OPEN was answered. So it is set for
    every open; when two different files are opened at the very same time, one may get the other's, which costs
    speed or bytes and nothing else. Without a writable /sys the kernel's 128 KiB stay.
    """

    def __init__(self, path: Path) -> None:
        device = _mounted(path)
        self._knob = Path(f"/sys/class/bdi/{device[0]}/read_ahead_kb") if device else None
        self._lock = threading.Lock()
        self._now = 0

    def set(self, kib: int) -> None:
        with self._lock:
            if self._knob is not None and kib != self._now:
                with contextlib.suppress(OSError):
                    self._knob.write_text(str(kib))
                self._now = kib


def alive(path: Path) -> bool:
    """Whether a layer server's file system is mounted at ``path``; asks nobody, so that it never waits."""
    device = _mounted(path)
    return device is not None and device[1] == SOURCE


def connected(device: int) -> bool:
    """Whether the mount behind a descriptor of /dev/fuse still exists (fuse_dev_poll: POLLERR when it does not)."""
    poll = select.poll()
    poll.register(device, 0)
    return not any(events & select.POLLERR for _, events in poll.poll(0))


def busy(path: Path) -> bool:
    """Whether files are open there, by this mount and not by a copy of it in another namespace; changes nothing."""
    # umount2(2): EBUSY when it is in use; EAGAIN when it is not, and a second call would unmount it if nobody used it
    # in between.
    return _libc.umount2(os.fsencode(path), MNT_EXPIRE) != 0 and ctypes.get_errno() == errno.EBUSY


def remove(path: Path, *, force: bool = False) -> bool:
    """Unmount. False when files are open there, unless ``force``: then they get errors from now on."""
    if not _libc.umount2(os.fsencode(path), MNT_DETACH if force else 0):
        return True
    number = ctypes.get_errno()
    if number == errno.EBUSY:
        return False
    if number in (errno.EINVAL, errno.ENOENT):  # nothing is mounted there
        return True
    raise MountError(f"{path} cannot be unmounted: {os.strerror(number)}.")


def remove_dead(path: Path) -> None:
    """Unmount what servers left at ``path`` that no longer live. Raises MountError when something else is there."""
    while (device := _mounted(path)) is not None:
        if device[1] != SOURCE:
            raise MountError(
                f"{path} is in use by another file system.", "Unmount it, or choose another runtime folder."
            )
        remove(path, force=True)


def _mounted(path: Path) -> tuple[str, str] | None:
    """Device number and source of what is mounted at ``path``."""
    wanted = str(path.parent.resolve() / path.name)
    found = None
    for mount in mountinfo.parse(mountinfo.read()):
        if mount.point == wanted:  # the last one is on top
            found = mount.device, mount.source
    return found
