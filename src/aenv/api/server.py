"""uvicorn settings that the proxy depends on."""

import logging

import uvicorn

from aenv.api.app import Application
from aenv.config import Settings
from aenv.proxy.websocket import MAX_MESSAGE

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
        http="httptools",
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
