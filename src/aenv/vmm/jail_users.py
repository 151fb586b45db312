"""Which user each VM process runs as: one of a range, of which no two live processes of this host share any.

A user is held by a symbolic link with its number as name and the VM's runtime folder as target. All nodes of the host
use one folder, in ``/run``: it outlives servers and not the host, as the processes do. A link whose folder is gone
holds nothing.
"""

import contextlib
import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path

from aenv.errors import VmmError

DIRECTORY = Path("/run/aenv-users")


class Users:
    def __init__(self, first: int, count: int, directory: Path = DIRECTORY) -> None:
        self._first = first
        self._count = count
        self._directory = directory
        # In rotation, so that a number rests before it is used again.
        self._next = random.randrange(count)

    def claim(self, owner: Path) -> int:
        """A user that nobody has, for the VM with that runtime folder. Raises VmmError when there is none."""
        self._directory.mkdir(mode=0o700, exist_ok=True)
        with self._locked():
            for _ in range(self._count):
                user = self._first + self._next
                self._next = (self._next + 1) % self._count
                link = self._directory / str(user)
                if link.is_symlink() and not link.exists():
                    link.unlink()
                with contextlib.suppress(FileExistsError):
                    link.symlink_to(owner)
                    return user
        raise VmmError(
            f"All {self._count} users for VM processes are taken.",
            "End sandboxes, or give the node more (jail_users).",
        )

    def release(self, owner: Path) -> None:
        """Give back what the VM with that runtime folder holds; nothing happens when it holds none."""
        if not self._directory.is_dir():
            return
        with self._locked():
            for link in self._directory.iterdir():
                with contextlib.suppress(OSError):
                    if link.readlink() == owner:
                        link.unlink()

    def forget_dead(self) -> None:
        """Remove links that hold nothing."""
        if not self._directory.is_dir():
            return
        with self._locked():
            for link in self._directory.iterdir():
                if not link.exists():
                    link.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
