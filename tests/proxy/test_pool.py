"""Connections that are still being made end with the life of the VM they are made to."""

import asyncio
import socket

import pytest

from aenv.orchestrator.model import Upstream
from aenv.proxy import upstream as upstream_module
from aenv.proxy.pool import Pools
from aenv.proxy.upstream import ConnectError
from tests.proxy.support import ID, sandbox


def full_listener() -> tuple[socket.socket, list[socket.socket]]:
    """A listener whose queue is full: a further SYN is never answered, as by a VM that is gone."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    waiting = []
    for _ in range(4):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex(listener.getsockname())
        waiting.append(connection)
    return listener, waiting


async def test_dropping_a_sandbox_ends_connections_that_are_being_made() -> None:
    listener, waiting = full_listener()
    pools = Pools()
    try:
        pool = pools.get(Upstream(sandbox(), "127.0.0.1", 1))
        attempts = [asyncio.create_task(pool.acquire(listener.getsockname()[1])) for _ in range(3)]
        done, _ = await asyncio.wait(attempts, timeout=0.2)
        assert not done, "the listener answers; this test needs one that does not"
        pools.drop(ID)
        async with asyncio.timeout(upstream_module.CONNECT_TIMEOUT / 2):
            for attempt in attempts:
                with pytest.raises(ConnectError, match="paused, resumed or killed"):
                    await attempt
        with pytest.raises(ConnectError, match="paused, resumed or killed"):
            await pool.acquire(listener.getsockname()[1])
    finally:
        pools.close()
        for connection in (listener, *waiting):
            connection.close()


async def test_a_caller_that_leaves_is_not_told_otherwise() -> None:
    listener, waiting = full_listener()
    pools = Pools()
    try:
        pool = pools.get(Upstream(sandbox(), "127.0.0.1", 1))
        attempt = asyncio.create_task(pool.acquire(listener.getsockname()[1]))
        await asyncio.wait({attempt}, timeout=0.1)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
    finally:
        pools.close()
        for connection in (listener, *waiting):
            connection.close()
