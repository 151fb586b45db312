"""One HTTP/1.1 connection to a port of a guest.

A protocol adapter: httptools parses responses, this class turns its callbacks into two awaitable reads with flow
control in both directions. It carries one request at a time and knows nothing of sandboxes or pools.
"""

import asyncio
import contextlib
import select
import socket
from typing import Any, cast

import httptools

from aenv.proxy.headers import Headers

CONNECT_TIMEOUT = 10.0  # seconds; a guest under software emulation can be slow to answer a SYN
_MAX_OVERHEAD = 256 * 1024  # bytes of heads, interim responses and trailers; the guest is not to be trusted
_SMALL = 4096  # bytes; what may be a head alone
_HIGH_WATER = 512 * 1024  # bytes of response body held before the guest is made to wait
# A guest that vanishes (paused, killed, host network gone) sends no FIN: the kernel finds out within these seconds.
_USER_TIMEOUT_MS = 30_000
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class UpstreamError(Exception):
    """Base of what can go wrong between the proxy and a guest's port."""


class ConnectError(UpstreamError):
    """No connection could be made. ``refused``: the guest's kernel answered that nothing listens."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


class BrokenError(UpstreamError):
    """The connection ended, or spoke something else than HTTP, before the response was complete."""


class ClientGoneError(UpstreamError):
    """The client disconnected, so the request was abandoned."""


class UpstreamConnection(asyncio.Protocol):
    """Life: connected by ``dial``, any number of ``start`` / ``response`` / ``read`` rounds, then ``abort``."""

    def __init__(self) -> None:
        self.idle_since = 0.0  # loop time; owned by the pool
        self.closed = False
        self.answered = False  # a byte of the current response has arrived
        self.upload_done = False  # set by the sender when the request is complete
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._drainer: asyncio.Future[None] | None = None
        self._write_paused = False
        self._read_paused = False
        # Of the current exchange; see ``start``.
        self._head = False
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._chunks: list[bytes] = []
        self._held = 0
        self._overhead = 0
        self._interim = False
        self._complete = True
        self._keep_alive = False
        self._error: UpstreamError | None = None

    # What the sender does

    def start(self, data: bytes, *, head: bool) -> None:
        """Begin a request with its first bytes; ``head`` says that its response has no body."""
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self.answered = False
        self.upload_done = False
        self._head = head
        self._status = 0
        self._headers = []
        self._chunks = []
        self._held = 0
        self._overhead = 0
        self._interim = False
        self._complete = False
        self._keep_alive = False
        self._error = BrokenError("connection already closed") if self.closed else None
        self.write(data)

    def write(self, data: bytes) -> None:
        if not self.closed and self._transport is not None:
            self._transport.write(data)

    def write_chunk(self, data: bytes) -> None:
        """One chunk of a chunked body; must not be empty."""
        if not self.closed and self._transport is not None:
            self._transport.writelines((b"%x\r\n" % len(data), data, b"\r\n"))

    async def drain(self) -> None:
        """Wait until the guest has taken enough of what was written; returns at once on a dead connection."""
        if self._write_paused and not self.closed:
            self._drainer = self._loop.create_future()
            await self._drainer

    def abort(self, error: UpstreamError | None = None) -> None:
        """Close without ceremony; whoever reads sees ``error``."""
        if error is not None and not self._complete and self._error is None:
            self._error = error
        self.closed = True  # from now on, not only once the event loop has come around to it
        if self._transport is not None:
            self._transport.abort()
        self._wake()

    # What the reader does

    async def response(self) -> tuple[int, Headers]:
        """Status and headers of the response, names in lower case. Raises BrokenError, ClientGoneError."""
        while self._status == 0:
            if self._error is not None:
                raise self._error
            await self._wait()
        return self._status, self._headers

    async def read(self) -> tuple[bytes, bool]:
        """What has arrived of the body, and whether that was the end. Raises as ``response`` does."""
        while not self._chunks and not self._complete:
            if self._error is not None:
                raise self._error
            await self._wait()
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks = []
        self._held = 0
        if self._read_paused:
            self._read_paused = False
            if self._transport is not None and not self.closed:
                self._transport.resume_reading()
        return data, self._complete

    @property
    def reusable(self) -> bool:
        """Whether another request may follow on this connection."""
        return self._complete and self._keep_alive and self.upload_done and not self.closed

    @property
    def stale(self) -> bool:
        """Whether an idle connection cannot carry a request: the peer closed it, or sent what nobody asked for.

        The kernel is asked, since the event loop may not have come around to it yet.
        """
        if self.closed or self._transport is None:
            return True
        sock = self._transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return True
        poll = select.poll()
        poll.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)
        return bool(poll.poll(0))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=_HIGH_WATER)
        sock = transport.get_extra_info("socket")
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def data_received(self, data: bytes) -> None:
        if self._complete:
            # Bytes nobody asked for: the next response could not be told from them.
            self.abort()
            return
        self.answered = True
        held = self._held
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.abort(BrokenError(f"not a valid HTTP response: {error}"))
            return
        if not self._complete and len(data) < _SMALL:
            self._acknowledge()
        if self._held == held and not self._complete:
            self._overhead += len(data)
            if self._overhead > _MAX_OVERHEAD:
                self.abort(BrokenError("the response's head or trailer is too large"))
                return
        if self._held > _HIGH_WATER and not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()
        self._wake()

    def _acknowledge(self) -> None:
        # A server that writes head and body apart, with Nagle's algorithm, sends the body only after the head is
        # acknowledged, which the kernel would do after 40 ms. Python's http.server is one.
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if not self._complete and self._error is None:
            if exc is None and self._status and not self._framed():
                self._complete = True  # HTTP/1.0 style: the end of the connection is the end of the body
                self._keep_alive = False
            else:
                self._error = BrokenError(str(exc) if exc else "connection closed before the response ended")
        if self._drainer is not None and not self._drainer.done():
            self._drainer.set_result(None)
        self._wake()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._drainer is not None and not self._drainer.done():
            self._drainer.set_result(None)

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._status == 0:  # else it is a trailer, which ASGI cannot pass on
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._headers = []
            self._interim = True
            return
        self._keep_alive = self._parser.should_keep_alive()
        self._status = status
        if self._head:
            # The parser cannot know that no body follows and would wait for it.
            self._complete = True
            self._parser = None

    def on_body(self, body: bytes) -> None:
        if self._complete:
            self._keep_alive = False
            return
        self._chunks.append(body)
        self._held += len(body)

    def on_message_complete(self) -> None:
        if self._interim:
            self._interim = False
        else:
            self._complete = True

    def _framed(self) -> bool:
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
