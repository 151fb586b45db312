"""How much an image may write: what fits its disk, and what this node's disk has left."""

from __future__ import annotations

import os
from pathlib import Path

from aenv.errors import AenvError, CapacityError
from aenv.image.errors import ImageTooLargeError

MIB = 1 << 20
BYTES_PER_INODE = 16384
"""Of the file system that is made; package and dependency trees have many small files."""
_OVERWRITE_FACTOR = 2  # layers may replace or remove what lower ones wrote
_CHECK_EVERY = 256 * MIB
_BLOCK = 4096


class Budget:
    """Counts what layers decompress and create, against the disk of ``size_mib`` MiB they are to fit on.

    ``directory``'s own disk always keeps ``reserve_mib`` free.
    """

    def __init__(self, size_mib: int, directory: Path, reserve_mib: int) -> None:
        self._size_mib = size_mib
        self._bytes = _OVERWRITE_FACTOR * size_mib * MIB
        self._entries = _OVERWRITE_FACTOR * (size_mib * MIB // BYTES_PER_INODE)
        self._directory = directory
        self._reserve = reserve_mib * MIB
        self._unchecked = _CHECK_EVERY

    def charge_bytes(self, count: int) -> None:
        """Raises ImageTooLargeError, CapacityError."""
        self._bytes -= count
        self._unchecked += count
        if self._bytes < 0:
            raise self._too_large("more data than the disk holds")
        if self._unchecked >= _CHECK_EVERY:
            self._unchecked = 0
            status = os.statvfs(self._directory)
            if status.f_bavail * status.f_frsize < self._reserve + _CHECK_EVERY:
                raise no_space(self._directory)

    def charge_entry(self) -> None:
        """One file, directory or link: an inode, and a block for many small ones. Raises like ``charge_bytes``."""
        self._entries -= 1
        self._unchecked += _BLOCK
        if self._entries < 0:
            raise self._too_large("more files than the disk holds")

    def exhausted(self) -> AenvError:
        """What it means that a file system had no room left: the image's own, or this node's below it."""
        status = os.statvfs(self._directory)
        if status.f_bavail * status.f_frsize < _CHECK_EVERY:
            return no_space(self._directory)
        return self._too_large("more than fits in it")

    def _too_large(self, what: str) -> ImageTooLargeError:
        return ImageTooLargeError(
            f"The image does not fit a disk of {self._size_mib} MiB: it has {what}.", "Ask for a larger disk."
        )


def no_space(directory: Path) -> CapacityError:
    return CapacityError(
        f"This node's disk ({directory}) has no room for the image.",
        "Free space there, lower `image_cache`, or set AENV_HOME to a larger disk.",
    )
