"""WebSockets through the proxy over real sockets."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from tests.proxy.support import ID, Node, node


class Guest:
    """Echoes; ``close me`` closes with 4321, ``drop me`` cuts the connection."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.closes: list[tuple[int | None, str | None]] = []
        self.closed = asyncio.Event()

    async def __call__(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        self.requests.append(connection.request)
        try:
            async for message in connection:
                if message == "close me":
                    await connection.close(4321, "as asked")
                elif message == "drop me":
                    connection.transport.abort()
                else:
                    await connection.send(message)
        except ConnectionClosed:
            pass
        self.closes.append((connection.close_code, connection.close_reason))
        self.closed.set()


async def _screen(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(418, "no tea\n") if request.path == "/teapot" else None


def _last(_: ServerConnection, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    return offered[-1] if offered else None


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Node, Guest, dict[str, str]]]:
    guest = Guest()
    async with (
        node() as server,
        serve(guest, "127.0.0.1", 0, process_request=_screen, select_subprotocol=_last, max_size=None) as listener,
    ):
        port = next(iter(listener.sockets)).getsockname()[1]
        yield server, guest, server.headers(port)


def url(server: Node, path: str = "/") -> str:
    return f"ws://127.0.0.1:{server.port}{path}"


async def test_messages_pass_both_ways() -> None:
    async with running() as (server, guest, headers):
        async with connect(
            url(server, "/a%20b?q=1"),
            additional_headers={**headers, "x-mine": "1"},
            subprotocols=[Subprotocol("chat.v1"), Subprotocol("chat.v2")],
            max_size=None,
        ) as client:
            assert client.subprotocol == "chat.v2"
            for message in ("text é", b"\x00\xff", "", b"", "x" * 3_000_000):
                await client.send(message)
                assert await client.recv() == message
            await client.close(4000, "bye")
        await asyncio.wait_for(guest.closed.wait(), 10)
        assert guest.closes == [(4000, "bye")]
        request = guest.requests[0]
        assert request.path == "/a%20b?q=1"
        assert request.headers["host"] == f"127.0.0.1:{server.port}"
        assert request.headers["x-mine"] == "1"
        assert request.headers["x-forwarded-for"] == "127.0.0.1"
        assert "e2b-sandbox-id" not in request.headers


async def test_guest_closes() -> None:
    async with running() as (server, _, headers), connect(url(server), additional_headers=headers) as client:
        await client.send("close me")
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert (client.close_code, client.close_reason) == (4321, "as asked")


async def test_a_lost_guest_is_an_abnormal_close() -> None:
    async with running() as (server, _, headers), connect(url(server), additional_headers=headers) as client:
        await client.send("drop me")
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1011


async def test_a_lost_client_is_an_abnormal_close() -> None:
    async with running() as (server, guest, headers):
        client = await connect(url(server), additional_headers=headers)
        await client.send("x")
        await client.recv()
        client.transport.abort()
        await asyncio.wait_for(guest.closed.wait(), 10)
        assert guest.closes[0][0] == 1001


async def test_dropping_the_sandbox_cuts_websockets() -> None:
    async with running() as (server, _, headers), connect(url(server), additional_headers=headers) as client:
        server.app.proxy.drop(ID)
        with pytest.raises(ConnectionClosed):
            await client.recv()
        assert client.close_code == 1011


async def test_refusals_are_http_responses() -> None:
    async with running() as (server, _, headers):
        with pytest.raises(InvalidStatus) as refused:
            await connect(url(server, "/teapot"), additional_headers=headers)
        assert refused.value.response.status_code == 418
        assert refused.value.response.body == b"no tea\n"
        with pytest.raises(InvalidStatus) as closed:
            await connect(url(server), additional_headers={**headers, "e2b-sandbox-port": "1"})
        assert closed.value.response.status_code == 502
        assert b"port is not open" in (closed.value.response.body or b"")
        with pytest.raises(InvalidStatus) as missing:
            await connect(url(server), additional_headers={**headers, "e2b-sandbox-id": "nosuch"})
        assert missing.value.response.status_code == 502
        with pytest.raises(InvalidStatus) as api:
            await connect(url(server, "/health"))
        assert api.value.response.status_code == 403
