"""Writing what the page cache of a block device holds to the daemon behind it."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aenv.errors import CapacityError, VmmError

LOOK = 1.0  # seconds between looks whether the host's disk is full


async def sync_device(path: Path, full: Callable[[], Awaitable[bool]]) -> None:
    """Raises CapacityError when ``full`` says that there is no room, which a write would wait for.

    A thread of its own: it may wait for as long as the disk is full, and neither the server's end nor its workers may
    wait for it. The daemon itself must never do this (``blockd/src/server.rs``).
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[OSError | None] = loop.create_future()

    def finish(error: OSError | None) -> None:
        if not done.done():
            done.set_result(error)

    def work() -> None:
        error = None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as caught:
            error = caught
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=work, daemon=True, name="sync-disk").start()
    while not (await asyncio.wait({done}, timeout=LOOK))[0]:
        if await full():
            raise CapacityError(f"No room left on this host to write what {path} holds.", "Free disk space.")
    if (error := done.result()) is not None:
        raise VmmError(f"{path} cannot be synced: {error}.") from error
