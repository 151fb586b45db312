"""What is written down of a QEMU process, so that the next server finds it again."""

import json
import uuid
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path

RECORD = "process.json"


@dataclass(frozen=True, slots=True)
class Record:
    """What ``adopt`` needs; written to ``process.json`` by rename. ``start`` guards against a reused pid."""

    pid: int
    start: int
    vcpus: int
    memory_mib: int
    netns: str
    tap: str
    mac: str
    memory: str | None  # the file that guest RAM maps; None until something was restored
    user: int | None = None  # that it runs as; None: the server's own

    def write(self, directory: Path) -> None:
        temporary = directory / f".{RECORD}.{uuid.uuid4().hex[:8]}"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(directory / RECORD)

    @classmethod
    def read(cls, directory: Path) -> "Record | None":
        """None when there is none, or it is not one of ours. One of an earlier version may lack later fields."""
        try:
            found = json.loads((directory / RECORD).read_text())
            names = [f.name for f in fields(cls) if f.default is MISSING or f.name in found]
            return cls(**{name: found[name] for name in names})
        except (OSError, ValueError, TypeError, KeyError):
            return None
