"""Lines from a growing serial console log. The parsing is pure; ``Tail`` reads the file.

The guest writes what it likes: lines are cut, control characters dropped, and when it writes faster than the log
takes, the middle is left out and said to be.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from aenv.observability.events import Level
from aenv.observability.logs import Line

MAX_READ = 64 * 1024  # bytes taken at one look; of more than that only the end
MAX_LINE = 1024  # bytes

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b.|[\x00-\x08\x0b-\x1f\x7f]")
_SERIOUS = re.compile(
    r"Kernel panic|\bOops\b|\bBUG:|Out of memory|oom-kill|Call Trace|I/O error|EXT4-fs error|hung_task"
    r"|blocked for more than|envd: (?:fatal|cannot)",
)


def lines_of(text: bytes) -> list[Line]:
    """Log lines from whole console lines; envd's own are told apart by how it begins them."""
    found = []
    for raw in text.split(b"\n"):
        message = _ESCAPES.sub("", raw[:MAX_LINE].decode("utf-8", "replace")).strip()
        if not message:
            continue
        logger = "envd" if message.startswith("envd") else "console"
        found.append(Line(Level.ERROR if _SERIOUS.search(message) else Level.INFO, logger, message))
    return found


@dataclass(slots=True)
class Tail:
    """A console log being read. ``offset`` is where the next look begins, after the last whole line."""

    path: Path
    vm_id: str
    offset: int = 0

    def read(self, *, final: bool = False) -> list[Line]:
        """What has been written since; the unfinished last line only when ``final``. A file not there is empty."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                if size <= self.offset:
                    return []
                skipped = max(0, size - self.offset - MAX_READ)
                file.seek(self.offset + skipped)
                text = file.read(MAX_READ)
        except OSError:
            return []
        end = len(text) if final or len(text) >= MAX_READ else text.rfind(b"\n") + 1
        if end <= 0:
            return []
        self.offset += skipped + end
        notice = [Line(Level.WARN, "console", f"{skipped} bytes of console output were left out")] if skipped else []
        return notice + lines_of(text[:end])
