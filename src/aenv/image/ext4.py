"""Makes the empty ext4 file system that all images of a size begin with."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from aenv.image.budget import BYTES_PER_INODE
from aenv.image.errors import ImageError

_IDENTITY = "61656e76-0000-4000-8000-726f6f740000"  # also seeds the hashes of folders: equal images hash alike
_TIME = 946684800  # 2000-01-01: nothing in it depends on when it was made


def make_blank(file: Path) -> None:
    """Make a file system in ``file``, as large as it is. Blocking. Raises ImageError.

    Everything that a first mount would otherwise do in the guest is done here: inode tables and journal are
    initialised (no ext4lazyinit thread dirties the disk later). Its root is an empty directory.
    """
    _run(
        "mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-L", "root", "-U", _IDENTITY, "-m", "0",
        "-i", str(BYTES_PER_INODE), "-O", "^orphan_file,^metadata_csum_seed",
        "-E", f"nodiscard,lazy_itable_init=0,lazy_journal_init=0,hash_seed={_IDENTITY},root_owner=0:0", str(file),
    )  # fmt: skip
    _run("debugfs", "-w", "-R", "rmdir lost+found", str(file))


def _run(*argv: str) -> None:
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    environment = {**os.environ, "PATH": path, "LC_ALL": "C", "E2FSPROGS_FAKE_TIME": str(_TIME)}
    try:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise ImageError(f"{argv[0]} is not installed.", "Install e2fsprogs.") from error
    if done.returncode:
        raise ImageError(
            f"An empty file system cannot be made: {(done.stderr or done.stdout).strip()[-300:]}",
            "Its version may be too old: 1.47 is known to work.",
        )
