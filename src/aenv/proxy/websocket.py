"""WebSockets through the proxy: an ASGI websocket on one side, one of the guest's on the other.

Messages pass whole, text as text and binary as binary, in both directions at once; subprotocols, handshake headers
and close codes pass too. Compression is negotiated per hop, pings are answered per hop.
"""

import asyncio
from contextlib import suppress

from websockets.asyncio.client import ClientConnection
from websockets.client import ClientProtocol
from websockets.datastructures import Headers as WireHeaders
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.http11 import Request
from websockets.typing import Subprotocol
from websockets.uri import WebSocketURI

from aenv.proxy.forward import Receive, Scope, Send
from aenv.proxy.headers import UnsupportedFramingError, forwarded_headers
from aenv.proxy.pool import SandboxPool
from aenv.proxy.replies import Reply, for_upstream_error
from aenv.proxy.routing import Target
from aenv.proxy.upstream import BrokenError, UpstreamError

MAX_MESSAGE = 64 * 1024 * 1024  # bytes; ASGI has no partial messages
_HANDSHAKE_TIMEOUT = 60.0  # seconds; applications may decide slowly
_CLOSE_TIMEOUT = 5.0  # seconds
_SENDABLE = frozenset({*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)})  # RFC 6455 section 7.4


async def tunnel(pool: SandboxPool, target: Target, scope: Scope, receive: Receive, send: Send) -> Reply | None:
    """Carry one websocket until either side closes. A Reply is returned when the guest could not be asked."""
    if (await receive())["type"] != "websocket.connect":
        return None
    try:
        guest = await _connect(pool, target, scope)
    except InvalidStatus as error:
        await _reject(error, send)
        return None
    except UpstreamError as error:
        return for_upstream_error(target, error)
    pool.attach(guest.transport)
    try:
        await send(
            {
                "type": "websocket.accept",
                "subprotocol": guest.subprotocol,
                "headers": _accept_headers(guest.response.headers if guest.response else WireHeaders()),
            }
        )
        await _relay(guest, receive, send)
    finally:
        pool.detach(guest.transport)
        guest.transport.abort()
    return None


async def _connect(pool: SandboxPool, target: Target, scope: Scope) -> ClientConnection:
    """Raises UpstreamError, or InvalidStatus when the guest answered with something else than 101."""
    client = scope.get("client")
    scheme = "https" if scope["scheme"] == "wss" else "http"
    try:
        passed, _ = forwarded_headers(
            scope["headers"], client=client[0] if client else None, scheme=scheme, prefix=target.prefix
        )
    except UnsupportedFramingError:
        raise BrokenError("a websocket handshake has no body") from None
    host = next((value.decode("latin-1") for name, value in passed if name == b"host"), pool.host)
    path, query = target.raw_path.decode("latin-1"), scope["query_string"].decode("latin-1")
    uri = WebSocketURI(False, pool.host, target.port, path, query)
    protocol = _GuestProtocol(uri, host, [Subprotocol(name) for name in scope.get("subprotocols", ())])
    extra = WireHeaders()
    for name, value in passed:
        if name != b"host" and name != b"content-length" and not name.startswith(b"sec-websocket-"):
            extra[name.decode("latin-1")] = value.decode("latin-1")
    guest = await pool.dial(
        lambda: ClientConnection(protocol, ping_interval=None, close_timeout=_CLOSE_TIMEOUT), target.port
    )
    try:
        async with asyncio.timeout(_HANDSHAKE_TIMEOUT):
            await guest.handshake(extra, user_agent_header=None)
    except InvalidStatus:
        guest.transport.abort()
        raise
    except (TimeoutError, OSError, EOFError, WebSocketException) as error:
        guest.transport.abort()
        raise BrokenError(f"websocket handshake failed: {error}") from None
    except BaseException:
        guest.transport.abort()
        raise
    return guest


async def _relay(guest: ClientConnection, receive: Receive, send: Send) -> None:
    upward = asyncio.create_task(_client_to_guest(guest, receive))
    downward = asyncio.create_task(_guest_to_client(guest, send))
    try:
        await asyncio.wait((upward, downward), return_when=asyncio.FIRST_COMPLETED)
        # When the client closed first, let the guest's last messages and its close frame go their way.
        if upward.done() and not downward.done():
            await asyncio.wait((downward,), timeout=_CLOSE_TIMEOUT)
    finally:
        for task in (upward, downward):
            task.cancel()
        await asyncio.gather(upward, downward, return_exceptions=True)


async def _client_to_guest(guest: ClientConnection, receive: Receive) -> None:
    with suppress(ConnectionClosed):
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                await _close_guest(guest, message.get("code", 1005), message.get("reason") or "")
                return
            text = message.get("text")
            await guest.send(text if text is not None else message["bytes"])


async def _guest_to_client(guest: ClientConnection, send: Send) -> None:
    try:
        while True:
            data = await guest.recv()
            if isinstance(data, str):
                await send({"type": "websocket.send", "text": data})
            else:
                await send({"type": "websocket.send", "bytes": data})
    except ConnectionClosed:
        code = guest.close_code or 1006
        reason = guest.close_reason or ""
        if code == 1005:
            code = 1000  # ASGI cannot send a close frame without a code
        elif code not in _SENDABLE:
            code, reason = 1011, "connection to the sandbox lost"
        await send({"type": "websocket.close", "code": code, "reason": reason})


async def _close_guest(guest: ClientConnection, code: int, reason: str) -> None:
    if code in _SENDABLE:
        await guest.close(code, reason)
    else:
        # No close frame (1006) or one without a code (1005): ASGI servers report both as 1005. The guest's
        # application is told that its peer went away.
        await guest.close(1001)


async def _reject(error: InvalidStatus, send: Send) -> None:
    """Pass the guest's refusal on as the HTTP response it is."""
    response = error.response
    headers = [(name, value) for name, value in _accept_headers(response.headers) if name != b"transfer-encoding"]
    body = bytes(response.body or b"")
    headers = [(n, v) for n, v in headers if n != b"content-length"]
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "websocket.http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


_HANDSHAKE_HEADERS = frozenset({b"connection", b"upgrade", b"keep-alive", b"date"})


def _accept_headers(headers: WireHeaders) -> list[tuple[bytes, bytes]]:
    pairs = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.raw_items()]
    return [pair for pair in pairs if pair[0] not in _HANDSHAKE_HEADERS and not pair[0].startswith(b"sec-websocket-")]


class _GuestProtocol(ClientProtocol):
    """Sends the client's own Host header, not one made from the address that was dialled."""

    def __init__(self, uri: WebSocketURI, host: str, subprotocols: list[Subprotocol]) -> None:
        super().__init__(uri, subprotocols=subprotocols or None, max_size=MAX_MESSAGE)
        self._host = host

    def connect(self) -> Request:
        request = super().connect()
        del request.headers["Host"]
        request.headers["Host"] = self._host
        return request
