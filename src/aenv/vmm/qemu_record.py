"""What is written down of a QEMU process, so that the next server finds it again."""

from dataclasses import dataclass, fields
from typing import Any, Self

from aenv.vmm.record import VmRecord


@dataclass(frozen=True, slots=True)
class Record(VmRecord):
    """``memory`` is the file that guest RAM maps; None until something was restored."""

    memory: str | None = None

    @classmethod
    def _of(cls, found: Any) -> Self:
        """One of an earlier version may lack ``user``."""
        return cls(**{f.name: found[f.name] for f in fields(cls) if f.name != "user" or f.name in found})
