"""What every reader of the storage engine reads from: immutable bytes, by range, from any thread."""

import os
from pathlib import Path
from typing import Protocol, Self

from aenv.errors import CorruptFileError, SourceError


class Source(Protocol):
    """Immutable bytes readable by range, from any thread."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...

    def read(self, offset: int, length: int) -> bytes:
        """Exactly ``length`` bytes.

        Raises SourceError when they cannot be had now, CorruptFileError when they are not there or are damaged.
        """
        ...


class FileSource:
    """A file of this host. It keeps a descriptor, so the file may be renamed or unlinked meanwhile."""

    def __init__(self, path: Path) -> None:
        """Raises SourceError when the file cannot be opened."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SourceError(f"{path} cannot be opened: {error.strerror}.") from error
        self._size = os.fstat(self._fd).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        return self._size

    def fileno(self) -> int:
        """For ``copy_file_range`` and the like; belongs to this object."""
        return self._fd

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, self.path)
        try:
            data = os.pread(self._fd, length, offset)
            # The kernel returns at most 2 GiB - 4096 at once (read(2)).
            while len(data) < length:
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    raise CorruptFileError(f"{self.path} became shorter while it was read.")
                data += more
        except OSError as error:
            raise SourceError(f"{self.path} cannot be read: {error.strerror}.") from error
        return data

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_range(source: Source, offset: int, length: int, name: object = "A source") -> None:
    """Raise CorruptFileError unless the range is within the source: what names bytes that do not exist is wrong."""
    if offset < 0 or length < 0 or offset + length > source.size:
        raise CorruptFileError(f"{name} has {source.size} bytes; {length} at {offset} are not in it.")
