"""Blocking work in a thread that is waited for also when its task is cancelled: it uses what the task then closes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T], discard: Callable[[T], None] = lambda result: None) -> T:
    """The result of ``work``. A cancellation is delivered once it has ended, and its result goes to ``discard``."""
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        while not thread.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([thread])
        if not thread.cancelled() and thread.exception() is None:
            discard(thread.result())
        raise
