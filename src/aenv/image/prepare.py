"""What the platform promises to find in every sandbox and an image may lack: its user, its home, a few files.

Only what is missing is added. The tree is a stranger's: every access is confined to it.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aenv.image.confined import Directory, Root, lstat
from aenv.image.errors import ArchiveError

T = TypeVar("T")

VERSION = 2
"""Raise it when a change here changes what is added: converted images are cached under it."""

USER, USER_ID = "user", 1000
_HOSTS = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
_SUDOERS = f"{USER} ALL=(ALL:ALL) NOPASSWD: ALL\n"
_MOUNT_POINTS = ((b"proc", 0o555), (b"sys", 0o555), (b"dev", 0o755), (b"run", 0o755), (b"tmp", 0o1777))
# Users' commands are run by /bin/bash (as E2B's SDKs do). A link would not do: busybox goes by the name it is called.
STAND_IN = "aenv: stands in for bash"
_BASH = f'#!/bin/sh\n# {STAND_IN}\nexec /bin/sh "$@"\n'
_BASHES = (b"usr/bin/bash", b"usr/local/bin/bash")
_MAX_DATABASE = 4 << 20
_LAST_ID = 59999  # end of Debian's range for users
_LONGEST_USER = 1024


def prepare_for_sandbox(tree: Path, user: str = "", path: str = "") -> str:
    """Add what is missing to an unpacked image. Blocking; as root. Raises ArchiveError, OSError.

    ``user`` and ``path`` are the configuration's User and PATH. Returns the user's name: a number gets one.
    """
    if len(user) > _LONGEST_USER:
        raise ArchiveError(
            f"The image's user has {len(user)} characters.", "Build the image again with another USER."
        )
    root = Root(tree)
    try:
        for name, mode in _MOUNT_POINTS:
            _directory(root, name, mode)
        _directory(root, b"etc", 0o755)
        _add_file(root, b"etc/resolv.conf", "", 0o644)
        if not _read(root, b"etc/hosts"):
            _add_file(root, b"etc/hosts", _HOSTS, 0o644, replace=True)
        if _is_file(root, b"usr/bin/sudo"):
            _directory(root, b"etc/sudoers.d", 0o750)
            _add_file(root, b"etc/sudoers.d/" + USER.encode(), _SUDOERS, 0o440)
        uid, gid, home = _ensure_user(root)
        _ensure_home(root, home, uid, gid)
        _ensure_bash(root)
        if path and _is_file(root, b"etc/profile"):
            # A login shell reads /etc/profile, which on Debian replaces PATH.
            _directory(root, b"etc/profile.d", 0o755)
            _add_file(root, b"etc/profile.d/zz-template-path.sh", f"export PATH={shlex.quote(path)}\n", 0o644)
        return _named(root, user)
    except (OverflowError, ValueError) as error:
        raise ArchiveError(f"The image's /etc/passwd or /etc/group has what no user can have: {error}.") from error
    finally:
        root.close()


def free_id(taken: set[int], wanted: int) -> int:
    """``wanted``, or the first free number after it. Raises ArchiveError."""
    found = next((number for number in range(wanted, _LAST_ID) if number not in taken), None)
    if found is None:
        raise ArchiveError(f"The image's users have all numbers from {wanted} on.", "Remove some of them.")
    return found


def _ensure_user(root: Root) -> tuple[int, int, bytes]:
    """Number, group and home of ``user``; an existing one stays as it is."""
    passwd, group = _read(root, b"etc/passwd"), _read(root, b"etc/group")
    users = _fields(passwd, 7)
    for fields in users:
        if fields[0] == USER and fields[2].isdecimal() and fields[3].isdecimal():
            return int(fields[2]), int(fields[3]), os.fsencode(fields[5])
    groups = _fields(group, 4)
    uid = free_id({int(fields[2]) for fields in users if fields[2].isdecimal()}, USER_ID)
    own = next((int(fields[2]) for fields in groups if fields[0] == USER and fields[2].isdecimal()), None)
    gid = own if own is not None else free_id({int(fields[2]) for fields in groups if fields[2].isdecimal()}, uid)
    shell = "/bin/bash" if _is_file(root, b"bin/bash") else "/bin/sh"
    if not users:
        passwd += "root:x:0:0:root:/root:/bin/sh\n"
    if not groups:
        group += "root:x:0:\n"
    home = f"/home/{USER}"
    _write(root, b"etc/passwd", _line(passwd, f"{USER}:x:{uid}:{gid}::{home}:{shell}"))
    if own is None:
        _write(root, b"etc/group", _line(group, f"{USER}:x:{gid}:"))
    for database, entry in ((b"etc/shadow", f"{USER}:!::0:99999:7:::"), (b"etc/gshadow", f"{USER}:!::")):
        text = _read(root, database)
        if text and not any(line.startswith(f"{USER}:") for line in text.splitlines()):
            _write(root, database, _line(text, entry))
    return uid, gid, home.encode()


def _named(root: Root, user: str) -> str:
    """The name of the configuration's user, ``name``, ``uid`` or either with a group; an unnamed number is added."""
    wanted, _, group = user.partition(":")
    if not wanted.isdecimal():
        return wanted
    passwd = _read(root, b"etc/passwd")
    users = _fields(passwd, 7)
    known = next((fields[0] for fields in users if fields[2].isdecimal() and int(fields[2]) == int(wanted)), None)
    if known is not None:
        return known
    name, gid = f"uid{int(wanted)}", group if group.isdecimal() else "0"
    if all(fields[0] != name for fields in users):
        _write(root, b"etc/passwd", _line(passwd, f"{name}:x:{int(wanted)}:{int(gid)}::/:/bin/sh"))
    return name


def _ensure_bash(root: Root) -> None:
    if _is_file(root, b"bin/bash") or not _is_file(root, b"bin/sh"):
        return
    parent = root.find(b"bin")
    assert parent is not None
    found = next((path for path in _BASHES if _is_file(root, path)), None)
    if found is None:
        _add_file(root, b"bin/bash", _BASH, 0o755)
    elif lstat(parent.fd, b"bash") is None:
        os.symlink(b"/" + found, b"bash", dir_fd=parent.fd)


def _ensure_home(root: Root, home: bytes, uid: int, gid: int) -> None:
    path = b"/".join(part for part in home.split(b"/") if part not in (b"", b".", b".."))
    if not path or root.find(path) is not None:
        return
    root.make(path.rpartition(b"/")[0], lambda parent, name: None)
    made = root.make(path, lambda parent, name: os.chown(name, uid, gid, dir_fd=parent.fd, follow_symlinks=False))
    skeleton = root.find(b"etc/skel")
    names = sorted(os.listdir(skeleton.fd)) if skeleton is not None else []  # noqa: PTH208 - of a descriptor
    for name in map(os.fsencode, names):
        text = _read(root, b"etc/skel/" + name)
        if text:
            _add_file(root, made.path + b"/" + name, text, 0o644, owner=(uid, gid))


def _directory(root: Root, path: bytes, mode: int) -> None:
    def created(parent: Directory, name: bytes) -> None:
        if parent.child(name) == path:
            os.chmod(name, mode, dir_fd=parent.fd)

    root.make(path, created)


def _add_file(
    root: Root, path: bytes, text: str, mode: int, *, owner: tuple[int, int] = (0, 0), replace: bool = False
) -> None:
    """Make a file unless something usable has its name; a link that leads nowhere does not count."""
    above, _, name = path.rpartition(b"/")
    parent = root.find(above)
    assert parent is not None
    status = lstat(parent.fd, name)
    if status is not None:
        if not replace and not (stat.S_ISLNK(status.st_mode) and not _resolves(root, path)):
            return
        root.remove(parent, name)
        root.forget()
        parent = root.find(above)
        assert parent is not None
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=parent.fd)
    with os.fdopen(fd, "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
        os.fchown(fd, *owner)
        os.fchmod(fd, mode)


def _read(root: Root, path: bytes) -> str:
    """A small regular file's text; empty where it is missing or something else."""
    return _with_file(root, path, os.O_RDONLY, lambda fd: _text(fd)) or ""


def _write(root: Root, path: bytes, text: str) -> None:
    """New content for a file, in place (its owner, mode and other names stay), or a new file."""

    def write(fd: int) -> bool:
        os.ftruncate(fd, 0)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
        return True

    if _with_file(root, path, os.O_WRONLY, write) is None:
        _add_file(root, path, text, 0o644, replace=True)


def _is_file(root: Root, path: bytes) -> bool:
    return _with_file(root, path, os.O_RDONLY, lambda fd: True) is not None


def _resolves(root: Root, path: bytes) -> bool:
    return _is_file(root, path) or root.find(path) is not None


def _with_file(root: Root, path: bytes, flags: int, action: Callable[[int], T]) -> T | None:
    """``action`` on an existing regular file, through links inside the root; None where it is none."""
    try:
        fd = root.open_file(path, flags)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EACCES):
            return None
        raise
    try:
        return action(fd) if stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        os.close(fd)


def _text(fd: int) -> str:
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read(_MAX_DATABASE).decode("utf-8", "surrogateescape")


def _fields(text: str, count: int) -> list[list[str]]:
    return [fields for line in text.splitlines() if len(fields := line.split(":")) == count]


def _line(text: str, line: str) -> str:
    return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}{line}\n"
