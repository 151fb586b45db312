"""uvicorn settings that the proxy depends on."""

import asyncio
import logging
from typing import cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aenv.api.app import Application
from aenv.config import Settings
from aenv.proxy.joined import HeadJoiner
from aenv.proxy.websocket import MAX_MESSAGE

MAX_HEAD = 256 * 1024  # bytes of a request's head
_KEEP_ALIVE = 75  # seconds; above the idle time of common client pools and load balancers


def uvicorn_config(app: Application, settings: Settings, *, grace: int = 10) -> uvicorn.Config:
    """For ``uvicorn.Server(uvicorn_config(app, settings))``; the lifespan only closes the proxy's connections.

    ``grace`` is how long requests under way may last at shutdown, seconds. The event loop is the caller's (uvloop).

    No ``Date`` and ``Server`` of our own: the proxy passes the guest's. No compression and no pings on websockets:
    the two ends do that themselves.
    """
    logging.getLogger("uvicorn.error").addFilter(_expected)
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        loop="none",
        http=_Protocol,
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE,
        timeout_graceful_shutdown=grace,
        backlog=2048,
    )


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with joined answers, and with a bound on request heads, which it has not with httptools."""

    _head_bytes = 0
    _in_head = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast(asyncio.Transport, HeadJoiner(transport)))

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD:
            raise ValueError("request head too large")  # the parser stops and uvicorn answers 400
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # A name or value that never ends does not reach ``on_header``.
        if self._in_head and len(data) > MAX_HEAD - self._head_bytes and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")
        elif self._in_head:
            self._head_bytes += len(data)


# What uvicorn says when the proxy leaves a response unfinished on purpose because the guest broke off, and when it
# answers a websocket handshake with a plain HTTP response.
_EXPECTED = frozenset(
    {
        "ASGI callable returned without completing response.",
        "ASGI callable returned without completing handshake.",
    }
)


def _expected(record: logging.LogRecord) -> bool:
    return record.msg not in _EXPECTED
