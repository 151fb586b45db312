"""Which hypervisors could run sandboxes here, and what trying them has shown. No hypervisor is started here."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from aenv.vmm.protocol import Accelerator

REMEMBERED = "probe.json"
FAILURE_HOLDS = 3600.0  # seconds
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # changes when the host boots, random(4)


class Candidate(NamedTuple):
    """A hypervisor and what runs its guests' instructions."""

    vmm: str  # "firecracker" or "qemu"
    accelerator: Accelerator

    def __str__(self) -> str:
        return f"{self.vmm}/{self.accelerator}"


# Best first. A PVM guest kernel is slower than hardware virtualization, emulation slower than either.
CANDIDATES = (
    Candidate("firecracker", Accelerator.KVM),
    Candidate("firecracker", Accelerator.PVM),
    Candidate("qemu", Accelerator.KVM),
    Candidate("qemu", Accelerator.TCG),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one candidate did. ``reason`` is a sentence, ``advice`` what to do about it (empty when it works).

    ``seconds`` is how long finding out took.
    """

    vmm: str
    accelerator: Accelerator
    works: bool
    reason: str
    advice: str
    seconds: float

    @property
    def candidate(self) -> Candidate:
        return Candidate(self.vmm, self.accelerator)


def allowed(vmm: str, accelerator: str) -> list[Candidate]:
    """The candidates that the settings ``vmm`` and ``accelerator`` leave, best first; perhaps none."""
    return [
        candidate
        for candidate in CANDIDATES
        if vmm in ("auto", candidate.vmm) and accelerator in ("auto", candidate.accelerator)
    ]


def missing(candidate: Candidate, reason: str, advice: str) -> Verdict:
    """The verdict on what cannot even be tried."""
    return Verdict(candidate.vmm, candidate.accelerator, False, reason, advice, 0.0)


def key_of(parts: Sequence[str]) -> str:
    """What a verdict depends on besides the boot of the host: binary, version, kernel, machine."""
    return "|".join(parts)


class Memory:
    """Verdicts of this boot of the host, in ``$AENV_HOME/probe.json``. A file that is not ours is as good as none."""

    def __init__(self, home: Path) -> None:
        self._file = home / REMEMBERED

    def recall(self, candidate: Candidate, key: str) -> Verdict | None:
        """The verdict on ``candidate`` if everything it depends on is as it was.

        A failure holds for an hour: it may have been a host too busy to boot a guest in time.
        """
        try:
            entry = self._read()[str(candidate)]
            old = abs(time.time() - entry["at"]) > FAILURE_HOLDS
            if entry["key"] != key or (old and not entry["verdict"]["works"]):
                return None
            return Verdict(**{**entry["verdict"], "accelerator": candidate.accelerator})
        except (KeyError, TypeError):
            return None

    def remember(self, verdict: Verdict, key: str) -> None:
        entries = self._read() | {str(verdict.candidate): {"key": key, "at": time.time(), "verdict": asdict(verdict)}}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_name(f".{self._file.name}.{os.getpid()}")
        temporary.write_text(json.dumps({"boot": _boot_id(), "verdicts": entries}, indent=1))
        temporary.replace(self._file)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text())
            verdicts = content["verdicts"] if content["boot"] == _boot_id() else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return verdicts if isinstance(verdicts, dict) else {}


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()
