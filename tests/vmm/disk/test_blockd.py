"""The control connection to ``aenv-blockd``, and syncing a device, without either."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from aenv.errors import CapacityError, VmmError
from aenv.vmm.disk import block_device
from aenv.vmm.disk.block_device import sync_device
from aenv.vmm.disk.blockd import BlockdClient, BlockdRefusedError

Answer = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]
Connect = Callable[[Answer], Awaitable[BlockdClient]]


@pytest.fixture
async def connect(tmp_path: Path) -> AsyncIterator[Connect]:
    """Connects to a daemon that answers as the test says."""
    servers: list[asyncio.Server] = []
    clients: list[BlockdClient] = []

    async def made(answer: Answer) -> BlockdClient:
        async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                await answer(json.loads(line), writer)
            writer.close()

        servers.append(await asyncio.start_unix_server(converse, tmp_path / "sock"))
        clients.append(await BlockdClient.connect(tmp_path / "sock"))
        return clients[-1]

    yield made
    for client in clients:
        client.close()
    for server in servers:
        server.close()


async def test_answers_and_refusals(connect: Connect) -> None:
    async def answer(command: dict[str, object], writer: asyncio.StreamWriter) -> None:
        said = {"ok": True, "echo": command["n"]} if command["n"] else {"error": "no"}
        writer.write(json.dumps(said).encode() + b"\n")

    client = await connect(answer)
    many = await asyncio.gather(*(client.ask({"do": "status", "n": n}) for n in range(1, 20)))
    assert [one["echo"] for one in many] == list(range(1, 20))
    with pytest.raises(BlockdRefusedError, match="refused status: no"):
        await client.ask({"do": "status", "n": 0})
    assert client.connected


async def test_a_daemon_that_ends_or_talks_nonsense_is_an_error(connect: Connect) -> None:
    async def end(command: dict[str, object], writer: asyncio.StreamWriter) -> None:
        if command["do"] == "nonsense":
            writer.write(b"}{\n")
        else:
            writer.close()

    for do in ("rebase", "nonsense"):
        client = await connect(end)
        with pytest.raises(VmmError, match=do):
            await client.ask({"do": do})
        assert not client.connected


async def test_a_silent_daemon_is_an_error_and_a_late_answer_is_not_taken_for_another(connect: Connect) -> None:
    async def silent(command: dict[str, object], writer: asyncio.StreamWriter) -> None:
        pass

    client = await connect(silent)
    with pytest.raises(VmmError, match=r"did not answer status within 0\.01 s"):
        await client.ask({"do": "status"}, 0.01)
    assert not client.connected


async def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="cannot be reached"):
        await BlockdClient.connect(tmp_path / "sock")


async def test_syncing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never() -> bool:
        return False

    async def full() -> bool:
        return True

    (tmp_path / "disk").touch()
    await sync_device(tmp_path / "disk", never)
    with pytest.raises(VmmError, match="cannot be synced"):
        await sync_device(tmp_path / "missing", never)
    hold = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(block_device, "LOOK", 0.01)
    waiting = asyncio.run_coroutine_threadsafe
    monkeypatch.setattr(os, "fsync", lambda fd: waiting(hold.wait(), loop).result())
    try:
        with pytest.raises(CapacityError, match="No room left"):
            await sync_device(tmp_path / "disk", full)
    finally:
        hold.set()
