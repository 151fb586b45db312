"""File operations confined to one directory tree, whatever symbolic links the tree holds.

Directories are opened with openat2(2) and RESOLVE_IN_ROOT (Linux 5.6): absolute links and ``..`` are resolved by the
kernel as in a chroot. Everything else acts on a name in such a directory and never follows a final link.
Nobody else may change the tree meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aenv.image.errors import ArchiveError, UnsafeArchiveError

MAX_DEPTH = 256
"""Directories nested deeper are refused: programs that walk trees (mke2fs among them) recurse."""
_MAX_PATH = 4095
_MAX_LINKS = 40  # as the kernel
_MAX_OPEN = 128
_OPENAT2 = 437  # the same number on every architecture
_NO_MAGICLINKS, _NO_SYMLINKS, _IN_ROOT = 0x02, 0x04, 0x10
_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@dataclass(frozen=True, slots=True)
class Directory:
    """An open directory; ``path`` is its real path below the root, without links, empty for the root."""

    fd: int
    path: bytes

    def child(self, name: bytes) -> bytes:
        return self.path + b"/" + name if self.path else name


def clean(name: bytes) -> bytes:
    """An archive's name as a path below the root: no leading slash, no ``.`` and ``..``; empty for the root itself.

    Raises UnsafeArchiveError where ``..`` leads out of the root, and for what no file can be called.
    """
    if b"\0" in name:
        raise UnsafeArchiveError(f"The archive has the impossible name {name[:80]!r}.", "Do not use this image.")
    parts: list[bytes] = []
    for part in name.split(b"/"):
        if part == b"..":
            if not parts:
                raise UnsafeArchiveError(
                    f"The archive wants to write outside its root, to {os.fsdecode(name)[:200]!r}.",
                    "Do not use this image.",
                )
            parts.pop()
        elif part not in (b"", b"."):
            parts.append(part)
    if len(parts) > MAX_DEPTH:
        raise UnsafeArchiveError(
            f"Directories are nested more than {MAX_DEPTH} deep.", "Build the image again without them."
        )
    return b"/".join(parts)


class Root:
    """The tree at ``path``. ``opened`` is called with each directory that is opened, before anything changes it."""

    def __init__(self, path: Path, opened: Callable[[Directory], None] = lambda directory: None) -> None:
        self._fd = os.open(path, _OPEN_DIRECTORY)
        self._real = os.readlink(f"/proc/self/fd/{self._fd}".encode())  # noqa: PTH115 - as bytes
        self._opened = opened
        self._cache: dict[bytes, Directory] = {}

    def close(self) -> None:
        self.forget()
        os.close(self._fd)

    def forget(self) -> None:
        """Close what is open: after a directory or link went, paths may lead elsewhere."""
        for directory in self._cache.values():
            os.close(directory.fd)
        self._cache.clear()

    def find(self, path: bytes) -> Directory | None:
        """The directory at ``path``; None where there is none. The result lasts until the next call."""
        if (known := self._cache.get(path)) is not None:
            return known
        try:
            fd = self._openat2(path or b".", _OPEN_DIRECTORY, _IN_ROOT)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return None
            if error.errno == errno.ELOOP:
                raise UnsafeArchiveError(
                    f"{_shown(path)} is behind a loop of symbolic links.", "Build the image again without it."
                ) from error
            raise
        try:
            real = os.readlink(f"/proc/self/fd/{fd}".encode())  # noqa: PTH115 - as bytes
            inside = real[len(self._real) :].lstrip(b"/")
            if not (real + b"/").startswith(self._real.rstrip(b"/") + b"/"):
                raise UnsafeArchiveError(f"{_shown(path)} is outside the root.", "Do not use this image.")
            if inside.count(b"/") >= MAX_DEPTH or len(inside) > _MAX_PATH:
                raise UnsafeArchiveError(
                    f"Directories are nested more than {MAX_DEPTH} deep.", "Build the image again without them."
                )
        except BaseException:
            os.close(fd)
            raise
        directory = Directory(fd, inside)
        if len(self._cache) >= _MAX_OPEN:
            os.close(self._cache.pop(next(iter(self._cache))).fd)
        self._cache[path] = directory
        self._opened(directory)
        return directory

    def make(self, path: bytes, created: Callable[[Directory, bytes], None], links: int = 0) -> Directory:
        """The directory at ``path``, made with its parents where missing (mode 0755).

        A file in the way is replaced; a dangling link's target is made. ``created`` is called with the parent
        and the name of each new directory.
        """
        if (found := self.find(path)) is not None:
            return found
        above, _, name = path.rpartition(b"/")
        parent = self.make(above, created, links)
        target = read_link(parent, name)
        if target is not None:
            if links >= _MAX_LINKS:
                raise UnsafeArchiveError(
                    f"{_shown(path)} is behind too many symbolic links.", "Build the image again without them."
                )
            base = b"" if target.startswith(b"/") else parent.path
            self.make(_within(base, target), created, links + 1)
            found = self.find(path)
            if found is None:
                raise ArchiveError(f"{_shown(path)} is behind a symbolic link that leads nowhere.")
            return found
        try:
            os.mkdir(name, 0o755, dir_fd=parent.fd)
        except FileExistsError:
            os.unlink(name, dir_fd=parent.fd)
            os.mkdir(name, 0o755, dir_fd=parent.fd)
        # Whatever the umask is, and whatever a set-group-id parent hands down.
        os.chown(name, 0, 0, dir_fd=parent.fd)
        os.chmod(name, 0o755, dir_fd=parent.fd)
        created(parent, name)
        made = self.find(path)
        assert made is not None
        return made

    def open_real(self, path: bytes) -> int | None:
        """A descriptor of the directory at a real path, None where it has gone. The caller closes it."""
        try:
            return self._openat2(path or b".", _OPEN_DIRECTORY, _IN_ROOT | _NO_SYMLINKS)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                return None
            raise

    def open_file(self, path: bytes, flags: int) -> int:
        """A descriptor of what is at ``path``, through links inside the root. Opening never waits (a fifo) and never
        acts on a device's terminal. Raises OSError; the caller closes it and looks at what it is."""
        return self._openat2(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, _IN_ROOT)

    def remove(self, parent: Directory, name: bytes) -> None:
        """Remove whatever has this name, with all that is in it; nothing where it does not exist."""
        status = lstat(parent.fd, name)
        if status is None:
            return
        if stat.S_ISDIR(status.st_mode):
            remove_tree(parent.fd, name)
        else:
            os.unlink(name, dir_fd=parent.fd)

    def _openat2(self, path: bytes, flags: int, resolve: int) -> int:
        how = _OpenHow(flags, 0, resolve | _NO_MAGICLINKS)
        for _ in range(100):
            fd: int = _libc.syscall(_OPENAT2, self._fd, path, ctypes.byref(how), ctypes.sizeof(how))
            if fd >= 0:
                return fd
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.EINTR):  # EAGAIN: something on the machine was renamed meanwhile
                break
        raise OSError(code, os.strerror(code), path)


def lstat(fd: int, name: bytes) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None


def read_link(parent: Directory, name: bytes) -> bytes | None:
    """The target of a symbolic link, None where the name is something else or nothing."""
    try:
        return os.readlink(name, dir_fd=parent.fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise


def remove_tree(fd: int, name: bytes) -> None:
    """Remove a directory and what is in it. Its depth is bounded by MAX_DEPTH."""
    inner = os.open(name, _OPEN_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    try:
        with os.scandir(inner) as entries:
            found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for child, is_directory in found:
            if is_directory:
                remove_tree(inner, child)
            else:
                os.unlink(child, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=fd)


def _within(base: bytes, target: bytes) -> bytes:
    """A link's target as a path from the root; ``..`` stops at the root, as in a chroot."""
    parts = base.split(b"/") if base else []
    for part in target.split(b"/"):
        if part == b"..":
            del parts[-1:]
        elif part not in (b"", b"."):
            parts.append(part)
    return b"/".join(parts)


def _shown(path: bytes) -> str:
    return repr(os.fsdecode(path)[:200])
