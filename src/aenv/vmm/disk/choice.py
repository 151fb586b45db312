"""Which way of exporting disks a node uses."""

import asyncio
from enum import StrEnum
from pathlib import Path

from aenv.errors import VmmError
from aenv.vmm.disk import daemon, fuse, ublk
from aenv.vmm.disk.protocol import DiskExport, DiskExporter


class ExportKind(StrEnum):
    AUTO = "auto"
    UBLK = "ublk"
    FUSE = "fuse"


def find_blockd(configured: Path | None) -> Path | None:
    """``aenv-blockd``: as configured, as built in a checkout, as installed; None when there is none."""
    checkout = Path(__file__).parents[4] / "blockd/target/x86_64-unknown-linux-gnu/release/aenv-blockd"
    candidates = [configured] if configured else [checkout, Path("/usr/lib/aenv/aenv-blockd")]
    return next((path.resolve() for path in candidates if path.is_file()), None)


class Exporters:
    """Exports in one way, and adopts what was exported in any: the setting may have changed since."""

    def __init__(self, kind: str, exporters: dict[str, DiskExporter]) -> None:
        self.kind = kind
        self._exporters = exporters

    async def export(self, name: str, disk: Path, directory: Path) -> DiskExport:
        return await self._exporters[self.kind].export(name, disk, directory)

    async def adopt(self, name: str, directory: Path) -> DiskExport | None:
        kind = await asyncio.to_thread(daemon.kind_of, directory)
        exporter = self._exporters.get(kind or self.kind)
        if exporter is None:
            raise VmmError(f"The disk of {name} is exported by {kind}, which is not here any more.")
        return await exporter.adopt(name, directory)


async def choose_exporter(kind: ExportKind = ExportKind.AUTO, blockd: Path | None = None) -> Exporters:
    """The faster one that works here (ublk), or the one that is asked for. Raises VmmError when that does not work.

    ``blockd`` is ``aenv-blockd`` if it is somewhere else than ``find_blockd`` looks.
    """
    reasons = []
    program = await asyncio.to_thread(find_blockd, blockd)
    exporters: dict[str, DiskExporter] = {fuse.KIND: fuse.FuseExporter()}
    if program is not None:
        exporters[ublk.KIND] = ublk.UblkExporter(program)
    if kind is not ExportKind.FUSE:
        if program is None:
            why: str | None = "aenv-blockd is not built; run: make blockd"
        else:
            why = await asyncio.to_thread(ublk.unavailable, program)
            if why is None:
                return Exporters(ublk.KIND, exporters)
        reasons.append(f"ublk: {why}")
    if kind is not ExportKind.UBLK:
        why = await asyncio.to_thread(fuse.unavailable)
        if why is None:
            return Exporters(fuse.KIND, exporters)
        reasons.append(f"fuse: {why}")
    raise VmmError(
        f"Disks cannot be exported to the VMM ({'; '.join(reasons)}).",
        "Load ublk_drv or fuse, or set disk_export to the other one.",
    )
