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


def names(path: Path, descriptor: int) -> bool:
    """Whether ``path`` is still the name of the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.asynccontextmanager
async def locked(path: Path) -> AsyncIterator[int]:
    """Hold ``path`` exclusively (it is made if missing); the value is its descriptor, open for reading and writing.

    Polls, because a thread that waits in flock(2) cannot be cancelled. A holder may remove or rename the file: then
    the lock that was waited for is worthless, and is taken on the new file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not (held := try_lock(descriptor)) and names(path, descriptor):  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
            if held and names(path, descriptor):
                yield descriptor
                return
        finally:
            os.close(descriptor)
