"""System calls that jails are built with. Each changes the calling thread alone, never the rest of the server.

glibc makes ``setuid`` and its kin change every thread of a process; the kernel's own calls change one. So a thread
can take on a VM's user and namespaces, start its process, and end. Namespaces: namespaces(7). Mounts: open_tree(2),
move_mount(2), mount_setattr(2) (Linux 5.12). All raise OSError.
"""

import ctypes
import errno
import os
import platform
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLONE_FS, CLONE_NEWNS, CLONE_NEWUTS = 0x200, 0x20000, 0x4000000
CLONE_NEWIPC, CLONE_NEWPID = 0x8000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 1, 2, 4, 8, 0x1000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
MNT_DETACH = 2
PR_GET_DUMPABLE, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 3, 4, 22, 24, 38
SECCOMP_MODE_FILTER = 2
KEYCTL_JOIN_SESSION_KEYRING = 1
CAPABILITY_VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3, capget(2)
OPEN_TREE_CLONE, AT_EMPTY_PATH, MOVE_MOUNT_F_EMPTY_PATH, AT_FDCWD = 1, 0x1000, 4, -100
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
# The same on every architecture.
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
# capset, setgroups, setresgid, setresuid, pivot_root, keyctl: asm/unistd_64.h and asm-generic/unistd.h
ARCHITECTURES = {"x86_64": (126, 116, 119, 117, 155, 250), "aarch64": (91, 159, 149, 147, 41, 219)}
SYS_CAPSET, SYS_SETGROUPS, SYS_SETRESGID, SYS_SETRESUID, SYS_PIVOT_ROOT, SYS_KEYCTL = ARCHITECTURES.get(
    platform.machine(), (0,) * 6
)
HOST_NAME = b"vm"

_libc = ctypes.CDLL(None, use_errno=True)
# For calls of microseconds: it keeps the interpreter's lock. A thread that lets it go may wait 5 ms to get it back
# when others compute, as in a fork of many, and the calls of one visit would add up.
_quick = ctypes.PyDLL(None, use_errno=True)
_quick.syscall.restype = ctypes.c_long
_libc.syscall.restype = ctypes.c_long
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _call(number: int, what: str, *arguments: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _check(_quick.syscall(ctypes.c_long(number), *words), what)


def _prctl(option: int, value: int, what: str) -> int:
    return _check(_quick.prctl(option, ctypes.c_ulong(value), 0, 0, 0), what)


def own_directories() -> None:
    """Give this thread a root and working directory of its own, which ``enter_mounts`` needs."""
    _check(_libc.unshare(CLONE_FS), "unshare(CLONE_FS)")


def leave_namespaces() -> None:
    """Give this thread mount, IPC and UTS namespaces of its own, and its next child a PID namespace.

    Mounts do not propagate into it or out of it. A thread can do this once: a child after the first would share its
    PID namespace.
    """
    flags = CLONE_FS | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWPID
    _check(_libc.unshare(flags), "unshare")
    _check(_libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "making mounts private")
    _check(_libc.sethostname(HOST_NAME, len(HOST_NAME)), "sethostname")


def become(user: int | None) -> None:
    """Take on that user and group for good, or stay who it is (None); in either case without any capability."""
    _prctl(PR_SET_NO_NEW_PRIVS, 1, "no_new_privs")
    for capability in range(64):
        try:
            _prctl(PR_CAPBSET_DROP, capability, "dropping capabilities")
        except OSError as error:
            if error.errno == errno.EINVAL:  # beyond the last one that this kernel knows
                break
            if error.errno != errno.EPERM:  # without CAP_SETPCAP; no_new_privs makes it as good
                raise
    # The server's keys would go along: a session keyring is inherited.
    _quick.syscall(ctypes.c_long(SYS_KEYCTL), ctypes.c_long(KEYCTL_JOIN_SESSION_KEYRING), None)
    if user is not None:
        _call(SYS_SETGROUPS, "setgroups", 0, None)
        _call(SYS_SETRESGID, f"setresgid({user})", user, user, user)
        _call(SYS_SETRESUID, f"setresuid({user})", user, user, user)  # this drops all capabilities
    else:
        header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION, 0))
        _call(SYS_CAPSET, "capset", header, ctypes.create_string_buffer(24))


def restrict(program: bytes) -> None:
    """Put a seccomp filter (``aenv.vmm.jail_filter``) over this thread and what it starts, for good.

    After ``become``, which sets ``no_new_privs``: without rights the kernel takes no other.
    """
    code = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program) // 8, ctypes.addressof(code)))  # sock_fprog
    result = _libc.prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), header, 0, 0)
    _check(result, "installing a seccomp filter")


def dumpable() -> int:
    """Whether this process may dump core: a thread that changes its user takes that from all of them."""
    return _prctl(PR_GET_DUMPABLE, 0, "PR_GET_DUMPABLE")


def set_dumpable(value: int) -> None:
    _prctl(PR_SET_DUMPABLE, value, "PR_SET_DUMPABLE")


class SharedDirectoriesError(OSError):
    """Another thread has the root and working directory of this one, which can enter no mount namespace then."""


def enter_mounts(namespace: int) -> None:
    """Enter a mount namespace by its descriptor; root and working directory become its root.

    Raises SharedDirectoriesError where a thread that this one has started still runs.
    """
    try:
        _check(_quick.setns(namespace, CLONE_NEWNS), "entering a mount namespace")
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise SharedDirectoriesError(error.errno, str(error.strerror)) from error
        raise


def mount_tmpfs(target: str, flags: int, options: str) -> None:
    _check(_libc.mount(b"jail", target.encode(), b"tmpfs", flags, options.encode()), f"mounting {target}")


def bind(source: Path, target: Path) -> None:
    """Make the folder ``source`` appear at ``target``."""
    _check(_libc.mount(os.fsencode(source), os.fsencode(target), None, MS_BIND, None), f"binding {target}")


def pivot_to_working_directory() -> None:
    """Make the working directory, a mount, the root of this namespace and of all in it, and forget the old root."""
    _check(_libc.syscall(ctypes.c_long(SYS_PIVOT_ROOT), b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", MNT_DETACH), "unmounting the old root")
    os.chdir("/")


def close(file: int) -> None:
    """Close a descriptor that has nothing to write."""
    _quick.close(file)


def make_mount_point(path: str, *, folder: bool) -> None:
    """An empty file or folder, with the folders above it; fine when it is there."""
    name = path.encode()
    made = _quick.mkdir(name, 0o755) if folder else _quick.mknod(name, stat.S_IFREG, 0)
    if made < 0 and ctypes.get_errno() == errno.ENOENT:
        make_mount_point(path.rpartition("/")[0], folder=True)
        made = _quick.mkdir(name, 0o755) if folder else _quick.mknod(name, stat.S_IFREG, 0)
    if made < 0 and ctypes.get_errno() != errno.EEXIST:
        _check(made, f"making {path}")


def clone_mount(file: int, *, writable: bool) -> int:
    """A detached mount of the open file or folder (O_PATH is enough), to be attached in another namespace."""
    tree = _call(SYS_OPEN_TREE, "open_tree", file, b"", AT_EMPTY_PATH | OPEN_TREE_CLONE | os.O_CLOEXEC)
    try:
        attributes = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOEXEC
        if not writable:
            attributes |= MOUNT_ATTR_RDONLY
        wanted = ctypes.create_string_buffer(struct.pack("=4Q", attributes, 0, 0, 0), 32)  # struct mount_attr
        _call(SYS_MOUNT_SETATTR, "mount_setattr", tree, b"", AT_EMPTY_PATH, wanted, 32)
    except BaseException:
        close(tree)
        raise
    return tree


def make_read_only(target: str) -> bool:
    """Let nothing be written by a mount from here on; False when something is open to be written."""
    wanted = ctypes.create_string_buffer(struct.pack("=4Q", MOUNT_ATTR_RDONLY, 0, 0, 0), 32)
    try:
        _call(SYS_MOUNT_SETATTR, f"making {target} read-only", AT_FDCWD, target.encode(), 0, wanted, 32)
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        raise
    return True


def attach(tree: int, target: str) -> None:
    """Put a detached mount at ``target``, in the namespace of the calling thread."""
    _call(SYS_MOVE_MOUNT, f"mounting {target}", tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)


def detach(target: str) -> bool:
    """Unmount, also what is open; False when nothing is mounted there."""
    if _libc.umount2(target.encode(), MNT_DETACH) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOENT):
        return False
    raise OSError(code, f"unmounting {target}: {os.strerror(code)}")


@contextmanager
def visit(namespace: int, home: int) -> Iterator[None]:
    """The body in a mount namespace, then this thread is at ``home`` again. It must have directories of its own."""
    enter_mounts(namespace)
    try:
        yield
    finally:
        enter_mounts(home)
