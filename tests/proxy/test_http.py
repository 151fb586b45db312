"""HTTP through the proxy over real sockets, with a scripted guest on the other side."""

import asyncio
import hashlib
import json
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator

import aiohttp
import pytest
from yarl import URL

from aenv.errors import CapacityError, ConflictError, SandboxStartError
from aenv.orchestrator.model import Upstream
from aenv.proxy.pool import SandboxPool
from tests.proxy.support import ID, Node, chunk, guest, head, node, sandbox, until

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def request_line(server: Node, port: int, method: str = "GET", path: str = "/", extra: str = "") -> bytes:
    routing = "".join(f"{name}: {value}\r\n" for name, value in server.headers(port).items())
    return f"{method} {path} HTTP/1.1\r\nhost: app.example\r\n{routing}{extra}\r\n".encode()


async def test_both_directions_stream_at_once() -> None:
    """The guest answers each chunk before the client sends the next: nothing is held back on either side."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        while data := await chunk(reader):
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with node() as server, guest(echo) as port:
        reader, writer = await server.connect()
        writer.write(request_line(server, port, "POST", extra="transfer-encoding: chunked\r\n"))
        assert (await head(reader)).startswith(b"HTTP/1.1 200")
        for number in range(20):
            data = b"message %d" % number
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))
            assert await chunk(reader) == data
        writer.write(b"0\r\n\r\n")
        assert await chunk(reader) == b""
        writer.close()


async def test_events_arrive_one_by_one() -> None:
    release = asyncio.Event()

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        for number in range(3):
            writer.write(b"data: %d\n\n" % number)
            await release.wait()
            release.clear()

    async with (
        node() as server,
        guest(events) as port,
        aiohttp.ClientSession() as session,
        session.get(server.url, headers=server.headers(port)) as response,
    ):
        assert response.headers["content-type"] == "text/event-stream"
        for number in range(3):
            assert await response.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
            release.set()
        assert await response.content.read() == b""


async def test_heads_pass_unchanged() -> None:
    seen = []

    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await head(reader))
        writer.write(
            b"HTTP/1.1 203 Custom\r\nSet-Cookie: a=1; Path=/\r\nset-cookie: b=\xfc\r\nContent-Encoding: gzip\r\n"
            b"Date: yesterday\r\nServer: guest\r\nConnection: keep-alive\r\nContent-Length: 4\r\n\r\n\x1f\x8bxx"
        )
        await reader.read()

    async with node() as server, guest(app) as port:
        reader, writer = await server.connect()
        writer.write(request_line(server, port, path="/a%2Fb/../c?x=%20&y", extra="x-odd: a\t\xe9\r\nx-odd: 2\r\n"))
        response = await head(reader)
        assert response.split(b"\r\n") == [
            b"HTTP/1.1 203 Non-Authoritative Information",
            b"set-cookie: a=1; Path=/",
            b"set-cookie: b=\xfc",
            b"content-encoding: gzip",
            b"date: yesterday",
            b"server: guest",
            b"content-length: 4",
            b"",
            b"",
        ]
        assert await reader.readexactly(4) == b"\x1f\x8bxx"
        lines = seen[0].split(b"\r\n")
        assert lines[:4] == [
            b"GET /a%2Fb/../c?x=%20&y HTTP/1.1",
            b"host: app.example",
            "x-odd: a\t\xe9".encode(),
            b"x-odd: 2",
        ]
        assert b"x-forwarded-for: 127.0.0.1" in lines
        assert b"x-forwarded-host: app.example" in lines
        writer.close()


@pytest.mark.parametrize("status", ["200 OK", "204 No Content", "304 Not Modified"])
async def test_responses_without_body(status: str) -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await head(reader)
            length = "" if status.startswith("204") else "content-length: 1000\r\n"
            writer.write(f"HTTP/1.1 {status}\r\netag: x\r\n{length}\r\n".encode())

    async with node() as server, guest(app) as port, aiohttp.ClientSession() as session:
        method = "HEAD" if status.startswith("200") else "GET"
        for _ in range(3):  # the connection stays in step
            async with session.request(method, server.url, headers=server.headers(port)) as response:
                assert response.status == int(status[:3])
                assert response.headers["etag"] == "x"
                assert await response.read() == b""


async def test_interim_responses_are_skipped_and_expect_is_answered() -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await head(reader)
        assert b"expect" not in request
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        body = await reader.readexactly(5)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n" + body)

    async with (
        node() as server,
        guest(app) as port,
        aiohttp.ClientSession() as session,
        session.post(server.url, headers=server.headers(port), data=b"hello", expect100=True) as response,
    ):
        assert await response.read() == b"hello"
        assert "link" not in response.headers


async def test_large_bodies_in_constant_memory() -> None:
    size, piece = 64 * 2**20, b"\xa5" * 2**18

    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        digest = hashlib.sha256()
        left = size
        while left:
            data = await reader.read(2**18)
            left -= len(data)
            digest.update(data)
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nx-digest: %s\r\n\r\n" % (size, digest.hexdigest().encode())
        )
        for _ in range(size // len(piece)):
            writer.write(piece)
            await writer.drain()

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size // len(piece)):
            yield piece

    async with node() as server, guest(app) as port, aiohttp.ClientSession() as session:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        headers = {**server.headers(port), "content-length": str(size)}
        async with session.post(server.url, headers=headers, data=body()) as response:
            got = hashlib.sha256()
            async for data in response.content.iter_any():
                got.update(data)
            assert got.hexdigest() == response.headers["x-digest"]
        # Client, proxy and guest are all in this process; none may hold a body.
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 24 * 1024


async def test_a_slow_client_slows_the_guest_down() -> None:
    sent = 0
    stalled = asyncio.Event()

    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1024):
            writer.write(bytes(2**18))
            try:
                async with asyncio.timeout(1):
                    await writer.drain()
            except TimeoutError:
                stalled.set()
                return
            sent += 2**18

    async with node() as server, guest(app) as port:
        reader, writer = await server.connect()
        writer.write(request_line(server, port))
        await head(reader)
        await asyncio.wait_for(stalled.wait(), 20)
        assert sent < 64 * 2**20  # kernel buffers and our marks, not 256 MiB
        writer.transport.abort()
        del reader


@pytest.mark.parametrize("with_body", [False, True])
async def test_client_disconnect_ends_the_guests_request(with_body: bool) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        started.set()
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass
        ended.set()

    async with node() as server, guest(app) as port:
        _, writer = await server.connect()
        extra = "transfer-encoding: chunked\r\n" if with_body else ""
        writer.write(request_line(server, port, "POST", extra=extra))
        await asyncio.wait_for(started.wait(), 10)
        writer.transport.abort()
        await asyncio.wait_for(ended.wait(), 10)


@pytest.mark.parametrize(
    "framing", [b"content-length: 100\r\n", b"transfer-encoding: chunked\r\n"], ids=["length", "chunked"]
)
async def test_a_broken_stream_looks_broken(framing: bytes) -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(
            b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n" + (b"5\r\n" if b"chunked" in framing else b"") + b"hello"
        )

    async with (
        node() as server,
        guest(app) as port,
        aiohttp.ClientSession() as session,
        session.get(server.url, headers=server.headers(port)) as response,
    ):
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.read()


async def test_a_body_that_ends_with_the_connection_is_complete() -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nold style")

    async with (
        node() as server,
        guest(app) as port,
        aiohttp.ClientSession() as session,
        session.get(server.url, headers=server.headers(port)) as response,
    ):
        assert await response.read() == b"old style"


async def test_an_early_answer_does_not_wait_for_the_upload() -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await reader.read()

    async with node() as server, guest(app) as port:
        reader, writer = await server.connect()
        writer.write(request_line(server, port, "POST", extra="content-length: 1000000\r\n") + bytes(1000))
        assert (await head(reader)).startswith(b"HTTP/1.1 413")
        writer.close()


class Counter:
    """A guest that answers ``requests`` requests per connection, then closes it without saying so before."""

    def __init__(self, requests: int) -> None:
        self.requests = requests
        self.connections = 0
        self.open: set[asyncio.StreamWriter] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open.add(writer)
        try:
            for _ in range(self.requests):
                request = await head(reader)
                if b"content-length: 2" in request:
                    await reader.readexactly(2)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
            await head(reader)  # swallow one more request and hang up on it
        finally:
            self.open.discard(writer)


async def test_connections_are_reused() -> None:
    app = Counter(100)
    async with node() as server, guest(app) as port, aiohttp.ClientSession() as session:
        for _ in range(20):
            async with session.post(server.url, headers=server.headers(port), data=b"hi") as response:
                assert await response.read() == b"ok"
        assert app.connections == 1


async def test_a_stale_connection_is_replaced_for_get_but_a_post_is_not_sent_twice() -> None:
    app = Counter(1)
    async with node() as server, guest(app) as port, aiohttp.ClientSession() as session:
        for _ in range(5):
            async with session.get(server.url, headers=server.headers(port)) as response:
                assert await response.read() == b"ok"
        assert app.connections == 5
        async with session.put(server.url, headers=server.headers(port), data=b"hi") as response:
            assert await response.read() == b"ok"
        assert app.connections == 6
        async with session.post(server.url, headers=server.headers(port), data=b"hi") as response:
            assert response.status == 502
            assert "without a response" in (await response.json())["message"]


async def test_a_connection_that_the_guest_closed_is_not_picked() -> None:
    """Not even when the event loop has had no chance yet to notice the close."""
    listener = socket.create_server(("127.0.0.1", 0))
    hang_up = threading.Event()

    def serve() -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                hang_up.wait()

    thread = threading.Thread(target=serve)
    thread.start()
    pool = SandboxPool(Upstream(sandbox(), "127.0.0.1", 1))
    port = listener.getsockname()[1]
    first, _ = await pool.acquire(port)
    first.start(b"POST / HTTP/1.1\r\n\r\n", head=False)
    first.upload_done = True
    assert (await first.response())[0] == 200
    assert not first.stale
    pool.release(first)
    assert await pool.acquire(port) == (first, True)
    pool.release(first)
    hang_up.set()
    while not first.stale:
        time.sleep(0.001)  # noqa: ASYNC251 - the event loop is to notice nothing
    assert not first.closed
    second, reused = await pool.acquire(port)
    assert second is not first
    assert not reused
    second.start(b"POST / HTTP/1.1\r\n\r\n", head=False)
    assert (await second.response())[0] == 200
    pool.close()
    await asyncio.to_thread(thread.join)
    listener.close()


async def test_connections_of_an_earlier_life_are_cut() -> None:
    app = Counter(100)
    async with node() as server, guest(app) as port, aiohttp.ClientSession() as session:
        async with session.get(server.url, headers=server.headers(port)) as response:
            await response.read()
        server.fake.generation += 1
        async with session.get(server.url, headers=server.headers(port)) as response:
            await response.read()
        assert app.connections == 2
        await until(lambda: len(app.open) == 1)


async def test_dropping_a_sandbox_breaks_its_streams() -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n")
        await reader.read()

    async with (
        node() as server,
        guest(app) as port,
        aiohttp.ClientSession() as session,
        session.get(server.url, headers=server.headers(port)) as response,
    ):
        assert await response.content.readexactly(5) == b"hello"
        server.app.proxy.drop(ID)
        with pytest.raises(aiohttp.ClientPayloadError):
            await response.content.read()


async def test_garbage_from_the_guest_is_a_502() -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        await reader.read()

    async with (
        node() as server,
        guest(app) as port,
        aiohttp.ClientSession() as session,
        session.get(server.url, headers=server.headers(port)) as response,
    ):
        assert response.status == 502


@pytest.mark.parametrize("line", [b"x-%06d: " + b"v" * 100 + b"\r\n", b"endless%06d"], ids=["many", "one"])
async def test_the_guest_cannot_send_an_endless_head(line: bytes) -> None:
    async def app(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nx-first: ")
        for number in range(10**6):
            writer.write(line % number)
            await writer.drain()

    async with (
        node() as server,
        guest(app) as port,
        aiohttp.ClientSession() as session,
        session.get(server.url, headers=server.headers(port)) as response,
    ):
        assert response.status == 502


@pytest.mark.parametrize("line", [b"x-%06d: " + b"v" * 100 + b"\r\n", b"endless%06d"], ids=["many", "one"])
async def test_a_client_cannot_send_an_endless_head(line: bytes) -> None:
    async with node() as server:
        reader, writer = await server.connect()
        writer.write(b"GET /health HTTP/1.1\r\nx-first: ")
        try:
            for number in range(10**5):
                writer.write(line % number)
                await writer.drain()
            assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        except ConnectionError:
            pass  # closed while we were still sending
        writer.transport.abort()


async def test_proxy_errors_have_e2b_shapes() -> None:
    async with node() as server, guest(Counter(9)) as port, aiohttp.ClientSession() as session:

        async def ask(**changes: str) -> tuple[int, dict[str, object]]:
            headers = {**server.headers(port), **changes}
            async with session.get(server.url, headers=headers) as response:
                return response.status, json.loads(await response.read())

        assert await ask(**{"e2b-sandbox-id": "nosuch"}) == (
            502,
            {"sandboxId": "nosuch", "message": "The sandbox was not found", "code": 502},
        )
        assert (await ask(**{"e2b-sandbox-id": "a/../b"}))[0] == 502
        assert (await ask(**{"e2b-sandbox-port": "http"}))[0] == 400
        assert await ask(**{"e2b-sandbox-port": "1"}) == (
            502,
            {"sandboxId": ID, "message": "The sandbox is running but port is not open", "port": 1, "code": 502},
        )
        server.fake.error = ConflictError("paused")
        status, body = await ask()
        assert status == 502
        assert "was not found" in str(body["message"])
        server.fake.error = CapacityError("full")
        assert (await ask())[0] == 503
        server.fake.error = SandboxStartError("guest did not answer")
        status, body = await ask()
        assert status == 502
        assert "guest did not answer" in str(body["message"])
        server.fake.error = RuntimeError("secret detail")
        status, body = await ask()
        assert status == 500
        assert "secret" not in str(body)
        async with session.get(server.url, headers={**server.headers(port), "accept": "text/html,*/*"}) as response:
            assert response.content_type == "text/html"


async def test_access_rules() -> None:
    async with node() as server, guest(Counter(9)) as port, aiohttp.ClientSession() as session:
        for path in ("/init", "/tunnel?port=22", "/x/../TUNNEL/", "/%2574unnel"):
            url = URL(server.url + path, encoded=True)
            async with session.post(url, headers=server.headers(49983)) as response:
                assert response.status == 403
        server.fake.sandbox = sandbox(traffic_access_token="t0ken")
        async with session.get(server.url, headers=server.headers(port)) as response:
            assert response.status == 403
        headers = {**server.headers(port), "e2b-traffic-access-token": "t0ken"}
        async with session.get(server.url, headers=headers) as response:
            assert response.status == 200


async def test_host_and_path_routing_reach_the_guest() -> None:
    async with node() as server, guest(Counter(9)) as port, aiohttp.ClientSession() as session:
        async with session.get(server.url + "/x", headers={"host": f"{port}-{ID}.sandbox.test"}) as response:
            assert await response.read() == b"ok"
        async with session.get(f"{server.url}/proxy/{ID}/{port}/x") as response:
            assert await response.read() == b"ok"
        async with session.get(server.url + "/health") as response:
            assert response.status == 204
