"""Which pages of a file the kernel has asked for: the measure of what a start on demand needs."""

import numpy as np

PAGE = 4096


class Touched:
    """One byte per 4 KiB page, whose memory the kernel gives only where pages are touched. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._pages = np.zeros(-(-size // PAGE), dtype=np.uint8)

    def add(self, offset: int, length: int) -> None:
        self._pages[offset // PAGE : -(-(offset + length) // PAGE)] = 1

    def bytes(self) -> int:
        """Distinct pages asked for so far, in bytes."""
        return int(np.count_nonzero(self._pages)) * PAGE
