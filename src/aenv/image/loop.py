"""Loop devices, and ext4 on them, mounted where only one process and its children see it.

Numbers and structures: Linux's ``include/uapi/linux/loop.h`` and ``mount(2)``. Needs root and Linux 5.8
(LOOP_CONFIGURE).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import threading
from pathlib import Path

from aenv.image.errors import ImageError

_LOOP_CTL_GET_FREE, _LOOP_CONFIGURE = 0x4C82, 0x4C0A
# LO_FLAGS_AUTOCLEAR: the device lets go of its file when nobody has it open or mounted. LO_FLAGS_DIRECT_IO would save
# a copy; but on a FUSE file whose server was killed its requests end after half a minute only (Linux 6.18).
_AUTOCLEAR = 4
_CONFIG = struct.Struct("<II 52x I 240x")  # struct loop_config: fd, block_size, … lo_flags …
_MAJOR = 7
_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 16384, 1 << 18
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_NOATIME = 2, 4, 8, 1024
# The journal is left as empty as it was made (noload): it would be part of every layer. Nothing has to survive a
# crash before it is sealed, so that nothing is flushed (nobarrier).
_OPTIONS = b"noload,nobarrier,noinit_itable"
_TRIES = 20
_FLUSH_S = 0.1  # between the end of one writing out and the next

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]


def leave_mounts() -> int:
    """Give this process mounts of its own, which go with it; a descriptor of those that it had. Raises ImageError."""
    former = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    if _libc.unshare(_CLONE_NEWNS) or _libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None):
        raise _failed("a mount namespace", ctypes.get_errno())
    return former


def join_mounts(namespace: int) -> None:
    """See the mounts of a descriptor of ``leave_mounts``. Raises OSError."""
    if _libc.setns(namespace, _CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "setns")


class Flusher:
    """Writes out what is dirty in a mounted file system while more is written to it, as a context manager.

    The kernel would begin to do so at a tenth of the host's memory, and whoever unmounts would wait for all of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            while not self._over.wait(_FLUSH_S):
                _libc.syncfs(fd)
        finally:
            os.close(fd)


class LoopDevice:
    """A block device whose blocks are those of a file, with a file system on it that is mounted at times."""

    def __init__(self, file: Path) -> None:
        """Raises ImageError."""
        backing = os.open(file, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._path, self._fd = _attach(backing)
        finally:
            os.close(backing)
        self._mounted: Path | None = None

    def mount(self, folder: Path) -> None:
        """Nothing in it can be run or opened as a device by way of the mount. Raises ImageError."""
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | _MS_NOATIME
        if _libc.mount(os.fsencode(self._path), os.fsencode(folder), b"ext4", flags, _OPTIONS):
            raise _failed("an image's file system", ctypes.get_errno())
        self._mounted = folder

    def unmount(self) -> None:
        """When this returns, the file has all of it. Nothing where nothing is mounted. Raises ImageError."""
        if self._mounted is None:
            return
        if unmount(self._mounted):
            raise _failed("an image's file system", ctypes.get_errno())
        self._mounted = None

    def close(self) -> None:
        """Unmount and let go of the file."""
        try:
            self.unmount()
        finally:
            os.close(self._fd)


def unmount(path: Path) -> bool:
    """Whether it failed."""
    return bool(_libc.umount2(os.fsencode(path), 0))


def _attach(backing: int) -> tuple[Path, int]:
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise _failed("a loop device", error.errno or 0) from error
    try:
        for _ in range(_TRIES):
            try:
                number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
                path, fd = _open(number)
            except OSError as error:
                raise _failed("a loop device", error.errno or 0) from error
            try:
                fcntl.ioctl(fd, _LOOP_CONFIGURE, _CONFIG.pack(backing, 4096, _AUTOCLEAR))
                return path, fd
            except OSError as error:
                os.close(fd)
                if error.errno != errno.EBUSY:  # somebody was quicker
                    raise _failed("a loop device", error.errno or 0) from error
        raise _failed("a loop device", errno.EBUSY)
    finally:
        os.close(control)


def _open(number: int) -> tuple[Path, int]:
    path = Path(f"/dev/loop{number}")
    if not path.exists():  # a container's /dev has those that there were when it started
        path = Path(f"/dev/aenv-loop{number}")
        if not path.exists():
            os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(_MAJOR, number))
    return path, os.open(path, os.O_RDWR | os.O_CLOEXEC)


def _failed(what: str, number: int) -> ImageError:
    return ImageError(
        f"The node cannot make {what}: {os.strerror(number)}.",
        "Converting images needs root, Linux 5.8 or newer, and the kernel's loop devices and ext4 "
        "(modprobe loop; in a container: privileged, with /dev/loop-control).",
    )
