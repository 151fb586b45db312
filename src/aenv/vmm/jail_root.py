"""What a confined process sees as its file system: an empty root, and in it what it is given while it runs.

Everything is done to the process from outside, by threads that enter its mount namespace for some system calls. So a
VMM starts with the host's files in view, loads its libraries, and loses them before it meets anything of a guest; and
files can appear at paths of its choice later. All of it ends with the namespace, that is with the process.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aenv import mountinfo
from aenv.errors import VmmError
from aenv.vmm import jail_calls as calls

T = TypeVar("T")

ROOT_OPTIONS = "size=4m,nr_inodes=4096,mode=755"  # it holds mount points, and copies of small files
COPIED = 1 << 20  # bytes up to which a file is copied if it may be
ROOT_FLAGS = calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC
DEVICES = "/dev"
NULL = f"{DEVICES}/null"  # of every jail: QEMU asks for it when it first opens a disk
DEVICE_OPTIONS = "size=64k,nr_inodes=64,mode=755"
DEVICE_FLAGS = calls.MS_NOSUID | calls.MS_NOEXEC
READABLE = 0o444


@dataclass(frozen=True, slots=True)
class Share:
    """A file, folder or device of the host that a confined process may use.

    It appears at ``inside``, by default at the path that it has on the host. A folder is never writable. A device
    gets a node of its own, always writable, and must be below ``/dev``. A ``copy`` will do for a small file that is
    read once: it is taken away without an unmount, for which the kernel waits (``confinement.md``).
    """

    source: Path
    inside: str | None = None
    writable: bool = False
    copy: bool = False

    @property
    def path(self) -> str:
        """Where a confined process finds it."""
        return self.inside or str(self.source)


@dataclass(frozen=True, slots=True)
class Content:
    """What is at a path. The same inode of the host with the same rights needs no mount again.

    Of a device: its number, and no inode. Of a copy: neither.
    """

    device: int
    inode: int
    writable: bool


@dataclass(slots=True)
class OpenShare:
    """A share that was opened on the host's side: ``tree`` is a detached mount of it, -1 for a device or a copy.

    ``over``: something is there. ``frozen``: it is this, only that it may be written.
    """

    path: str
    content: Content
    mode: int
    number: int  # of a device
    tree: int = -1
    data: bytes | None = None
    over: bool = False
    frozen: bool = False


@contextlib.contextmanager
def opened(shares: Iterable[Share], user: int | None, present: dict[str, Content]) -> Iterator[list[OpenShare]]:
    """What is not ``present`` already, with the rights that ``user`` needs; closed at the end. Raises OSError.

    A file that is given to be written becomes the user's. One that is given to be read becomes the server's again,
    and readable by everybody who gets at it: its folders let nobody in.
    """
    found: list[OpenShare] = []
    with contextlib.ExitStack() as stack:
        for share in shares:
            if not share.path.startswith("/"):
                raise ValueError(f"{share.path} is not an absolute path.")
            file = os.open(share.source, os.O_PATH | os.O_CLOEXEC)
            stack.callback(calls.close, file)
            status = os.fstat(file)
            special = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
            writable = special or (share.writable and not stat.S_ISDIR(status.st_mode))
            if user is not None and stat.S_ISREG(status.st_mode):
                _hand_over(file, status, user if writable else None)
            copied = share.copy and status.st_size <= COPIED
            content = Content(status.st_dev, status.st_ino, writable)
            if special:
                content = Content(status.st_rdev, 0, True)
            elif copied:
                content = Content(0, 0, False)
            if present.get(share.path) == content and not copied:
                continue
            entry = OpenShare(share.path, content, status.st_mode, status.st_rdev)
            entry.over = share.path in present
            entry.frozen = present.get(share.path) == Content(status.st_dev, status.st_ino, True)
            if copied:
                entry.data = share.source.read_bytes()
            elif not special:
                entry.tree = calls.clone_mount(file, writable=writable)
                stack.callback(calls.close, entry.tree)
            found.append(entry)
        yield found


def _hand_over(file: int, status: os.stat_result, user: int | None) -> None:
    name = Path(f"/proc/self/fd/{file}")  # chown(2) and chmod(2) do not take what was opened with O_PATH
    owner = os.geteuid() if user is None else user
    if status.st_uid != owner:
        os.chown(name, owner, os.getegid() if user is None else user)
    if user is None and status.st_mode & READABLE != READABLE:
        name.chmod(stat.S_IMODE(status.st_mode) | READABLE)
    elif user is not None and stat.S_IMODE(status.st_mode) & 0o777 != 0o600:
        name.chmod(0o600)


def empty_root(mount_point: str) -> None:
    """Give the calling thread's namespace, and all processes in it, an empty root.

    ``mount_point`` is a folder of the present root, of which nothing is left.
    """
    calls.mount_tmpfs(mount_point, ROOT_FLAGS, ROOT_OPTIONS)
    os.chdir(mount_point)
    calls.pivot_to_working_directory()
    Path(DEVICES).mkdir()
    calls.mount_tmpfs(DEVICES, DEVICE_FLAGS, DEVICE_OPTIONS)
    os.mknod(NULL, stat.S_IFCHR, os.makedev(1, 3))  # linux/Documentation/admin-guide/devices.txt
    Path(NULL).chmod(0o666)


def place(shares: Iterable[OpenShare], user: int | None) -> None:
    """Put shares where they belong, over what was there. In the namespace of the process."""
    for share in shares:
        # No unmount where none is needed: it waits for the kernel.
        if share.frozen and calls.make_read_only(share.path):
            continue
        if share.over:
            take_away([share.path])
        if share.tree >= 0:
            calls.make_mount_point(share.path, folder=stat.S_ISDIR(share.mode))
            calls.attach(share.tree, share.path)
            continue
        target = Path(share.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if share.data is not None:
            target.write_bytes(share.data)
            continue
        os.mknod(target, stat.S_IFMT(share.mode) | 0o600, share.number)
        if user is not None:
            os.chown(target, user, user)


def take_away(paths: Iterable[str]) -> None:
    """The reverse. What is open stays open. In the namespace of the process."""
    for path in map(Path, paths):
        with contextlib.suppress(OSError):
            if path.is_dir():
                calls.detach(str(path))
                path.rmdir()
            else:
                try:
                    path.unlink()  # a copy
                except OSError:  # EBUSY: a mount
                    calls.detach(str(path))
                    path.unlink()
            for folder in path.parents:
                folder.rmdir()  # until one has something else in it


def contents(pid: int) -> dict[str, Content]:
    """What a process has been given, as the kernel knows it. Raises OSError when the process is gone."""
    found: dict[str, Content] = {}
    for mount in mountinfo.parse(mountinfo.read(Path(f"/proc/{pid}/mountinfo"))):
        if mount.point not in ("/", DEVICES):
            status = Path(f"/proc/{pid}/root{mount.point}").stat()
            found[mount.point] = Content(status.st_dev, status.st_ino, "rw" in mount.options)
    base = Path(f"/proc/{pid}/root")
    for node in (base / DEVICES.lstrip("/")).rglob("*"):
        path = f"/{node.relative_to(base)}"
        if path != NULL and (node.is_char_device() or node.is_block_device()):
            found[path] = Content(node.stat().st_rdev, 0, True)
    return found


def is_enclosed(pid: int) -> bool:
    """Whether the root of a process is another one than this thread's. Raises OSError when it is gone."""
    its, ours = Path(f"/proc/{pid}/root/").stat(), Path("/").stat()
    return (its.st_dev, its.st_ino) != (ours.st_dev, ours.st_ino)


_visitor = threading.local()


def prepare_visitor() -> None:
    """Make this thread one that may enter mount namespaces: the initializer of an executor, for all its life."""
    calls.own_directories()
    os.umask(0o022)
    _visitor.prepared = True


class Visitors:
    """Calls in the mount namespaces of processes. One object for all VMs of a server.

    A thread that ``prepare_visitor`` has prepared enters and comes back itself; for any other one of a few does it.
    """

    def __init__(self) -> None:
        self._home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._number = os.fstat(self._home).st_ino
        # An unmount waits for all processors to have passed a quiet point; several wait together.
        self._threads = ThreadPoolExecutor(8, "jail", initializer=prepare_visitor)

    def inside(self, pid: int, pidfd: int, work: Callable[[], T]) -> T:
        """Call ``work`` in the mount namespace of a process. It must open and import nothing of the host's files.

        Raises VmmError when the process is gone, or has no namespace of its own.
        """

        def visit() -> T:
            # Were the pid another process's by now, the next line would find that ``pidfd`` has ended.
            if Path(f"/proc/{pid}/ns/mnt").stat().st_ino == self._number:
                raise VmmError(f"Process {pid} has no mount namespace of its own.")
            with calls.visit(pidfd, self._home):
                return work()

        try:
            if getattr(_visitor, "prepared", False):
                # One that this thread has started may not quite have ended.
                with contextlib.suppress(calls.SharedDirectoriesError):
                    return visit()
            return self._threads.submit(visit).result()
        except (ProcessLookupError, FileNotFoundError) as error:
            raise VmmError(f"Process {pid} is gone.") from error

    def close(self) -> None:
        """Idempotent."""
        self._threads.shutdown()
        if self._home >= 0:
            os.close(self._home)
            self._home = -1
