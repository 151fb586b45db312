"""Histories of samples, the pace of sampling, and the sampler against guests of its own."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from aenv.observability.host import parse_cpuinfo, parse_meminfo, parse_mounts
from aenv.observability.sampler import MAX_RATE, Sampler, Target, pace
from aenv.observability.samples import History, Sample, parse

BODY = {
    "cpu_count": 1, "cpu_used_pct": 2.5, "mem_used": 3, "mem_total": 2**40, "mem_cache": 4, "disk_used": 5,
    "disk_total": 6,
}  # fmt: skip


def sample(time: float) -> Sample:
    return parse(BODY, time)


def test_parse() -> None:
    found = parse({**BODY, "ts": 9, "more": "x"}, 1.5)
    assert (found.time, found.cpu_used_pct, found.mem_total) == (1.5, 2.5, 2.0**40)
    for broken in ({}, {**BODY, "mem_used": "3"}, {**BODY, "mem_used": True}, {**BODY, "mem_used": None}):
        with pytest.raises(ValueError, match=r"mem_used|cpu_count"):
            parse(broken, 1.0)


@given(st.lists(st.integers(0, 100), max_size=60), st.integers(0, 100), st.integers(0, 100))
def test_history_is_ordered_bounded_and_searchable(times: list[int], start: int, end: int) -> None:
    history = History(capacity=8)
    kept: list[float] = []
    for moment in times:
        history.add(sample(moment))
        if not kept or moment > kept[-1]:
            kept.append(float(moment))
    kept = kept[-8:]
    assert [s.time for s in history.between(None, None)] == kept
    assert history.latest == (sample(kept[-1]) if kept else None)
    ranged = [s.time for s in history.between(start, end)]
    assert [t for t in ranged if t in kept] == [t for t in kept if start <= t <= end]


def test_the_pace_bounds_the_load() -> None:
    assert pace(5, 1) == 5
    assert pace(5, 10) == 0.5
    assert pace(5, 1000) == 1 / MAX_RATE
    assert pace(0.001, 1) == 1 / MAX_RATE


class Guests:
    """Pretends to be guests; ``asked`` counts by token."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.answer: object = BODY
        self.delay = 0.0
        self.targets: dict[str, Target] = {}

    async def _metrics(self, request: web.Request) -> web.Response:
        token = request.headers.get("X-Access-Token", "")
        self.asked[token] = self.asked.get(token, 0) + 1
        await asyncio.sleep(self.delay)
        return web.json_response(self.answer)

    @asynccontextmanager
    async def sampler(self, interval: float, names: str) -> AsyncIterator[Sampler]:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        self.targets = {name: Target(name, f"http://127.0.0.1:{port}/metrics", name) for name in names}
        sampler = Sampler(interval, lambda: self.targets.values(), self.targets.get)
        sampler.start()
        try:
            yield sampler
        finally:
            await sampler.close()
            await runner.cleanup()


async def test_the_background_samples_all_that_run() -> None:
    guests = Guests()
    async with guests.sampler(0.4, "ab") as sampler:
        await asyncio.sleep(1.3)
        asked = dict(guests.asked)
        assert set(asked) == {"a", "b"}
        assert all(2 <= count <= 4 for count in asked.values())
        assert len(await sampler.history("a", None, 1)) == 0
        del guests.targets["b"]
        await asyncio.sleep(0.9)
        assert guests.asked["b"] <= asked["b"] + 1
        assert await sampler.latest("b") is not None, "what is known of a paused sandbox stays"
        sampler.forget("b")
        assert await sampler.latest("b") is None


async def test_on_demand_without_a_background_and_once_for_all_who_ask() -> None:
    guests = Guests()
    guests.delay = 0.2
    async with guests.sampler(0, "a") as sampler:
        await asyncio.sleep(0.3)
        assert guests.asked == {}
        found = await asyncio.gather(*(sampler.history("a", None, None) for _ in range(20)))
        assert [len(history) for history in found] == [1] * 20
        assert guests.asked == {"a": 1}
        assert await sampler.latest("a") is not None
        assert guests.asked == {"a": 1}
        assert await sampler.latest("nosuch") is None


@pytest.mark.parametrize("answer", [[], {"cpu_count": 1}, {**BODY, "pad": "x" * 100_000}, None])
async def test_a_guest_that_answers_nonsense_has_no_metrics(answer: object) -> None:
    guests = Guests()
    guests.answer = answer
    async with guests.sampler(0, "a") as sampler:
        assert await sampler.latest("a") is None
        assert await sampler.history("a", time.time() - 5, None) == ()


def test_host_files() -> None:
    assert parse_meminfo("MemTotal:  4 kB\nHugePages_Total:   7\nbroken\n") == {
        "MemTotal": 4096,
        "HugePages_Total": 7,
    }
    cpu = parse_cpuinfo("cpu family\t: 25\nmodel\t: 17\nmodel name\t: X\n\nmodel name\t: Y\n")
    assert (cpu.family, cpu.model, cpu.name) == ("25", "17", "X")
    mounts = "/dev/a / ext4 rw 0 0\n/dev/b /var/lib xfs rw 0 0\n"
    assert parse_mounts(mounts, "/var/lib/aenv") == ("/var/lib", "/dev/b", "xfs")
    assert parse_mounts(mounts, "/var/library") == ("/", "/dev/a", "ext4")
