"""Life of slots: warm pool, release, crash leftovers, restarts, coexistence."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import pytest

from aenv.network import addressing, namespace
from aenv.network.errors import NetworkConflict, NetworkExhausted, NetworkUnavailable, SlotLost
from aenv.network.policy import EgressPolicy
from aenv.network.pool import SlotPool
from aenv.network.slot import NETNS_DIR
from tests.network.lab import SERVER, SERVER_GATEWAY, Lab, sh

Footprint = Callable[[], tuple[str, ...]]


async def filled(pool: SlotPool, count: int) -> None:
    async with asyncio.timeout(10):
        while len(pool._ready) < count:  # noqa: ASYNC110 - the pool has no event for tests
            await asyncio.sleep(0.005)


def crash(pool: SlotPool) -> None:
    """What kill -9 leaves of a pool: everything in the kernel, and no lock."""
    if pool._refill is not None:
        pool._refill.cancel()
    pool._release_lock()
    pool._ready.clear()
    pool._active.clear()
    pool._closed = True


async def test_nothing_is_left_behind(lab: Lab, footprint: Footprint) -> None:
    before = footprint()
    pool = lab.pool(warm=3)
    await pool.start()
    slots = [await pool.acquire() for _ in range(5)]
    await pool.apply_policy(slots[0], EgressPolicy(allow_internet=False))
    await filled(pool, 3)
    assert len(footprint()) > len(before)
    await asyncio.gather(*(pool.release(slot) for slot in slots))
    await pool.close(remove_root_table=True)
    assert footprint() == before


async def test_warm_slots_are_handed_out_at_once_and_refilled_beside_the_loop(lab: Lab) -> None:
    pool = lab.pool(warm=16)
    await pool.start()
    await filled(pool, 16)
    start = time.perf_counter()
    slots = [await pool.acquire() for _ in range(16)]
    assert time.perf_counter() - start < 0.05
    assert len({slot.index for slot in slots}) == 16
    worst = 0.0
    while len(pool._ready) < 16:
        tick = time.perf_counter()
        await asyncio.sleep(0)
        worst = max(worst, time.perf_counter() - tick)
    assert worst < 1.0  # 5 ms of interpreter lock; more only when others keep the processors busy


async def test_acquire_makes_a_slot_when_none_is_warm(lab: Lab) -> None:
    pool = lab.pool()
    await pool.start()
    slots = await asyncio.gather(*(pool.acquire() for _ in range(4)))
    assert len({slot.host_address for slot in slots}) == 4


async def test_an_abandoned_acquire_loses_no_slot(lab: Lab) -> None:
    pool = lab.pool()
    await pool.start()
    task = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await filled(pool, 1)
    assert (await pool.acquire()).index == 0


async def test_exhaustion_is_typed_and_ends_with_a_release(lab: Lab) -> None:
    pool = lab.pool(lab.settings(size=30), warm=8)
    await pool.start()
    slots = [await pool.acquire(), await pool.acquire()]
    with pytest.raises(NetworkExhausted, match="slot_cidr"):
        await pool.acquire()
    await pool.release(slots[0])
    assert (await pool.acquire()).index == slots[0].index


async def test_release_of_a_half_gone_slot_and_twice(lab: Lab) -> None:
    pool = lab.pool()
    await pool.start()
    for damage in ("ip link del {0}", "umount /run/netns/{0}", "ip netns del {0}", "true"):
        slot = await pool.acquire()
        sh(damage.format(slot.netns))
        await pool.release(slot)
        await pool.release(slot)
        assert namespace.interface_index(slot.netns) is None
        assert slot.netns not in namespace.names()
    with pytest.raises(SlotLost):
        await pool.apply_policy(slot, EgressPolicy())


async def test_start_removes_what_a_crash_left(lab: Lab, footprint: Footprint) -> None:
    before = footprint()
    settings = lab.settings()
    first = lab.pool(settings, warm=2)
    await first.start()
    await first.acquire()
    await filled(first, 2)
    await asyncio.sleep(0.1)
    crash(first)
    # A creation interrupted between its steps leaves a name without a namespace, or a link without a name.
    (NETNS_DIR / addressing.slot_name(settings, 90)).touch()
    sh(
        f"ip link add {addressing.slot_name(settings, 91)} type dummy 2>/dev/null || "
        f"ip link add {addressing.slot_name(settings, 91)} type veth peer name {settings.prefix}x"
    )
    second = lab.pool(settings)
    await second.start()
    assert not [name for name in namespace.names() if name.startswith(settings.prefix)]
    assert namespace.interface_index(addressing.slot_name(settings, 91)) is None
    await second.close(remove_root_table=True)
    assert footprint() == before


async def test_slots_in_use_survive_a_crash_with_traffic_and_policy(lab: Lab) -> None:
    settings = lab.settings()
    first = lab.pool(settings, warm=1)
    await first.start()
    guest = lab.guest(await first.acquire())
    lab.echo(lab.internet, SERVER)
    with guest.tcp(SERVER) as connection:
        await filled(first, 1)
        crash(first)
        second = lab.pool(settings)
        await second.start(in_use=[guest.slot.index, 77])
        assert second.adopt(guest.slot.index) == guest.slot
        with pytest.raises(SlotLost):
            second.adopt(77)
        connection.sendall(b"still")
        assert connection.recv(16) == b"still"
    await second.apply_policy(guest.slot, EgressPolicy(allow_internet=False))
    assert guest.is_cut_off(SERVER)
    assert (await second.acquire()).index != guest.slot.index


async def test_close_keeps_slots_in_use_and_their_protection(lab: Lab, footprint: Footprint) -> None:
    settings = lab.settings()
    first = lab.pool(settings, warm=2)
    await first.start()
    guest = lab.guest(await first.acquire())
    await first.close(remove_root_table=True)
    first._active.clear()
    lab.echo("", "0.0.0.0", 7001)
    assert guest.is_cut_off(SERVER_GATEWAY, 7001)
    assert [name for name in namespace.names() if name.startswith(settings.prefix)] == [guest.slot.netns]
    second = lab.pool(settings)
    await second.start(in_use=[guest.slot.index])
    second.adopt(guest.slot.index)


async def test_two_nodes_coexist(lab: Lab, footprint: Footprint) -> None:
    one, two = lab.pool(lab.settings("a")), lab.pool(lab.settings("b"))
    await one.start()
    await two.start()
    guest = lab.guest(await two.acquire())
    lab.echo(lab.internet, SERVER)
    await one.acquire()
    crash(one)
    again = lab.pool(lab.settings("a"))
    await again.start()
    await again.close(remove_root_table=True)
    assert guest.reaches(SERVER)  # neither its slot nor the uplink's forwarding went with the other node


async def test_conflicts_are_found_at_start(lab: Lab) -> None:
    settings = lab.settings("a")
    pool = lab.pool(settings)
    await pool.start()
    with pytest.raises(NetworkConflict, match="prefix"):
        await lab.pool(settings).start()
    await pool.acquire()
    overlapping = dataclasses.replace(lab.settings("b"), pool_cidr=settings.pool_cidr)
    with pytest.raises(NetworkConflict, match="overlaps"):
        await lab.pool(overlapping).start()


async def test_a_pool_must_be_started(lab: Lab) -> None:
    with pytest.raises(NetworkUnavailable, match="start"):
        await lab.pool().acquire()
