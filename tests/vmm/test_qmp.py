"""QMP: the parser byte by byte, the client against a scripted server."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import VmmError
from aenv.vmm.qmp import Parser, QmpClient, QmpCommandError, encode

GREETING = b'{"QMP": {"version": {}, "capabilities": []}}\r\n'
Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3)), st.integers(1, 7))
def test_messages_survive_any_split(messages: list[dict[str, int]], step: int) -> None:
    wire = b"".join(json.dumps(m).encode() + b"\r\n" for m in messages)
    parser = Parser()
    out = [m for at in range(0, len(wire), step) for m in parser.feed(wire[at : at + step])]
    assert out == messages


@given(st.binary(max_size=60))
def test_junk_is_a_vmm_error(junk: bytes) -> None:
    with suppress(VmmError):
        assert all(isinstance(message, dict) for message in Parser().feed(junk + b"\n"))


def test_an_endless_line_is_an_error() -> None:
    parser = Parser()
    with pytest.raises(VmmError, match="longer"):
        for _ in range(20):
            parser.feed(b"x" * (1 << 20))


def test_encoding() -> None:
    assert encode("stop", None, 3) == b'{"execute":"stop","id":3}\n'
    assert json.loads(encode("x", {"a": "\n"}, 4))["arguments"] == {"a": "\n"}


@asynccontextmanager
async def qemu(tmp_path: Path, answer: Answer, greeting: bytes = GREETING) -> AsyncIterator[Path]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        while line := await reader.readline():
            await answer(json.loads(line), writer)
        writer.close()

    path = tmp_path / "qmp.sock"
    server = await asyncio.start_unix_server(serve, path)
    yield path
    server.close()


def reply(writer: asyncio.StreamWriter, **message: Any) -> None:
    writer.write(json.dumps(message).encode() + b"\r\n")


async def test_commands_events_and_errors(tmp_path: Path) -> None:
    async def answer(message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if message["execute"] == "bad":
            reply(writer, id=message["id"], error={"class": "GenericError", "desc": "no"})
        else:
            reply(writer, event="STOP", data={"n": message["id"]}, timestamp={})
            reply(writer, **{"id": message["id"], "return": message["execute"]})

    async with qemu(tmp_path, answer) as path:
        client = await QmpClient.connect(path)
        events: list[str] = []
        end = client.subscribe(lambda name, _: events.append(name))
        waiting = client.expect("STOP", lambda data: data["n"] > 2)
        assert await asyncio.gather(*(client.execute(f"c{i}") for i in range(5))) == [f"c{i}" for i in range(5)]
        assert (await waiting)["n"] > 2
        assert events == ["STOP"] * 5
        end()
        with pytest.raises(QmpCommandError) as caught:
            await client.execute("bad")
        assert (caught.value.qmp_class, caught.value.description) == ("GenericError", "no")
        client.close()
        assert not client.connected
        with pytest.raises(VmmError, match="gone"):
            await client.execute("late")


async def test_a_lost_connection_fails_everything_at_once(tmp_path: Path) -> None:
    async def answer(message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if message["execute"] == "die":
            writer.close()
        elif message["execute"] == "qmp_capabilities":
            reply(writer, **{"id": message["id"], "return": {}})

    async with qemu(tmp_path, answer) as path:
        client = await QmpClient.connect(path)
        event = client.expect("NEVER", lambda _: True)
        results = await asyncio.wait_for(
            asyncio.gather(client.execute("a"), client.execute("die"), event, return_exceptions=True), 5
        )
        assert all(isinstance(result, VmmError) for result in results)


async def test_a_silent_server_runs_into_the_deadline(tmp_path: Path) -> None:
    async def answer(message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if message["execute"] == "qmp_capabilities":
            reply(writer, **{"id": message["id"], "return": {}})

    async with qemu(tmp_path, answer) as path:
        client = await QmpClient.connect(path)
        with pytest.raises(VmmError, match=r"within 0\.05 s"):
            await client.execute("slow", timeout=0.05)
        client.close()


async def test_a_server_that_never_greets(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(1)
        with pytest.raises(VmmError, match="greeting"):
            await QmpClient.connect(tmp_path / "s", timeout=0.05)
    with pytest.raises(VmmError, match="reached"):
        await QmpClient.connect(tmp_path / "s", timeout=0.05)


async def test_a_connection_that_was_made_by_others() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    theirs.sendall(b'{"QMP": {}}\r\n{"return": {}, "id": 1}\r\n')
    client = await QmpClient.over(ours, timeout=5)
    assert b"qmp_capabilities" in theirs.recv(4096)
    theirs.close()
    with pytest.raises(VmmError, match="gone"):
        await client.execute("late")
    dead, end = socket.socketpair(socket.AF_UNIX)
    end.close()
    with pytest.raises(VmmError, match="gone"):
        await QmpClient.over(dead, timeout=5)


async def test_nonsense_from_the_server(tmp_path: Path) -> None:
    async def answer(message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"segmentation fault\n")

    async with qemu(tmp_path, answer) as path:
        with pytest.raises(VmmError, match="not JSON"):
            await QmpClient.connect(path)
