"""Folders in which images are converted, below ``$AENV_HOME/images/work``: each goes with what is done in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aenv.image.locks import try_lock


@contextlib.asynccontextmanager
async def workspace(home: Path) -> AsyncIterator[Path]:
    """A new directory that only root may enter, locked while it is in use."""
    parent = home / "images" / "work"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    work = Path(tempfile.mkdtemp(prefix="unpacking-", dir=parent))
    descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try_lock(descriptor)
        yield work
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, work, ignore_errors=True))
        os.close(descriptor)


def remove_leftovers(home: Path) -> None:
    """Remove what a crash left: workspaces that nobody has locked. A minute old, as one may not be locked yet."""
    for path in (home / "images" / "work").glob("*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if time.time() - os.fstat(descriptor).st_ctime > 60 and try_lock(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)
