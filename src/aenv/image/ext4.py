"""Makes an ext4 image of a directory with ``mke2fs -d``: nothing is mounted on the host."""

from __future__ import annotations

import hashlib
import os
import stat
import uuid
from pathlib import Path

from aenv.errors import CapacityError
from aenv.guest.commands import CommandFailedError, GuestArtifactError, run
from aenv.image.budget import BYTES_PER_INODE, MIB
from aenv.image.errors import ImageError, ImageTooLargeError

_TOO_SMALL = ("Could not allocate", "No free", "inode count", "too big", "too small", "No space left")


async def make_ext4(tree: Path, image: Path, key: str, size_mib: int) -> None:
    """Write ``image``, sparse, ``size_mib`` MiB large, with the contents of ``tree``. Durable when it returns.

    Everything that a first mount would otherwise do in the guest is done here: inode tables and journal are
    initialised (no ext4lazyinit thread dirties the disk later). The UUID and the directory hash seed come from
    ``key``. Raises ImageTooLargeError where the contents do not fit.
    """
    identity = str(uuid.UUID(hashlib.sha256(key.encode()).hexdigest()[:32]))
    with image.open("wb") as file:
        file.truncate(size_mib * MIB)
    status = os.stat(tree)  # noqa: PTH116
    argv = [
        "mke2fs", "-q", "-F", "-t", "ext4", "-L", "root", "-U", identity, "-m", "0", "-i", str(BYTES_PER_INODE),
        "-O", "^orphan_file,^metadata_csum_seed",
        "-E", f"lazy_itable_init=0,lazy_journal_init=0,hash_seed={identity},"
              f"root_owner={status.st_uid}:{status.st_gid}",
        "-d", str(tree), str(image),
    ]  # fmt: skip
    try:
        await run(argv, hint="The image may hold files that ext4 cannot store.")
        mode = stat.S_IMODE(status.st_mode)
        if mode != 0o755:  # mke2fs gives the root directory a mode of its own
            await run(
                ["debugfs", "-w", "-R", f"set_inode_field <2> mode 0{stat.S_IFDIR | mode:o}", str(image)],
                hint="The image's root directory has an unusual mode.",
            )
    except CommandFailedError as error:
        disk = os.statvfs(image.parent)
        if disk.f_bavail * disk.f_frsize < MIB:
            raise CapacityError(f"No space left while writing {image}.", "Free space, or move AENV_HOME.") from error
        if any(text in error.output for text in _TOO_SMALL):
            raise ImageTooLargeError(
                f"The image does not fit a disk of {size_mib} MiB.", "Ask for a larger disk."
            ) from error
        raise ImageError(error.message, error.hint) from error
    except GuestArtifactError as error:
        raise ImageError(error.message, error.hint) from error
    descriptor = os.open(image, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
