"""One line on a terminal that shows how far a transfer is; nothing for what is done at once, or elsewhere."""

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from aenv.cli import output, table

AFTER = 0.3  # seconds before it appears
INTERVAL = 0.1  # seconds between two drawings
BAR = 30  # cells


def line(name: str, done: int, total: int | None, seconds: float, columns: int) -> str:
    """Pure. ``done`` and ``total`` are bytes."""
    rate = done / seconds if seconds > 0 else 0.0
    speed = f"{output.bytes_text(rate)}/s"
    if not total:
        return table.shortened(f"{name}  {output.bytes_text(done)}  {speed}", columns)
    share = min(1.0, done / total)
    left = f"{output.duration_text((total - done) / rate)} left" if rate and done < total else ""
    figures = f"{share:4.0%}  {output.share_text(done, total)}  {speed}  {left}".rstrip()
    room = columns - table.cells(figures) - 4
    bar = min(BAR, room - 10)
    filled = round(share * bar)
    drawn = "━" * filled + "╌" * (bar - filled) + "  " if bar >= 5 else ""
    return table.shortened(f"{table.shortened(name, max(8, room - len(drawn)))}  {drawn}{figures}", columns)


class Progress:
    """Counts bytes and draws them on standard error if that is a terminal."""

    def __init__(self, name: str) -> None:
        self._name = table.printable(name)
        self._total: int | None = None
        self._done = 0
        self._began = time.monotonic()
        self._draw_at = self._began + AFTER if sys.stderr.isatty() else float("inf")
        self._drawn = False

    def begin(self, total: int | None) -> None:
        self._total = total

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now >= self._draw_at:
            self._draw_at = now + INTERVAL
            self._drawn = True
            columns = shutil.get_terminal_size().columns
            text = line(self._name, self._done, self._total, now - self._began, columns - 1)
            sys.stderr.write(f"\r{text}\033[K")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


@contextmanager
def progress(name: str) -> Iterator[Progress]:
    """The line goes, however the block is left."""
    made = Progress(name)
    try:
        yield made
    finally:
        made.clear()
