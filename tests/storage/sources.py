"""Sources for tests."""

from aenv.storage.source import check_range


class Bytes:
    """Bytes in memory; remembers what was read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.reads: list[tuple[int, int]] = []

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length)
        self.reads.append((offset, length))
        return self._data[offset : offset + length]
