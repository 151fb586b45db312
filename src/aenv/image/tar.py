"""Reads tar archives from a stream: ustar, PAX, GNU long names, and sparse files in all four formats.

Python's tarfile is not used: it reads extended headers of any size into memory, decodes names that need not be
text, and costs several times more per member. Names, values and sizes come from a stranger and are bounded.

Formats: POSIX.1-2017 pax "Interchange Format"; GNU tar manual, appendix "Tar Internals" (headers, sparse formats).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import unquote_to_bytes

from aenv.image.errors import ArchiveError

BLOCK = 512
MAX_EXTENSION = 1 << 20
"""Largest extended header that is read, bytes. Linux allows 64 KiB for one attribute and 4 KiB for a path."""
MAX_SEGMENTS = 1 << 16

REGULAR, HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = (b"0", b"1", b"2", b"3", b"4", b"5", b"6")
_REGULAR_TYPES = (b"0", b"\0", b"7", b"S")
_HEADER_ONLY = (HARD_LINK, SYMLINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO)
_IGNORED_TYPES = (b"V", b"M", b"D", b"N")  # GNU volume labels and dumps
_ZERO = bytes(BLOCK)


class Stream(Protocol):
    def read(self, size: int) -> bytes:
        """``size`` bytes; fewer only at the end."""

    def pieces(self, size: int) -> Iterator[memoryview]:
        """``size`` bytes in pieces; fewer only at the end."""


@dataclass(slots=True)
class Entry:
    """One member. ``size`` is the logical size in bytes; ``segments``: (offset, length) of a sparse file's data."""

    name: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    link: bytes = b""
    device: tuple[int, int] = (0, 0)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    segments: list[tuple[int, int]] | None = None


class TarReader:
    """Iterate over it; between two steps, ``content`` gives the data of the current regular file, once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._globals: dict[bytes, bytes] = {}
        self._left = 0  # bytes of the current member's data not read yet
        self._padding = 0

    def __iter__(self) -> Iterator[Entry]:
        extended: dict[bytes, bytes] = {}
        sparse_pairs: list[bytes] = []
        while True:
            self._finish_member()
            header = self._stream.read(BLOCK)
            if not header or header == _ZERO:
                return
            if len(header) != BLOCK:
                raise _damaged("it ends inside a header")
            _check_sum(header)
            kind, size = header[156:157], _number(header[124:136])
            if kind in (b"x", b"X", b"g"):
                records = list(parse_pax(self._extension(size)))
                if kind == b"g":
                    self._globals.update(records)
                else:
                    extended.update(records)
                    sparse_pairs = [
                        value for key, value in records if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
                    ]
            elif kind in (b"L", b"K"):
                value = self._extension(size).split(b"\0", 1)[0]
                extended[b"path" if kind == b"L" else b"linkpath"] = value
            else:
                entry = self._member(header, kind, size, {**self._globals, **extended}, sparse_pairs)
                extended, sparse_pairs = {}, []
                if entry is not None:
                    yield entry

    def content(self, entry: Entry) -> Iterator[tuple[int, memoryview]]:
        """The data of a regular file as (offset, piece). Holes are left out."""
        for offset, length in entry.segments if entry.segments is not None else ((0, entry.size),):
            done = 0
            for piece in self._stream.pieces(length):
                yield offset + done, piece
                done += len(piece)
                self._left -= len(piece)
            if done != length:
                raise _damaged("it ends inside a file")

    def _member(
        self, header: bytes, kind: bytes, size: int, extended: dict[bytes, bytes], sparse_pairs: list[bytes]
    ) -> Entry | None:
        name = extended.get(b"GNU.sparse.name") or extended.get(b"path") or _name(header)
        link = extended.get(b"linkpath") or header[157:257].split(b"\0", 1)[0]
        if b"size" in extended:
            size = _decimal(extended[b"size"])
        if kind in _HEADER_ONLY:
            size = 0
        self._begin_data(size)
        segments: list[tuple[int, int]] | None = None
        if kind == b"S":
            size, segments = self._old_sparse(header)
        elif kind in _REGULAR_TYPES:
            sparse = self._pax_sparse(extended, sparse_pairs)
            if sparse is not None:
                size, segments = sparse
        if segments is not None:
            _check_segments(segments, size, self._left)
        if kind in _IGNORED_TYPES:
            return None
        if kind in _REGULAR_TYPES:
            kind = (
                DIRECTORY if name.endswith(b"/") and kind != b"S" else REGULAR
            )  # as pre-POSIX tar wrote directories
        elif kind not in _HEADER_ONLY:
            raise _damaged(f"it has a member of unknown type {kind!r}")
        device = (_number(header[329:337]), _number(header[337:345]))
        return Entry(
            name,
            kind,
            _number(header[100:108]) & 0o7777,
            _decimal(extended[b"uid"]) if b"uid" in extended else _number(header[108:116]),
            _decimal(extended[b"gid"]) if b"gid" in extended else _number(header[116:124]),
            size,
            _nanoseconds(extended[b"mtime"]) if b"mtime" in extended else _number(header[136:148]) * 10**9,
            link,
            device if kind in (CHARACTER, BLOCK_DEVICE) else (0, 0),
            _xattrs(extended) if extended else {},
            segments,
        )

    def _begin_data(self, size: int) -> None:
        if size < 0:
            raise _damaged("a size is negative")
        self._left, self._padding = size, -size % BLOCK

    def _finish_member(self) -> None:
        rest = self._left + self._padding
        if rest and sum(len(piece) for piece in self._stream.pieces(rest)) != rest:
            raise _damaged("it ends inside a file")
        self._left = self._padding = 0

    def _extension(self, size: int) -> bytes:
        if not 0 <= size <= MAX_EXTENSION:
            raise _damaged(f"an extended header of {size} bytes is too large")
        self._begin_data(size)
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left:
            raise _damaged("it ends inside a header")
        return data

    def _old_sparse(self, header: bytes) -> tuple[int, list[tuple[int, int]]]:
        """GNU's first format: the map is in the header and in blocks behind it, which its size does not count."""
        values = [header[at : at + 12] for at in range(386, 482, 12)]
        more = header[482:483] != b"\0"
        while more:
            block = self._stream.read(BLOCK)
            if len(block) != BLOCK:
                raise _damaged("it ends inside a sparse map")
            values += [block[at : at + 12] for at in range(0, 504, 12)]
            more = block[504:505] != b"\0"
            if len(values) > 2 * MAX_SEGMENTS:
                raise _damaged("a sparse map is too large")
        pairs = [(_number(offset), _number(length)) for offset, length in zip(values[::2], values[1::2], strict=True)]
        return _number(header[483:495]), [pair for pair in pairs if pair[1]]

    def _pax_sparse(
        self, extended: dict[bytes, bytes], pairs: list[bytes]
    ) -> tuple[int, list[tuple[int, int]]] | None:
        """GNU's formats 1.0 (map before the data), 0.1 (one record) and 0.0 (a record for each number)."""
        if extended.get(b"GNU.sparse.major") == b"1":
            numbers = self._leading_map()
            size = _decimal(extended.get(b"GNU.sparse.realsize", b""))
        elif b"GNU.sparse.size" in extended:
            numbers = [_decimal(text) for text in pairs]
            if b"GNU.sparse.map" in extended:
                numbers = [_decimal(text) for text in extended[b"GNU.sparse.map"].split(b",") if text]
            size = _decimal(extended[b"GNU.sparse.size"])
        else:
            return None
        if len(numbers) % 2:
            raise _damaged("a sparse map is incomplete")
        return size, [pair for pair in zip(numbers[::2], numbers[1::2], strict=True) if pair[1]]

    def _leading_map(self) -> list[int]:
        text = b""
        lines: list[bytes] = []
        wanted = 1
        while len(lines) < wanted:
            block = self._stream.read(BLOCK) if self._left >= BLOCK else b""
            self._left -= len(block)
            if len(block) != BLOCK:
                raise _damaged("it ends inside a sparse map")
            *complete, text = (text + block).split(b"\n")
            lines += complete
            if lines:
                wanted = 1 + 2 * _decimal(lines[0])
            if wanted > 2 * MAX_SEGMENTS:
                raise _damaged("a sparse map is too large")
        return [_decimal(line) for line in lines[1:wanted]]


def parse_pax(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records of a PAX header: ``LENGTH KEY=VALUE\\n``. Raises ArchiveError."""
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 20)
        end = at + _decimal(data[at:space]) if space > 0 else 0
        equals = data.find(b"=", space, end)
        if end > len(data) or equals < 0 or data[end - 1 : end] != b"\n":
            raise _damaged("an extended header is malformed")
        yield data[space + 1 : equals], data[equals + 1 : end - 1]
        at = end


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    # GNU's own format uses the prefix's place for times.
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def _number(field: bytes) -> int:
    """Octal text, or GNU's big-endian binary behind a marker byte."""
    if field[0] in (0x80, 0xFF):
        return int.from_bytes(field[1:], "big") - (256 ** (len(field) - 1) if field[0] == 0xFF else 0)
    text = field.split(b"\0", 1)[0].strip()
    if not text:
        return 0
    try:
        return int(text, 8)
    except ValueError as error:
        raise _damaged(f"a header has {field!r} for a number") from error


def _decimal(text: bytes) -> int:
    if not text.isdigit() or len(text) > 20:
        raise _damaged(f"an extended header has {text[:40]!r} for a number")
    return int(text)


def _nanoseconds(text: bytes) -> int:
    """A PAX time: seconds with an optional fraction, possibly negative."""
    seconds, _, fraction = text.lstrip(b"-").partition(b".")
    value = _decimal(seconds or b"0") * 10**9 + _decimal(fraction[:9].ljust(9, b"0"))
    return -value if text.startswith(b"-") else value


def _check_sum(header: bytes) -> None:
    """The sum of the header's bytes with its own field as spaces; some writers sum signed bytes."""
    expected = _number(header[148:156])
    body = header[:148] + header[156:]
    total = sum(body) + 8 * 0x20
    if total != expected and total - 256 * sum(byte >> 7 for byte in body) != expected:
        raise _damaged("a header's checksum is wrong")


def _check_segments(segments: list[tuple[int, int]], size: int, stored: int) -> None:
    end = 0
    if len(segments) > MAX_SEGMENTS:
        raise _damaged("a sparse map is too large")
    for offset, length in segments:
        if offset < end or length < 0:
            raise _damaged("a sparse map is out of order")
        end = offset + length
    if end > size or sum(length for _, length in segments) > stored:
        raise _damaged("a sparse map does not fit its file")


def _xattrs(extended: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Extended attributes as star and GNU tar write them, and as libarchive does (coded)."""
    found: dict[bytes, bytes] = {}
    for key, value in extended.items():
        if key.startswith(b"LIBARCHIVE.xattr."):
            try:
                decoded = base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
            except binascii.Error as error:
                raise _damaged("an extended attribute is not base64") from error
            found.setdefault(unquote_to_bytes(key[17:]), decoded)
        elif key.startswith(b"SCHILY.xattr."):
            found[key[13:]] = value
    return found


def _damaged(what: str) -> ArchiveError:
    return ArchiveError(f"The layer is not a good tar archive: {what}.", "Pull it again, or build the image again.")
