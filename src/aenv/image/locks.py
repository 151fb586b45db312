"""File locks between tasks and processes: flock(2), which the kernel drops with its holder."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator
from pathlib import Path

_POLL_S = 0.05


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Whether the lock was got without waiting. It lasts until ``descriptor`` is closed."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.asynccontextmanager
async def locked(path: Path) -> AsyncIterator[int]:
    """Hold ``path`` exclusively (it is made if missing); the value is its descriptor, open for reading and writing.

    Polls, because a thread that waits in flock(2) cannot be cancelled. A holder may remove the file: then the
    lock that was waited for is worthless and is taken again on the new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(descriptor):  # noqa: ASYNC110 - other processes set no event
                await asyncio.sleep(_POLL_S)
            if os.fstat(descriptor).st_nlink:
                yield descriptor
                return
        finally:
            os.close(descriptor)
