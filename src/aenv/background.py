"""Work that goes on behind answers: kept from being forgotten, waited for at the end, and heard when it fails."""

import asyncio
from collections.abc import Coroutine

import structlog

log = structlog.get_logger()


class Background:
    """Tasks that nobody awaits one by one."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None], name: str | None = None) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def settle(self) -> None:
        """Wait for all that goes on now."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            log.error("background work failed", error=repr(error))
