"""What is noted of a process in its runtime directory, so that the next server finds it again.

A note is a JSON object that appears whole, by rename. It is not synced: neither it nor the process outlives the host.
"""

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from aenv.vmm.protocol import MachineShape, NetworkAttachment

RECORD = "process.json"


def write_note(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def read_note(path: Path) -> Any:
    """Raises OSError when there is none, ValueError when it is no JSON."""
    return json.loads(path.read_text())


@dataclass(frozen=True, slots=True)
class VmRecord:
    """Of a VM's process, whatever runs in it: ``process.json``. ``start`` guards against a reused pid.

    ``user`` is whom it runs as, if not as the server.
    """

    pid: int
    start: int
    vcpus: int
    memory_mib: int
    netns: str
    tap: str
    mac: str
    user: int | None = None

    @property
    def shape(self) -> MachineShape:
        return MachineShape(self.vcpus, self.memory_mib)

    @property
    def network(self) -> NetworkAttachment:
        return NetworkAttachment(self.netns, self.tap, self.mac)

    def write(self, directory: Path) -> None:
        write_note(directory / RECORD, asdict(self))

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """None when there is none, or it is not one of ours."""
        try:
            return cls._of(read_note(directory / RECORD))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @classmethod
    def _of(cls, found: Any) -> Self:
        """Raises ValueError, TypeError or KeyError for what is not one of ours."""
        raise NotImplementedError
