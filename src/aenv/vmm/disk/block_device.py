"""What is done to a block device by the server, since the daemon behind it must not.

Both wait for requests that only the daemon answers: killed meanwhile, it could not end before another took over,
which could not take over before it ended (``docs/internals/disk-exports.md``). So each has a thread of its own, for
which neither the server's end nor its workers wait.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

from aenv.errors import CapacityError, VmmError

LOOK = 1.0  # seconds between looks whether the host's disk is full
SETTINGS = {
    "scheduler": "none",  # behind the device is a page cache: nothing is gained by another order,
    "wbt_lat_usec": "0",  # nor by writing less at a time
}


def tune_device(path: Path) -> None:
    """Set up a device's queue, which the kernel empties for each setting: some 10 ms that nobody waits for."""

    def work() -> None:
        for name, value in SETTINGS.items():
            with contextlib.suppress(OSError):  # a kernel without it, or the device is gone already
                Path("/sys/block", path.name, "queue", name).write_text(value)

    threading.Thread(target=work, daemon=True, name="tune-disk").start()


async def sync_device(path: Path, full: Callable[[], Awaitable[bool]]) -> None:
    """Write what the page cache of a device holds to its daemon.

    Raises CapacityError when ``full`` says that there is no room, which a write would wait for.
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
