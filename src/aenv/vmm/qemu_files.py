"""The files that a confined QEMU is given, and those that the server takes from it."""

import functools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from aenv.errors import CorruptFileError, VmmError
from aenv.storage import qcow2
from aenv.storage.lsmt import disk_errors
from aenv.vmm.jail_root import Share

# Of a microvm: its BIOS; option ROMs that start a kernel, by its format; and one that QEMU gives to some APICs.
FIRMWARE = ("bios-microvm.bin", "pvh.bin", "linuxboot_dma.bin", "kvmvapic.bin")
MAX_STATE = 64 << 20  # bytes of device state; 20 to 100 kB are usual


@functools.cache
def firmware(qemu: str) -> tuple[Share, ...]:
    """What this QEMU reads when it makes the machine, where it looks for it. Blocks for 30 ms, once."""
    listed = subprocess.run([qemu, "-L", "help"], capture_output=True, text=True, check=False).stdout
    folders = [Path(line) for line in listed.splitlines() if line.startswith("/")]
    return tuple(
        Share(folder / name, copy=True) for name in FIRMWARE for folder in folders if (folder / name).is_file()
    )


def disk_shares(disk: Path, folders: Sequence[Path]) -> list[Share]:
    """A qcow2 disk to be written, and all below it to be read.

    What is below is named in headers, the lower of which a QEMU wrote that a guest may have taken over since. So they
    are believed only if they name files in ``folders``, where nothing but layers is, under names that nobody can
    guess. Raises VmmError.
    """
    try:
        below = qcow2.backing_chain(disk)[1:]
    except CorruptFileError as error:
        raise VmmError(f"The disk {disk} cannot be opened: {error.message}") from error
    for path in below:
        if Path(os.path.normpath(path)) != path or not any(map(path.is_relative_to, folders)):
            raise VmmError(f"The disk {disk} names {path}, which is no layer of a disk.")
    return [Share(disk, writable=True), *map(Share, below)]


def keep_state(written: Path, target: Path) -> int:
    """Copy device state that a QEMU has written to ``target``, which must not exist; its size in bytes.

    Raises CapacityError, VmmError.
    """
    with disk_errors(target), written.open("rb") as source:
        data = source.read(MAX_STATE + 1)
        if len(data) > MAX_STATE:
            raise VmmError(f"The device state of a VM has more than {MAX_STATE} bytes.")
        with target.open("xb") as file:
            file.write(data)
    return len(data)


def is_full(directory: Path) -> bool:
    """Whether a disk is full. QEMU's own words for that depend on where it noticed; the file system knows."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize < 1 << 20 or stat.f_favail < 16
