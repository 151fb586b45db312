"""Samples the metrics of running sandboxes in the background, gently.

A sample wakes the guest: one TCP connection, one small HTTP request, three files of /proc read (measured in
docs/internals/observability.md). So samples are spread over the interval instead of coming in bursts, one at a time
unless a guest is slow, and over all sandboxes there are at most ``MAX_RATE`` a second: with many sandboxes the
interval grows rather than the load.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import aiohttp
import structlog

from aenv.observability.samples import History, Sample, parse

log = structlog.get_logger()

MAX_RATE = 10.0  # samples a second over all sandboxes
ON_DEMAND_AGE = 1.0  # seconds: a caller gets a sample no older, or one interval old if that is longer
TIMEOUT = 5.0  # seconds a guest may take
MAX_CONCURRENT = 16  # slow guests that are waited for at once
MAX_BODY = 16 * 1024  # bytes; the guest is not trusted


@dataclass(frozen=True, slots=True)
class Target:
    """A running sandbox whose guest knows who it is."""

    sandbox_id: str
    url: str
    token: str | None


def pace(interval: float, running: int) -> float:
    """Seconds between two samples of any two sandboxes, so that each is sampled every ``interval`` or later."""
    return max(interval / max(running, 1), 1 / MAX_RATE)


class Sampler:
    """Histories of all sandboxes. ``targets`` lists the running ones, ``find`` one of them; both are cheap."""

    def __init__(
        self,
        interval: float,
        targets: Callable[[], Iterable[Target]],
        find: Callable[[str], Target | None],
    ) -> None:
        self._interval = interval
        self._targets = targets
        self._find = find
        self._histories: dict[str, History] = {}
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._pending: dict[str, asyncio.Task[Sample | None]] = {}

    def start(self) -> None:
        """Begin to sample in the background, unless the interval is 0."""
        if self._interval > 0:
            self._task = asyncio.create_task(self._run(), name="metrics")

    async def close(self) -> None:
        tasks = [*self._pending.values(), *([self._task] if self._task else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()
            self._session = None

    def forget(self, sandbox_id: str) -> None:
        """The sandbox is gone."""
        self._histories.pop(sandbox_id, None)

    async def history(self, sandbox_id: str, start: float | None, end: float | None) -> Sequence[Sample]:
        """Samples between two Unix times; with a fresh one if the sandbox runs and the range reaches now."""
        if end is None or end >= time.time() - 1:
            await self.latest(sandbox_id)
        known = self._histories.get(sandbox_id)
        return known.between(start, end) if known else ()

    async def latest(self, sandbox_id: str) -> Sample | None:
        """The last sample, taken now if it is old and the sandbox runs; None if there is none to be had."""
        known = self._histories.get(sandbox_id)
        last = known.latest if known else None
        if last is not None and time.time() - last.time < max(ON_DEMAND_AGE, self._interval):
            return last
        target = self._find(sandbox_id)
        if target is None:
            return last
        return await asyncio.shield(self._take(target)) or last

    async def _run(self) -> None:
        while True:
            targets = list(self._targets())
            if not targets:
                await asyncio.sleep(min(self._interval, 1.0))
            step = pace(self._interval, len(targets))
            for target in targets:
                started = time.monotonic()
                # The list may be minutes old by the time its end is reached.
                if self._find(target.sandbox_id) == target and len(self._pending) < MAX_CONCURRENT:
                    self._take(target)
                await asyncio.sleep(max(0.0, step - (time.monotonic() - started)))

    def _take(self, target: Target) -> asyncio.Task[Sample | None]:
        """Ask the guest, once for all who ask at the same time."""
        task = self._pending.get(target.sandbox_id)
        if task is None:
            task = asyncio.create_task(self._sample(target))
            self._pending[target.sandbox_id] = task
            task.add_done_callback(lambda _: self._pending.pop(target.sandbox_id, None))
        return task

    async def _sample(self, target: Target) -> Sample | None:
        with contextlib.suppress(TimeoutError, aiohttp.ClientError, OSError, ValueError):
            sample = parse(await self._fetch(target), time.time())
            if self._find(target.sandbox_id) == target:
                self._histories.setdefault(target.sandbox_id, History()).add(sample)
            return sample
        log.debug("no metrics from the guest", sandbox=target.sandbox_id)
        return None

    async def _fetch(self, target: Target) -> dict[str, object]:
        if self._session is None:
            # One use for each connection: a kept one would be of a VM's former life after a pause.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=TIMEOUT),
            )
        headers = {"X-Access-Token": target.token} if target.token else {}
        async with self._session.get(target.url, headers=headers) as answer:
            if answer.status != 200:
                raise ValueError(f"envd answered {answer.status}")
            body = b""
            async for chunk in answer.content.iter_chunked(MAX_BODY):
                body += chunk
                if len(body) > MAX_BODY:
                    raise ValueError("the metrics are too long")
        found = json.loads(body)
        if not isinstance(found, dict):
            raise ValueError("the metrics are not an object")
        return found
