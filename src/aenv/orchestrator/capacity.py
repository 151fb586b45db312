"""Whether the node has room for more: checked before anything is started, so that a full node stays healthy."""

import os
from pathlib import Path

from aenv.config import Settings
from aenv.errors import CapacityError

MIB = 1 << 20
# Private memory of one idle restored VM; measured 37-50 MB under TCG (docs/internals/vmm.md).
IDLE_VM_MIB = 50


def available_memory_mib(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory the kernel can hand out without swapping (``MemAvailable``), MiB."""
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) // 1024
    raise CapacityError(f"{meminfo} has no MemAvailable line.")


def free_disk_mib(path: Path) -> int:
    """Space that an unprivileged write could use at ``path``, MiB."""
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize // MIB


class Capacity:
    """Counts sandboxes that hold a VM or are about to, and looks at memory and disk."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held = 0

    @property
    def held(self) -> int:
        return self._held

    def take(self, count: int, *, force: bool = False) -> None:
        """Reserve room for ``count`` VMs. Raises CapacityError, reserving nothing; ``force`` is for adoption."""
        if not force:
            self._check(count)
        self._held += count

    def give_back(self, count: int = 1) -> None:
        self._held -= count

    def _check(self, count: int) -> None:
        settings = self._settings
        if self._held + count > settings.max_sandboxes:
            raise CapacityError(
                f"This node runs {self._held} of at most {settings.max_sandboxes} sandboxes; no room for {count}.",
                "Kill or pause some, or raise max_sandboxes.",
            )
        free = available_memory_mib()
        if free < settings.reserve_memory + count * IDLE_VM_MIB:
            raise CapacityError(
                f"Only {free} MiB of memory are available on this node.",
                f"Kill or pause sandboxes; {settings.reserve_memory} MiB are kept in reserve (reserve_memory).",
            )
        disk = free_disk_mib(settings.home)
        if disk < settings.reserve_disk:
            raise CapacityError(
                f"Only {disk} MiB of disk are free under {settings.home}.",
                f"Delete sandboxes or free space; {settings.reserve_disk} MiB are kept in reserve (reserve_disk).",
            )
