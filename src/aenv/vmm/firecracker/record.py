"""What is noted of a Firecracker process for a server that finds it again."""

import json
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from aenv.vmm import memory as ram
from aenv.vmm.protocol import MachineShape, NetworkAttachment

RECORD = "process.json"


@dataclass(frozen=True, slots=True)
class Record:
    """Written to ``process.json`` by rename. ``start`` guards against a reused pid.

    ``user`` is whom it runs as, if not as the server. ``disk`` is noted before a disk is exported for it. ``base`` is
    the memory file that a restored VM maps; None before that, and for a booted one. ``pieces`` are where guest memory
    is: start, size and offset of each; none before there is a guest.
    """

    pid: int
    start: int
    vcpus: int
    memory_mib: int
    netns: str
    tap: str
    mac: str
    user: int | None = None
    disk: bool = False
    base: str | None = None
    pieces: Sequence[tuple[int, int, int]] = ()

    @property
    def shape(self) -> MachineShape:
        return MachineShape(self.vcpus, self.memory_mib)

    @property
    def network(self) -> NetworkAttachment:
        return NetworkAttachment(self.netns, self.tap, self.mac)

    @property
    def mappings(self) -> list[ram.Mapping]:
        return [ram.Mapping(self.pid, start, size, offset) for start, size, offset in self.pieces]

    def write(self, directory: Path) -> None:
        temporary = directory / f".{RECORD}.{uuid.uuid4().hex[:8]}"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(directory / RECORD)

    @classmethod
    def read(cls, directory: Path) -> "Record | None":
        """None when there is none, or it is not one of ours."""
        try:
            found = json.loads((directory / RECORD).read_text())
            found["pieces"] = [(int(start), int(size), int(offset)) for start, size, offset in found["pieces"]]
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (OSError, ValueError, TypeError, KeyError):
            return None
