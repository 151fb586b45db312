"""Free space that a template is to have when its steps are done: the disk grows under the running guest.

The guest's disk driver is told of the new size, and ext4 grows while it is mounted. Images have no program for that,
so the node lends its own ``resize2fs`` with the loader and libraries that it needs.
"""

import asyncio
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

from aenv.guest.commands import run
from aenv.template import scripts
from aenv.template.guest import BuildGuest, CommandFailedError
from aenv.template.journal import Journal
from aenv.template.machine import BuildMachine

MAX_DISK = 1 << 20  # MiB, as of ``default_disk``
STEP = 64  # MiB: disks are multiples of it, half of an ext4 block group
_LIBRARY = re.compile(r"(/\S+) \(0x")  # in what ldd prints


def target_mib(disk_mib: int, free_mib: int, wanted_mib: int) -> int:
    """The disk's size that leaves ``wanted_mib`` free; never smaller than it is.

    Inode tables and bitmaps of ext4 take 256 bytes for each 16 KiB by default, so 1 MiB in 64; twice that is added.
    """
    missing = wanted_mib - free_mib
    if missing <= 0:
        return disk_mib
    grown = disk_mib + missing + missing // 32 + 1
    return min(-(-grown // STEP) * STEP, max(MAX_DISK, disk_mib))


async def ensure_free(machine: BuildMachine, guest: BuildGuest, journal: Journal, wanted_mib: int, step: str) -> None:
    """Let the root disk grow until ``wanted_mib`` are free. As in E2B this is best effort; the log says how it went.

    Raises VmmError when QEMU refuses.
    """
    try:
        free = int(await guest.script(scripts.FREE_SPACE))
        size = target_mib(machine.disk_mib, free, wanted_mib)
        if size == machine.disk_mib:
            journal.write(f"{free} MiB of disk are free", step=step)
            return
        await machine.grow(size)
        archive = await asyncio.to_thread(tempfile.mkdtemp)
        try:
            program = Path(archive) / "resize2fs.tar"
            await asyncio.to_thread(_pack, await _files(), program)
            await guest.script(scripts.GROW, await guest.upload(program))
        finally:
            shutil.rmtree(archive, ignore_errors=True)
        free = int(await guest.script(scripts.FREE_SPACE))
    except (CommandFailedError, ValueError) as error:
        journal.write(f"the disk could not grow: {error}", level="warn", step=step)
        return
    journal.write(f"the disk has grown to {size} MiB, of which {free} are free", step=step)


async def _files() -> dict[str, Path]:
    """The node's resize2fs and what it is linked with; the loader is called ``loader``."""
    program = shutil.which("resize2fs", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise CommandFailedError("the node has no resize2fs; install e2fsprogs")
    listed = await run(["ldd", program], hint="Install libc-bin.")
    libraries = [Path(path) for path in _LIBRARY.findall(listed)]
    found = {path.name: path for path in libraries if not path.name.startswith("ld-linux")}
    loader = next((path for path in libraries if path.name.startswith("ld-linux")), None)
    if loader is None:
        raise CommandFailedError(f"{program} has no loader")
    return {**found, "loader": loader, "resize2fs": Path(program)}


def _pack(files: dict[str, Path], target: Path) -> None:
    with tarfile.open(target, "w") as archive:
        for name, path in files.items():
            archive.add(path.resolve(), arcname=name)
