"""A layer's uncompressed bytes: the format is found by its magic number; a thread decompresses and hashes ahead.

zlib, zstd and OpenSSL release the interpreter lock, so decompression runs beside the writing of files.
"""

from __future__ import annotations

import bz2
import hashlib
import lzma
import queue
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, cast

import zstandard

from aenv.image.errors import ArchiveError

_CHUNK = 1 << 20
_AHEAD = 4  # chunks
_GZIP, _ZSTD, _XZ, _BZIP2 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh"
_HINT = "Pull it again, or build the image again."


def decompressed(file: BinaryIO) -> Iterator[bytes]:
    """The content in non-empty pieces of about 1 MiB. Raises ArchiveError where the compressed data is damaged."""
    start = file.read(6)
    file.seek(0)
    try:
        if start.startswith(_GZIP):
            yield from _gunzip(file)
        elif start.startswith(_ZSTD) or (len(start) >= 4 and start[1:4] == b"\x2a\x4d\x18" and start[0] >> 4 == 5):
            # The second form is a skippable frame. The window is bounded by zstandard's default, 128 MiB.
            yield from _pieces(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
        elif start.startswith(_XZ):
            with lzma.open(file) as opened:
                yield from _pieces(opened)
        elif start.startswith(_BZIP2):
            with bz2.open(file) as opened:
                yield from _pieces(opened)
        else:
            yield from _pieces(file)
    except (zlib.error, zstandard.ZstdError, lzma.LZMAError, EOFError, ValueError) as error:
        raise ArchiveError(f"The layer's compressed data is damaged: {error}.", _HINT) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise ArchiveError(f"The layer's compressed data is damaged: {error}.", _HINT) from error  # bz2's only way


def _pieces(file: object) -> Iterator[bytes]:
    source = cast(BinaryIO, file)
    while data := source.read(_CHUNK):
        yield data


def _gunzip(file: BinaryIO) -> Iterator[bytes]:
    """gzip members one after the other (pigz and stargz write several); zero padding may follow."""
    engine = zlib.decompressobj(31)
    while True:
        data = engine.unconsumed_tail or file.read(_CHUNK // 4)
        if not data:
            break
        if out := engine.decompress(data, _CHUNK):
            yield out
        while engine.eof:
            rest = engine.unused_data.lstrip(b"\0") or file.read(_CHUNK // 4).lstrip(b"\0")
            if not rest and file.peek(1):  # type: ignore[attr-defined]
                continue
            if not rest:
                return
            engine = zlib.decompressobj(31)
            if out := engine.decompress(rest, _CHUNK):
                yield out
    if not engine.eof:
        raise ArchiveError("The layer's compressed data is cut off.", _HINT)


class LayerStream:
    """The bytes of one layer, read in order. ``charge`` is called with the size of each piece, and may raise."""

    def __init__(self, path: Path, charge: Callable[[int], None]) -> None:
        self._file = path.open("rb")
        self._charge = charge
        self._hash = hashlib.sha256()
        self._queue: queue.Queue[bytes | BaseException | None] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._current = memoryview(b"")
        self._ended = False
        self._thread = threading.Thread(target=self._pump, name="decompress", daemon=True)
        self._thread.start()

    def read(self, size: int) -> bytes:
        if size <= len(self._current):
            data = bytes(self._current[:size])
            self._current = self._current[size:]
            return data
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        while size > 0 and (self._current or self._next()):
            piece = self._current[:size]
            self._current = self._current[len(piece) :]
            size -= len(piece)
            yield piece

    def finish(self) -> str:
        """Read what is left and return the digest of all of it."""
        while self._next():
            pass
        return f"sha256:{self._hash.hexdigest()}"

    def close(self) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue
        self._file.close()

    def __enter__(self) -> LayerStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> bool:
        if self._ended:
            return False
        item = self._queue.get()
        if isinstance(item, bytes):
            self._charge(len(item))
            self._current = memoryview(item)
            return True
        self._ended = True
        self._current = memoryview(b"")
        if item is not None:
            raise item
        return False

    def _pump(self) -> None:
        end: BaseException | None = None
        try:
            for data in decompressed(cast(BinaryIO, self._file)):
                self._hash.update(data)
                self._queue.put(data)
                if self._stop.is_set():
                    return
        except BaseException as error:
            end = error
        self._queue.put(end)
