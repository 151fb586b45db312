"""A directory tree as a value, for comparisons: everything that a file system stores about it."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

Tree = dict[str, tuple[object, ...]]


def describe(root: Path, *, directory_times: bool = True) -> Tree:
    """Path to (kind and mode, owner, group, time, attributes, content). Names of one inode share its first name."""
    found: Tree = {}
    first: dict[int, str] = {}
    for directory, folders, files in os.walk(os.fsencode(root)):
        for name in sorted([b".", *folders, *files] if directory == os.fsencode(root) else [*folders, *files]):
            path = os.path.normpath(os.path.join(directory, name))  # noqa: PTH118
            status = os.lstat(path)
            relative = os.path.relpath(path, os.fsencode(root)).decode("utf-8", "backslashreplace")
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = (status.st_size, hashlib.sha256(Path(os.fsdecode(path)).read_bytes()).hexdigest())
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)  # noqa: PTH115
            elif stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                content = status.st_rdev
            times = directory_times or not stat.S_ISDIR(status.st_mode)
            attributes = {
                name: os.getxattr(path, name, follow_symlinks=False)
                for name in os.listxattr(path, follow_symlinks=False)
            }
            same = first.setdefault(status.st_ino, relative) if not stat.S_ISDIR(status.st_mode) else relative
            found[relative] = (
                f"{status.st_mode:o}",
                status.st_uid,
                status.st_gid,
                status.st_mtime_ns if times else None,
                sorted(attributes.items()),
                content,
                same,
            )
    return found


def differences(left: Tree, right: Tree) -> list[str]:
    return [
        f"{path}: {left.get(path)} != {right.get(path)}"
        for path in sorted({*left, *right})
        if left.get(path) != right.get(path)
    ]
