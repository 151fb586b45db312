"""A real server with the proxy in front of scripted guests, all in the test's event loop on 127.0.0.1."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import cast

import uvicorn

from aenv.api.app import Application, create_app
from aenv.api.server import uvicorn_config
from aenv.config import Settings
from aenv.errors import SandboxNotFoundError
from aenv.orchestrator.interface import Orchestrator
from aenv.orchestrator.model import Sandbox, Upstream
from tests.api.fakes import services
from tests.orchestrator.samples import sandbox as sample

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
ID = "abcdefghij0123456789"


def sandbox(sandbox_id: str = ID, **changes: object) -> Sandbox:
    now = datetime.now(UTC)
    made = sample(
        sandbox_id,
        template_id="tmpl0000000000000000",
        started_at=now,
        end_at=now + timedelta(seconds=300),
        timeout=300,
        envd_version="0.5.0",
        snapshot_id=None,
        disk=None,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


class FakeNode:
    """The one method of the orchestrator that the proxy calls; everything in it may be changed by the test."""

    def __init__(self) -> None:
        self.sandbox = sandbox()
        self.host = "127.0.0.1"
        self.generation = 1
        self.error: Exception | None = None

    async def upstream(self, sandbox_id: str) -> Upstream:
        if self.error is not None:
            raise self.error
        if sandbox_id != self.sandbox.id:
            raise SandboxNotFoundError(sandbox_id)
        return Upstream(self.sandbox, self.host, self.generation)


class Node:
    """A running server."""

    def __init__(self, fake: FakeNode, app: Application, port: int) -> None:
        self.fake = fake
        self.app = app
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def headers(self, port: int) -> dict[str, str]:
        return {"e2b-sandbox-id": self.fake.sandbox.id, "e2b-sandbox-port": str(port)}

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=2**20)


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    fake = FakeNode()
    settings = Settings.model_validate({"domain": "sandbox.test"})
    app = create_app(settings, cast(Orchestrator, fake), lambda key: key == "secret", services("secret"))
    async with serving(app, settings) as port:
        yield Node(fake, app, port)


@asynccontextmanager
async def serving(app: Application, settings: Settings) -> AsyncIterator[int]:
    """Serve ``app`` as the program does, on a free port."""
    # With the protocol named, asyncio turns Nagle's algorithm off, as it does on sockets it binds itself.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, settings, grace=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@asynccontextmanager
async def guest(handler: Handler) -> AsyncIterator[int]:
    """A raw TCP server in the guest's place; yields its port. Connections are closed when the handler returns."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await handler(reader, writer)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**20)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def head(reader: asyncio.StreamReader) -> bytes:
    """A message's head, up to and with its empty line."""
    return await reader.readuntil(b"\r\n\r\n")


async def chunk(reader: asyncio.StreamReader) -> bytes:
    """One chunk of a chunked body; empty at its end."""
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size + 2)
    return data[:-2]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - conditions of foreign objects have no event
            await asyncio.sleep(0.002)
