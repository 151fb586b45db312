"""A sandbox's root disk as a file or block device of the host, for a VMM that cannot open a chain of qcow2 files.

A daemon per disk serves it; the daemon outlives the node's server, which finds it again with ``adopt``. No I/O here.
"""

from pathlib import Path
from typing import Protocol


class DiskExport(Protocol):
    """One exported disk. Methods raise ``VmmError`` when the daemon refuses or is gone."""

    path: Path
    """Raw file or block device that the VMM opens. After ``grow`` it may be another one."""

    async def disk(self) -> Path:
        """The qcow2 file that writes go to now, asked from the daemon itself."""

    async def rebase(self, overlay: Path) -> None:
        """Freeze the present file and continue on a new, empty overlay created at ``overlay``.

        The guest may run or be stopped. What was acknowledged to the VMM before the call is in the frozen file. If it
        fails, ``overlay`` does not exist and the disk is as it was. The frozen file is not synced to the host's disk.
        """

    async def replace_backing(self, backing: Path) -> None:
        """Read what the disk does not hold itself from the qcow2 ``backing`` instead of what is below it now.

        Both must have the same contents; the guest may run. The disk's header names ``backing`` when this returns; if
        it fails, it may name either.
        """

    async def grow(self, size: int) -> None:
        """Make the disk ``size`` bytes large, never smaller. The VMM opens ``path`` anew and tells its guest."""

    async def close(self) -> None:
        """End the daemon and remove its runtime files; idempotent. Nothing may use ``path`` any more.

        What was acknowledged is in the qcow2 file afterwards.
        """


class DiskExporter(Protocol):
    """A way of exporting disks that works on this host."""

    async def export(self, name: str, disk: Path, directory: Path) -> DiskExport:
        """Serve the chain of which the qcow2 ``disk`` is the top. ``directory`` exists and takes the runtime files.

        ``name`` is that of the sandbox's VM, and is what the daemon can be found by among processes.
        """

    async def adopt(self, name: str, directory: Path) -> DiskExport | None:
        """The export that a former life of this server made there; None, with its leftovers removed, if it is gone.

        A daemon that died is started again where the kernel kept the device for it.
        """
