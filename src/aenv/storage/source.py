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
        except OSError as error:
            raise self._unreadable(error) from error
        if len(data) == length:
            return data
        # The kernel returns at most 2 GiB - 4096 at once (read(2)).
        out = bytearray(length)
        self.read_into(offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out``; raises what ``read`` raises."""
        check_range(self, offset, len(out), self.path)
        try:
            while out:
                count = os.preadv(self._fd, [out], offset)
                if not count:
                    raise CorruptFileError(f"{self.path} became shorter while it was read.")
                out, offset = out[count:], offset + count
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> SourceError:
        return SourceError(f"{self.path} cannot be read: {error.strerror}.")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_range(source: Source, offset: int, length: int, name: object = "A source") -> None:
    """Raise CorruptFileError unless the range is within the source: what names bytes that do not exist is wrong."""
    if offset < 0 or length < 0 or offset + length > source.size:
        raise CorruptFileError(f"{name} has {source.size} bytes; {length} at {offset} are not in it.")
