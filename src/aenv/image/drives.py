"""Images whose files are put into a folder of another image: what AgentENV attaches as drives.

Sandboxes have one disk, for a machine that is restored has the devices that it was captured with. So a drive is a
folder of the root file system, made when that is converted, and goes along with pauses, forks and snapshots.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from aenv.image.confined import Root, lstat, remove_tree
from aenv.image.errors import ArchiveError

_STAGE = b".aenv-drive"


@dataclass(frozen=True, slots=True)
class DriveImage:
    """``path`` is the folder below the root that shows ``folder`` of the image (empty: all of it)."""

    image: str
    path: str
    folder: str = ""


def stage(tree: Path) -> Path:
    """Where a drive's layers are applied, one after the other, before ``place``; empty at first."""
    root = Root(tree)
    try:
        held = root.find(b"")
        assert held is not None
        if lstat(held.fd, _STAGE) is not None:
            root.remove(held, _STAGE)
        os.mkdir(_STAGE, 0o755, dir_fd=held.fd)
        os.chmod(_STAGE, 0o755, dir_fd=held.fd)
    finally:
        root.close()
    return tree / os.fsdecode(_STAGE)


def place(tree: Path, path: str, folder: str) -> None:
    """Move what was staged to ``path``, in place of what is there. Links in the image lead within it.

    Raises ArchiveError where the drive has no such folder.
    """
    root, staged = Root(tree), Root(tree / os.fsdecode(_STAGE))
    try:
        found = staged.find(os.fsencode(folder))
        if found is None:
            raise ArchiveError(f"The drive's image has no folder {folder[:200]!r}.", "Choose another subPath.")
        source = b"/".join(filter(None, (_STAGE, found.path)))
        above, _, name = os.fsencode(path).rpartition(b"/")
        parent = root.make(above, lambda directory, made: None)
        status = lstat(parent.fd, name)
        if status is not None:
            root.remove(parent, name)
            if not stat.S_ISREG(status.st_mode):
                root.forget()
                parent = root.make(above, lambda directory, made: None)
        top = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.rename(source, name, src_dir_fd=top, dst_dir_fd=parent.fd)
            if lstat(top, _STAGE) is not None:
                remove_tree(top, _STAGE)
        finally:
            os.close(top)
    finally:
        staged.close()
        root.close()
