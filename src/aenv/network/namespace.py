"""Network namespaces through system calls: make, name, enter and remove them.

A namespace belongs to a thread, and a thread that stays in the wrong one would break everything after it.
So only the threads of `pool` enter namespaces, always through `entered`, and each of their jobs begins with
`HomeNamespace.return_home`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from aenv.network.errors import NetworkConflict
from aenv.network.slot import NETNS_DIR

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 0x1000, 0x4000, 0x100000
_MNT_DETACH = 2
_THREAD_NETNS = "/proc/thread-self/ns/net"

_TUNSETIFF, _TUNSETPERSIST = 0x400454CA, 0x400454CB
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)  # os.setns and os.unshare exist from Python 3.12 on


def _check(result: int, what: str) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(source: str, target: str, flags: int) -> None:
    _check(_libc.mount(source.encode(), target.encode(), b"none", ctypes.c_ulong(flags), None), f"mount {target}")


class HomeNamespace:
    """The namespace that the calling thread is in when this is made; closed by its owner."""

    def __init__(self) -> None:
        self.fd = os.open(_THREAD_NETNS, os.O_RDONLY | os.O_CLOEXEC)

    def return_home(self) -> None:
        """Put the calling thread into this namespace. Raises OSError when that fails."""
        _check(_libc.setns(self.fd, _CLONE_NEWNET), "return to the root network namespace")

    def close(self) -> None:
        os.close(self.fd)


@contextlib.contextmanager
def created(home: HomeNamespace, name: str) -> Iterator[None]:
    """A new named namespace; the body runs inside it.

    Raises NetworkConflict when the name exists, OSError (EPERM without CAP_SYS_ADMIN). The name is not removed
    when the body fails: the caller's clean-up does that, as it does after a crash.
    """
    _share_netns_dir()
    path = NETNS_DIR / name
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
    except FileExistsError as error:
        raise NetworkConflict(f"namespace {name} exists already: another node with this prefix is running") from error
    try:
        _check(_libc.unshare(_CLONE_NEWNET), "unshare")
        _mount(_THREAD_NETNS, str(path), _MS_BIND)
        yield
    finally:
        home.return_home()


@contextlib.contextmanager
def entered(home: HomeNamespace, name: str) -> Iterator[None]:
    """Run the body inside a named namespace. Raises FileNotFoundError, or OSError EINVAL for a half-made one."""
    fd = os.open(NETNS_DIR / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, _CLONE_NEWNET), f"enter {name}")
        try:
            yield
        finally:
            home.return_home()
    finally:
        os.close(fd)


def remove(name: str) -> None:
    """Drop the name; the kernel frees the namespace once no process is in it. Nothing happens without one."""
    path = NETNS_DIR / name
    # Detached: a process that holds the mount must not keep a dead slot's name alive.
    while _libc.umount2(str(path).encode(), _MNT_DETACH) == 0:
        pass  # a name can be mounted over more than once after a crash
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOENT):
        raise OSError(code, f"umount {path}: {os.strerror(code)}")
    path.unlink(missing_ok=True)


def is_namespace(name: str) -> bool:
    """Whether the name is a live namespace, and not the file of a creation that a crash interrupted."""
    try:
        return (NETNS_DIR / name).stat().st_dev != NETNS_DIR.stat().st_dev
    except FileNotFoundError:
        return False


def names() -> list[str]:
    return sorted(path.name for path in NETNS_DIR.iterdir()) if NETNS_DIR.is_dir() else []


def _share_netns_dir() -> None:
    """Make /run/netns what `ip netns add` makes it: a shared mount, so that unmounting a namespace reaches
    processes with mount namespaces of their own. Locked like there, against two making it at once."""
    NETNS_DIR.mkdir(mode=0o755, parents=True, exist_ok=True)
    lock = os.open(NETNS_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            _mount("", str(NETNS_DIR), _MS_SHARED | _MS_REC)
        except OSError as error:
            # EINVAL: not a mount point. os.path.ismount cannot tell: it knows no bind mounts, and binding
            # the directory over itself again and again doubles every mount below it.
            if error.errno != errno.EINVAL:
                raise
            _mount(str(NETNS_DIR), str(NETNS_DIR), _MS_BIND | _MS_REC)
            _mount("", str(NETNS_DIR), _MS_SHARED | _MS_REC)
    finally:
        os.close(lock)


def create_tap(name: str) -> None:
    """A persistent tap in the namespace of the calling thread: it waits there for the VMM to open it."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(fd, _TUNSETPERSIST, 1)
    finally:
        os.close(fd)


def interface_index(name: str) -> int | None:
    """Index of a link of this namespace, without a netlink dump."""
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return None


def write_sysctl(key: str, value: int) -> bool:
    """Write a `net.` setting of this namespace ('ipv4/ip_forward'). False when this kernel has no such setting."""
    try:
        Path("/proc/sys/net", key).write_text(str(value))
    except FileNotFoundError:
        return False
    return True


def read_sysctl(key: str) -> int:
    return int(Path("/proc/sys/net", key).read_text())
