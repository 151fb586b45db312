"""One HTTP request through the proxy: ASGI on one side, an ``UpstreamConnection`` on the other.

Bodies stream in both directions at once, chunk by chunk, and each side's slowness is passed on to the other. The
common small exchange costs one write, one read and no task: the task that watches for the client's disconnect is
started only when the response takes longer than ``_WATCH_AFTER``.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from aenv.proxy.headers import Body, Headers, UnsupportedFramingError, request_head, response_headers
from aenv.proxy.pool import SandboxPool
from aenv.proxy.replies import Reply, for_upstream_error
from aenv.proxy.routing import Target
from aenv.proxy.upstream import BrokenError, ClientGoneError, UpstreamConnection, UpstreamError

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_WATCH_AFTER = 0.01  # seconds
_IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"})  # RFC 9110 section 9.2.2
_MAX_REPEATED = 64 * 1024  # bytes of body


async def forward(pool: SandboxPool, target: Target, scope: Scope, receive: Receive, send: Send) -> Reply | None:
    """Carry the request. A Reply is returned when nothing was sent to the client yet and the caller has to.

    When the guest's response breaks off midway this returns without ending the response, which makes the ASGI
    server close the client's connection: a broken stream must not look complete.
    """
    client = scope.get("client")
    try:
        head, body = request_head(
            scope["method"].encode("ascii"),
            target.raw_path,
            scope["query_string"],
            scope["headers"],
            client=client[0] if client else None,
            scheme=scope["scheme"],
            prefix=target.prefix,
        )
    except UnsupportedFramingError:
        return Reply(501, target.sandbox_id, "Only the transfer coding chunked is supported", target.port)

    exchange = _Exchange(pool, target.port, head, body, scope["method"], receive)
    try:
        try:
            status, headers = await exchange.begin()
        except ClientGoneError:
            return None
        except UpstreamError as error:
            return for_upstream_error(target, error)
        if not 200 <= status <= 599:
            return for_upstream_error(target, BrokenError(f"unexpected status {status}"))
        await exchange.relay(status, headers, send)
    finally:
        exchange.end()
    return None


class _Exchange:
    """The state of one request: its connection, and the task or timer that reads from the client."""

    def __init__(self, pool: SandboxPool, port: int, head: bytes, body: Body, method: str, receive: Receive) -> None:
        self._pool = pool
        self._port = port
        self._head = head
        self._body = body
        self._is_head = method == "HEAD"
        self._idempotent = method in _IDEMPOTENT
        self._first = b""
        self._more = body is Body.CHUNKED
        self._receive = receive
        self._connection: UpstreamConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.Task[None] | None = None

    async def begin(self) -> tuple[int, Headers]:
        """Send the request, or as much of it as the guest wants, until the response's head is there."""
        if self._body is Body.LENGTH:
            # Before there is a connection: nothing may come between choosing an idle one and writing to it.
            # And head and body leave in one segment when the body is already here, as it mostly is.
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            self._first = message.get("body", b"")
            self._more = message.get("more_body", False)
        connection, reused = await self._pool.acquire(self._port)
        self._start(connection)
        try:
            return await connection.response()
        except BrokenError:
            # The guest closed a kept-alive connection just as we wrote to it, and may have seen the request.
            # Only one that may be repeated by RFC 9110, and that we hold entirely, is sent again, once.
            if not reused or connection.answered or not self._repeatable():
                raise
        self.end()
        connection, _ = await self._pool.acquire(self._port, fresh=True)
        self._start(connection)
        return await connection.response()

    async def relay(self, status: int, headers: Headers, send: Send) -> None:
        connection = self._connection
        assert connection is not None
        passed = response_headers(status, headers, head=self._is_head)
        await send({"type": "http.response.start", "status": status, "headers": passed})
        complete = False
        while not complete:
            try:
                data, complete = await connection.read()
            except UpstreamError:
                return
            await send({"type": "http.response.body", "body": data, "more_body": not complete})

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None
        if self._connection is not None:
            self._pool.release(self._connection)
            self._connection = None

    def _repeatable(self) -> bool:
        return self._idempotent and not self._more and len(self._first) <= _MAX_REPEATED

    def _start(self, connection: UpstreamConnection) -> None:
        self._connection = connection
        first = self._first
        connection.start(self._head + first if first else self._head, head=self._is_head)
        if self._more:
            self._reader = asyncio.create_task(self._upload(connection))
        else:
            connection.upload_done = True
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_WATCH_AFTER, self._watch, connection)

    def _watch(self, connection: UpstreamConnection) -> None:
        self._reader = asyncio.create_task(self._until_disconnect(connection))

    async def _upload(self, connection: UpstreamConnection) -> None:
        chunked = self._body is Body.CHUNKED
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                connection.abort(ClientGoneError())
                return
            data = message.get("body", b"")
            more = message.get("more_body", False)
            if data:
                if chunked:
                    connection.write_chunk(data)
                else:
                    connection.write(data)
                await connection.drain()
        if chunked:
            connection.write(b"0\r\n\r\n")
        connection.upload_done = True
        await self._until_disconnect(connection)

    async def _until_disconnect(self, connection: UpstreamConnection) -> None:
        # Once the body is complete the only news from the client is that it left.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        connection.abort(ClientGoneError())
