"""Which way of exporting disks a node uses."""

import asyncio
from enum import StrEnum
from pathlib import Path

from aenv.errors import VmmError
from aenv.vmm.disk import fuse, ublk
from aenv.vmm.disk.protocol import DiskExporter


class ExportKind(StrEnum):
    AUTO = "auto"
    UBLK = "ublk"
    FUSE = "fuse"


def find_blockd(configured: Path | None) -> Path | None:
    """``aenv-blockd``: as configured, as built in a checkout, as installed; None when there is none."""
    checkout = Path(__file__).parents[4] / "blockd/target/x86_64-unknown-linux-gnu/release/aenv-blockd"
    candidates = [configured] if configured else [checkout, Path("/usr/lib/aenv/aenv-blockd")]
    return next((path.resolve() for path in candidates if path.is_file()), None)


async def choose_exporter(kind: ExportKind = ExportKind.AUTO, blockd: Path | None = None) -> DiskExporter:
    """The faster one that works here (ublk), or the one that is asked for. Raises VmmError when that does not work.

    ``blockd`` is ``aenv-blockd`` if it is somewhere else than ``find_blockd`` looks.
    """
    reasons = []
    if kind is not ExportKind.FUSE:
        program = await asyncio.to_thread(find_blockd, blockd)
        if program is None:
            why: str | None = "aenv-blockd is not built; run: make blockd"
        else:
            why = await asyncio.to_thread(ublk.unavailable, program)
            if why is None:
                return ublk.UblkExporter(program)
        reasons.append(f"ublk: {why}")
    if kind is not ExportKind.UBLK:
        why = await asyncio.to_thread(fuse.unavailable)
        if why is None:
            return fuse.FuseExporter()
        reasons.append(f"fuse: {why}")
    raise VmmError(
        f"Disks cannot be exported to the VMM ({'; '.join(reasons)}).",
        "Load ublk_drv or fuse, or set disk_export to the other one.",
    )
