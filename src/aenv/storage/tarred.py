"""Layers as container registries have them: one file within a tar archive, its bytes in one piece.

Format: containerd's accelerated-container-image writes ``overlaybd.commit`` as the archive's first member (ustar,
pax(1): a header of 512 bytes, then the contents).
"""

from aenv.errors import CorruptFileError
from aenv.storage.source import Source, check_range

BLOCK = 512
_MAGIC = slice(257, 262)  # "ustar"
_SIZE = slice(124, 136)
_TYPE = 156


class Part:
    """A range of another source."""

    def __init__(self, source: Source, start: int, size: int) -> None:
        self._source = source
        self._start = start
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, "A layer within an archive")
        return self._source.read(self._start + offset, length)


def unwrapped(source: Source) -> Source:
    """The archive's first member, or the source when it is no archive. Raises CorruptFileError, SourceError."""
    if source.size < 2 * BLOCK:
        return source
    header = source.read(0, BLOCK)
    if header[_MAGIC] != b"ustar":
        return source
    size = _number(header[_SIZE])
    if header[_TYPE : _TYPE + 1] not in (b"0", b"\0") or not 0 < size <= source.size - BLOCK:
        raise CorruptFileError("A layer's archive does not begin with a file that it holds whole.")
    return Part(source, BLOCK, size)


def _number(field: bytes) -> int:
    """An octal number, or GNU's binary one for large files."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.rstrip(b"\0 ") or b"-1", 8)
    except ValueError:
        return -1
