"""What is mounted, as ``/proc/PID/mountinfo`` has it (proc_pid_mountinfo(5)). Parsing is pure."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OWN = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line. ``device`` is ``major:minor``; ``options`` are of the mount, ``super_options`` of the file system."""

    device: str
    point: str
    options: tuple[str, ...]
    kind: str
    source: str
    super_options: tuple[str, ...]


def read(path: Path = OWN) -> str:
    """Names that are no UTF-8 come as ``os.fsdecode`` has them. Raises OSError."""
    return path.read_text(errors="surrogateescape")


def parse(text: str) -> Iterator[Mount]:
    """In the kernel's order: of mounts at one point, the last is on top."""
    for line in text.splitlines():
        fields = line.split(" ")
        if "-" not in fields:
            continue
        # id, parent, major:minor, root, point, options, fields that may be missing, "-", type, source, more options
        kind, source, more = fields[fields.index("-") + 1 :][:3]
        yield Mount(fields[2], _decoded(fields[4]), tuple(fields[5].split(",")), kind, source, tuple(more.split(",")))


def kind_of(path: Path) -> str | None:
    """Type of the file system that a file is on; None when it is on none that is mounted here. Raises OSError."""
    number = path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    return next((mount.kind for mount in parse(read()) if mount.device == device), None)


def _decoded(field: str) -> str:
    """White space and backslashes are octal."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), field)
