"""Kept-alive connections to guests, by sandbox and generation.

A generation is one uninterrupted life of a sandbox's VM. A connection belongs to the generation it was made in and
dies with it: when a newer generation is seen, everything of the older one is aborted, requests under way included.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aenv.orchestrator.model import Upstream
from aenv.proxy.dial import dial
from aenv.proxy.upstream import BrokenError, ConnectError, UpstreamConnection

# Servers close idle connections after 5 s (Node.js, uvicorn) or more. Staying below that all but removes the race
# between our next request and their FIN, which a POST could not survive: it must not be sent twice.
IDLE_LIMIT = 4.0  # seconds
_MAX_IDLE = 32  # connections per sandbox port
_ENDED = "the sandbox was paused, resumed or killed"

P = TypeVar("P", bound=asyncio.BaseProtocol)


class SandboxPool:
    """The connections of one generation of one sandbox."""

    def __init__(self, upstream: Upstream) -> None:
        self.generation = upstream.generation
        self.host = upstream.host
        self._token = upstream.sandbox.envd_access_token
        self._idle: dict[int, list[UpstreamConnection]] = {}
        self._busy: dict[UpstreamConnection, int] = {}
        self._attached: set[asyncio.Transport] = set()
        self._opening: set[asyncio.Task[object]] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()

    async def acquire(self, port: int, *, fresh: bool = False) -> tuple[UpstreamConnection, bool]:
        """A connection for one request, and whether it served one before. Raises ConnectError."""
        if not fresh:
            idle = self._idle.get(port)
            oldest = self._loop.time() - IDLE_LIMIT
            while idle:
                connection = idle.pop()
                if connection.idle_since >= oldest and not connection.stale:
                    self._busy[connection] = port
                    return connection, True
                connection.abort()
        connection = await self.dial(UpstreamConnection, port)
        if self._closed:
            connection.abort()
            raise ConnectError(_ENDED, refused=False)
        self._busy[connection] = port
        return connection, False

    async def dial(self, factory: Callable[[], P], port: int) -> P:
        """A new connection to ``port``, which is the caller's alone. Raises ConnectError."""
        if self._closed:
            raise ConnectError(_ENDED, refused=False)
        # A task of its own, so that ``close`` can end it: a SYN to a VM that is gone is never answered.
        task = asyncio.create_task(dial(factory, self.host, port, self._token))
        self._opening.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self._closed and task.cancelled():
                raise ConnectError(_ENDED, refused=False) from None
            task.cancel()
            raise
        finally:
            self._opening.discard(task)

    def release(self, connection: UpstreamConnection) -> None:
        """Take a connection back; it is kept when the last exchange left it clean, else closed."""
        port = self._busy.pop(connection, None)
        if port is not None and connection.reusable:
            idle = self._idle.setdefault(port, [])
            if len(idle) < _MAX_IDLE:
                connection.idle_since = self._loop.time()
                idle.append(connection)
                return
        connection.abort()

    def attach(self, transport: asyncio.Transport) -> None:
        """Let a connection made elsewhere (a websocket) live no longer than this generation."""
        if self._closed:
            transport.abort()
        else:
            self._attached.add(transport)

    def detach(self, transport: asyncio.Transport) -> None:
        self._attached.discard(transport)

    def close(self) -> None:
        """Abort everything. Connections still in use are not taken back afterwards."""
        self._closed = True
        for task in self._opening:
            task.cancel()
        for idle in self._idle.values():
            for connection in idle:
                connection.abort()
        self._idle.clear()
        for connection in self._busy:
            connection.abort(BrokenError(_ENDED))
        self._busy.clear()
        for transport in self._attached:
            transport.abort()
        self._attached.clear()

    def sweep(self) -> bool:
        """Close what has been idle too long; False when nothing is left."""
        oldest = self._loop.time() - IDLE_LIMIT
        for port, idle in list(self._idle.items()):
            kept = [c for c in idle if not c.closed and c.idle_since >= oldest]
            for connection in set(idle) - set(kept):
                connection.abort()
            if kept:
                self._idle[port] = kept
            else:
                del self._idle[port]
        return bool(self._idle or self._busy or self._opening or self._attached)


class Pools:
    """The current pool of every sandbox that had traffic lately."""

    def __init__(self) -> None:
        self._pools: dict[str, SandboxPool] = {}
        self._timer: asyncio.TimerHandle | None = None

    def get(self, upstream: Upstream) -> SandboxPool:
        """The pool for exactly this generation and address."""
        key = upstream.sandbox.id
        pool = self._pools.get(key)
        if pool is not None:
            if pool.generation == upstream.generation and pool.host == upstream.host:
                return pool
            pool.close()
        pool = self._pools[key] = SandboxPool(upstream)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_LIMIT, self._sweep)
        return pool

    def drop(self, sandbox_id: str) -> None:
        """Abort every connection of a sandbox."""
        pool = self._pools.pop(sandbox_id, None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        for sandbox_id in list(self._pools):
            self.drop(sandbox_id)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sweep(self) -> None:
        self._timer = None
        for key, pool in list(self._pools.items()):
            if not pool.sweep():
                del self._pools[key]
        if self._pools:
            self._timer = asyncio.get_running_loop().call_later(IDLE_LIMIT, self._sweep)
