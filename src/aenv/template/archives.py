"""Uploaded archives of COPY steps, by the digest that the SDK computed of the files.

``$AENV_HOME/template-files/<digest>`` appears by rename when it is complete and synced; ``.part-*`` is an upload
under way, or debris of one. Bounded by size; what was asked for least recently goes first.
"""

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROTECTED = 3600.0  # seconds: an archive that was asked for this recently may belong to a build about to start


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    size: int  # bytes
    used: float  # seconds since 1970


def surplus(stored: Sequence[Stored], limit: int, now: float) -> list[str]:
    """What to remove so that the rest is at most ``limit`` bytes; recently used archives stay whatever they take."""
    gone, total = [], sum(item.size for item in stored)
    for item in sorted(stored, key=lambda item: item.used):
        if total <= limit or now - item.used < PROTECTED:
            break
        gone.append(item.name)
        total -= item.size
    return gone


class Archives:
    def __init__(self, folder: Path, limit: int) -> None:
        """``limit`` is the bytes that all archives together may take."""
        self._folder = folder
        self._limit = limit

    def open(self) -> None:
        """Make the folder and remove unfinished uploads of a previous life."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._folder.glob(".part-*"):
            path.unlink(missing_ok=True)

    def path(self, digest: str) -> Path:
        return self._folder / digest

    def present(self, digest: str) -> bool:
        """Whether the archive is here; it stays for the build that is about to use it."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return False
        return True

    def part(self) -> Path:
        """Where a new upload may be written."""
        return self._folder / f".part-{secrets.token_hex(8)}"

    def commit(self, part: Path, digest: str) -> None:
        """Make a complete upload available. Blocks on the disk."""
        descriptor = os.open(part, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        part.replace(self.path(digest))
        self.trim()

    def trim(self) -> None:
        stored = []
        for path in self._folder.iterdir():
            if not path.name.startswith("."):
                status = path.stat()
                stored.append(Stored(path.name, status.st_size, status.st_mtime))
        for name in surplus(stored, self._limit, time.time()):
            self.path(name).unlink(missing_ok=True)
