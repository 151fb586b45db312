"""What is noted of a Firecracker process for a server that finds it again."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from aenv.vmm import memory as ram
from aenv.vmm.record import VmRecord


@dataclass(frozen=True, slots=True)
class Record(VmRecord):
    """``disk`` is noted before a disk is exported for it. ``base`` is the memory file that a restored VM maps; None
    before that, and for a booted one. ``pieces`` are where guest memory is: start, size and offset of each; none
    before there is a guest.
    """

    disk: bool = False
    base: str | None = None
    pieces: Sequence[tuple[int, int, int]] = ()

    @property
    def mappings(self) -> list[ram.Mapping]:
        return [ram.Mapping(self.pid, start, size, offset) for start, size, offset in self.pieces]

    @classmethod
    def _of(cls, found: Any) -> Self:
        found["pieces"] = [(int(start), int(size), int(offset)) for start, size, offset in found["pieces"]]
        return cls(**{field.name: found[field.name] for field in fields(cls)})
