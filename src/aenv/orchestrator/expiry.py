"""Ends of life: one timer per running sandbox."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import structlog

from aenv.background import Background
from aenv.errors import AenvError
from aenv.orchestrator.model import Sandbox

log = structlog.get_logger()

RETRY = 30.0  # seconds until an expiry that failed (no disk left to pause on, say) is tried again


class Expiry:
    """Calls ``expire(sandbox_id)`` when a sandbox reaches its ``end_at``."""

    def __init__(self, expire: Callable[[str], Awaitable[None]]) -> None:
        self._expire = expire
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._background = Background()

    def watch(self, sandbox: Sandbox) -> None:
        """(Re)arm the timer of a sandbox from its ``end_at``."""
        delay = max(0.0, (sandbox.end_at - datetime.now(UTC)).total_seconds())
        self._arm(sandbox.id, delay)

    def forget(self, sandbox_id: str) -> None:
        if (timer := self._timers.pop(sandbox_id, None)) is not None:
            timer.cancel()

    async def close(self) -> None:
        for sandbox_id in list(self._timers):
            self.forget(sandbox_id)
        await self._background.settle()

    def _arm(self, sandbox_id: str, delay: float) -> None:
        self.forget(sandbox_id)
        self._timers[sandbox_id] = asyncio.get_running_loop().call_later(delay, self._fire, sandbox_id)

    def _fire(self, sandbox_id: str) -> None:
        self._timers.pop(sandbox_id, None)
        self._background.spawn(self._run(sandbox_id), name=f"expire-{sandbox_id}")

    async def _run(self, sandbox_id: str) -> None:
        try:
            await self._expire(sandbox_id)
        except Exception as error:  # whatever it was: a sandbox that never ends would be worse
            known = isinstance(error, AenvError)
            text = str(error) if known else repr(error)
            log.error(
                "expiry failed; will try again", sandbox=sandbox_id, error=text, retry_s=RETRY, exc_info=not known
            )
            self._arm(sandbox_id, RETRY)
