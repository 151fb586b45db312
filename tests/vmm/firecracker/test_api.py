"""The client of Firecracker's API against a server that answers what a test tells it to."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.vmm.firecracker.api import FirecrackerApi, FirecrackerApiError
from aenv.vmm.firecracker.requests import Request

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
GET = Request("GET", "/")
PUT = Request("PUT", "/thing", {"a": 1})


def answer(status: int, body: str = "", extra: str = "") -> bytes:
    head = f"HTTP/1.1 {status} Word\r\nServer: Firecracker API\r\nConnection: keep-alive\r\n{extra}"
    return f"{head}Content-Length: {len(body.encode())}\r\n\r\n{body}".encode()


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length")]
    return head, await reader.readexactly(int(length[0]) if length else 0)


@asynccontextmanager
async def serving(path: Path, handler: Handler) -> AsyncIterator[FirecrackerApi]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(handle, str(path))
    api = FirecrackerApi(path)
    try:
        yield api
    finally:
        api.close()
        server.close()
        await server.wait_closed()


def saying(*answers: bytes) -> Handler:
    """One connection, in which each request gets the next answer; then it is closed."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for content in answers:
            await read_request(reader)
            writer.write(content)
            await writer.drain()

    return handle


async def test_requests_go_one_after_the_other_over_one_connection(tmp_path: Path) -> None:
    seen: list[tuple[str, bytes]] = []
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            seen.append(await read_request(reader))
            writer.write(answer(200, '{"state": "Running"}') if seen[-1][0].startswith("GET") else answer(204))

    async with serving(tmp_path / "s", handle) as api:
        assert await api.send(GET) == {"state": "Running"}
        assert await asyncio.gather(*(api.send(PUT) for _ in range(5))) == [None] * 5
        await api.send_all([PUT, PUT])
    assert connections == 1
    assert [head.split(" HTTP")[0] for head, _ in seen] == ["GET /"] + ["PUT /thing"] * 7
    assert json.loads(seen[1][1]) == {"a": 1}
    assert seen[0][1] == b""


async def test_a_refusal_carries_firecrackers_words(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", saying(answer(400, '{"fault_message": "no such thing"}'), answer(204))) as api:
        with pytest.raises(FirecrackerApiError, match=r"PUT /thing \(400\): no such thing") as caught:
            await api.send(PUT)
        assert (caught.value.status, caught.value.fault) == (400, "no such thing")
        assert await api.send(PUT) is None, "the connection is as good as before"


async def test_the_first_refusal_ends_a_sequence(tmp_path: Path) -> None:
    refusals = answer(204), answer(500, '{"fault_message": "second"}'), answer(204)
    async with serving(tmp_path / "s", saying(*refusals)) as api:
        with pytest.raises(FirecrackerApiError, match="second"):
            await api.send_all([PUT, PUT, PUT])


@pytest.mark.parametrize("content", [
    b"", b"nonsense\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
    answer(200, "{not json"), b"HTTP/1.1 200 OK\r\n" + b"x" * (3 << 20),
])  # fmt: skip
async def test_what_is_no_answer_is_an_error(tmp_path: Path, content: bytes) -> None:
    async with serving(tmp_path / "s", saying(content)) as api:
        with pytest.raises(VmmError, match="no answer to PUT /thing"):
            await api.send(PUT, 10)


async def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(tmp_path: Path) -> None:
    release = asyncio.Event()
    connections = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        first = connections == 1
        while True:
            await read_request(reader)
            if first:
                await release.wait()
            writer.write(answer(200, f'{{"from": {connections}}}'))

    async with serving(tmp_path / "s", handle) as api:
        with pytest.raises(VmmError, match=r"within 0\.05 s"):
            await api.send(GET, 0.05)
        release.set()
        assert await api.send(GET) == {"from": 2}


async def test_a_connection_that_ended_is_made_again(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", saying(answer(204))) as api:
        await api.send(PUT)
        with pytest.raises(VmmError, match="no answer"):
            await api.send(PUT)
        assert await api.send(PUT) is None


async def test_a_new_process_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "s"
    api = FirecrackerApi(path)
    waiting = asyncio.create_task(api.ready(30))
    await asyncio.sleep(0)
    async with serving(path, saying(answer(204))) as other:
        await waiting
        assert await api.send(PUT) is None
        api.close()
        other.close()


async def test_a_process_that_never_listens_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="did not listen"):
        await FirecrackerApi(tmp_path / "s").ready(0.05)


async def test_a_closed_client_asks_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path / "s", saying(answer(204))) as api:
        api.close()
        api.close()
        with pytest.raises(VmmError, match="taken down"):
            await api.send(PUT)
