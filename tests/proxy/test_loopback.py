"""Programs that listen on the guest's loopback only, through a real envd.

The guest's address is one of 127.0.0.0/8 on which only envd listens; its loopback is the host's 127.0.0.1.
"""

import asyncio
import http.server
import json
import random
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed, InvalidStatus

from aenv.proxy.routing import ENVD_PORT
from tests.envd.daemon import Envd
from tests.proxy.support import ID, Node, chunk, guest, head, node, sandbox, until

TOKEN = "s3cret"


def address() -> str:
    return f"127.{random.randint(1, 254)}.{random.randint(0, 254)}.{random.randint(1, 254)}"


@pytest.fixture(scope="module")
async def envd() -> AsyncIterator[Envd]:
    daemon = await asyncio.to_thread(Envd, address(), ENVD_PORT)
    try:
        body = json.dumps({"accessToken": TOKEN})
        assert (await asyncio.to_thread(daemon.request, "POST", "/init", body)).status == 204
        yield daemon
    finally:
        daemon.stop()


@pytest.fixture
async def server(envd: Envd) -> AsyncIterator[Node]:
    async with node() as server:
        server.fake.host = envd.host
        server.fake.sandbox = sandbox(envd_access_token=TOKEN)
        yield server


class Echo:
    """Answers every request with its chunked body, chunk by chunk."""

    def __init__(self) -> None:
        self.connections = 0
        self.ended = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                await head(reader)
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                while data := await chunk(reader):
                    writer.write(b"%x\r\n%s\r\n" % (len(data), data))
                    await writer.drain()
                writer.write(b"0\r\n\r\n")
        finally:
            self.ended.set()


async def pieces(size: int) -> AsyncIterator[bytes]:
    for number in range(size // 2**16):
        yield bytes([number % 251]) * 2**16


async def test_kept_alive_connections_of_posts(server: Node) -> None:
    app = Echo()
    async with guest(app) as port, aiohttp.ClientSession() as session:
        for size in (0, 2**16, 16 * 2**20):
            async with session.post(server.url, headers=server.headers(port), data=pieces(size)) as response:
                expected = b"".join([data async for data in pieces(size)])
                assert await response.read() == expected
        assert app.connections == 1
        server.app.proxy.drop(ID)
        await asyncio.wait_for(app.ended.wait(), 10)


class Apart(http.server.BaseHTTPRequestHandler):
    """Writes head and body apart, with Nagle's algorithm, as programs on Python's own server do."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("straight", [False, True])
async def test_a_head_apart_from_its_body_costs_no_delay(server: Node, straight: bool) -> None:
    """Nobody waits for an acknowledgement, which the kernel delays by 40 ms once a connection is warm."""
    app = http.server.ThreadingHTTPServer((server.fake.host if straight else "127.0.0.1", 0), Apart)
    thread = threading.Thread(target=app.serve_forever)
    thread.start()
    times = []
    async with aiohttp.ClientSession() as session:
        for _ in range(60):
            began = time.perf_counter()
            headers = server.headers(app.server_port)
            async with session.post(server.url, headers=headers, data=b"x") as response:
                assert await response.read() == b"ok"
            times.append(time.perf_counter() - began)
    server.app.proxy.drop(ID)
    await asyncio.to_thread(app.shutdown)
    thread.join()
    app.server_close()
    assert sorted(times[20:])[10] < 0.03


async def test_ipv6_only(server: Node) -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nsix")
        await writer.drain()
        writer.close()

    try:
        listener = await asyncio.start_server(app, "::1", 0)
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    port = listener.sockets[0].getsockname()[1]
    async with (
        listener,
        aiohttp.ClientSession() as session,
        session.get(server.url, headers=server.headers(port)) as response,
    ):
        assert await response.read() == b"six"


async def test_a_reset_does_not_look_like_an_end(server: Node) -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhalf a")
        await writer.drain()
        await reader.read(1)
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    async with guest(app) as port:
        reader, writer = await server.connect()
        routing = "".join(f"{name}: {value}\r\n" for name, value in server.headers(port).items())
        writer.write(f"POST / HTTP/1.1\r\nhost: x\r\n{routing}transfer-encoding: chunked\r\n\r\n".encode())
        assert b"chunked" in await head(reader)
        assert await chunk(reader) == b"half a"
        writer.write(b"1\r\nx\r\n")
        assert await reader.read() == b"", "neither more of the body nor its last chunk"
        writer.close()


async def test_websockets(server: Node) -> None:
    async def echo(connection: ServerConnection) -> None:
        async for message in connection:
            await connection.send(message)

    async with serve(echo, "127.0.0.1", 0, max_size=None) as listener:
        port = next(iter(listener.sockets)).getsockname()[1]
        headers = server.headers(port)
        async with connect(f"ws://127.0.0.1:{server.port}/", additional_headers=headers, max_size=None) as client:
            for message in ("text", b"\x00\xff", "x" * 2_000_000):
                await client.send(message)
                assert await client.recv() == message
            server.app.proxy.drop(ID)
            with pytest.raises(ConnectionClosed):
                await client.recv()


async def ask(server: Node, port: int) -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(server.url, headers=server.headers(port), data=b"hi") as response,
    ):
        return response.status, (await response.json())["message"]


async def test_what_listens_nowhere_is_not_open(server: Node) -> None:
    assert await ask(server, 1) == (502, "The sandbox is running but port is not open")
    with pytest.raises(InvalidStatus) as closed:
        await connect(f"ws://127.0.0.1:{server.port}/", additional_headers=server.headers(1))
    assert b"port is not open" in (closed.value.response.body or b"")


async def test_without_the_token_there_is_no_tunnel(server: Node) -> None:
    app = Echo()
    async with guest(app) as port:
        server.fake.sandbox = sandbox(envd_access_token="another")
        status, message = await ask(server, port)
        assert status == 502
        assert "401" in message
    assert app.connections == 0


async def test_a_program_that_speaks_first_is_not_http(server: Node) -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await reader.read()

    async with guest(app) as port:
        assert (await ask(server, port))[0] == 502


@asynccontextmanager
async def other_envd(answer: bytes) -> AsyncIterator[Node]:
    """A node whose guest has something else in envd's place."""

    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await head(reader))
        writer.write(answer)
        await writer.drain()
        writer.close()

    seen: list[bytes] = []
    host = address()
    listener = await asyncio.start_server(app, host, ENVD_PORT)
    async with listener, node() as server:
        server.fake.host = host
        yield server
    assert b"x-access-token" not in seen[0], "the sandbox has no token"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", "port is not open"),
        (b"HTTP/1.1 502 Bad Gateway\r\n\r\n", "port is not open"),
        (b"", "port is not open"),
        (b"garbage\r\n\r\n", "port is not open"),
        (b"HTTP/1.1\r\n\r\n", "port is not open"),
        (b"x" * 40_000, "port is not open"),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", "without a response"),
    ],
    ids=["old", "refused", "nothing", "garbage", "no status", "endless", "failed"],
)
async def test_answers_of_envd(answer: bytes, words: str) -> None:
    async with other_envd(answer) as server:
        status, message = await ask(server, 1)
        assert status == 502
        assert words in message


async def test_nothing_is_left_open(server: Node, envd: Envd) -> None:
    before = envd.descriptors
    app = Echo()
    async with guest(app) as port, aiohttp.ClientSession() as session:
        async with session.post(server.url, headers=server.headers(port), data=pieces(2**16)) as response:
            await response.read()
        for _ in range(20):
            await ask(server, 1)
        server.app.proxy.drop(ID)
    await until(lambda: envd.descriptors <= before)
