"""Reading ahead what a guest will need of a memory that is elsewhere: to the page cache, through the layer server."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from aenv.errors import CorruptFileError
from aenv.vmm import hot

log = structlog.get_logger()

READERS = 8  # reads under way at once: they wait for the network most of the time
PIECE = 1 << 20  # bytes of one read


async def warm(path: Path, used: str) -> None:
    """Read the parts of ``path`` that ``used`` names (``aenv.vmm.hot``). What fails is left to the guest."""
    try:
        await asyncio.to_thread(_read, path, list(hot.ranges(hot.decode(used), PIECE)))
    except (CorruptFileError, OSError) as error:
        log.warning("memory could not be read ahead", volume=path.name, error=str(error))


def _read(path: Path, ranges: list[tuple[int, int]]) -> None:
    began = time.monotonic()
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ThreadPoolExecutor(READERS, thread_name_prefix="warm") as pool:
            total = sum(pool.map(lambda piece: _touch(descriptor, *piece), ranges))
    finally:
        os.close(descriptor)
    log.debug("read memory ahead", volume=path.name, bytes=total, seconds=round(time.monotonic() - began, 3))


def _touch(descriptor: int, offset: int, length: int) -> int:
    return len(os.pread(descriptor, length, offset))
