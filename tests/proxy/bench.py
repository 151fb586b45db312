"""What the proxy costs: ``python -m tests.proxy.bench``. Results and their reading: docs/internals/proxy.md.

Three processes on this machine: a guest that does as little as a server can, the node's server with the proxy, and
this one, which measures with blocking sockets and no HTTP library. Rounds through the proxy and directly alternate.
"""

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import httptools
import uvicorn
import uvloop

from aenv.api.app import create_app
from aenv.api.server import uvicorn_config
from aenv.config import Settings
from aenv.orchestrator.interface import Orchestrator
from tests.api.fakes import services
from tests.proxy.support import ID, FakeNode

SIZE = 100 * 2**20  # bytes of a large body
ANSWER = b'{"hello":"you"}'
_BLOCK = bytes(2**18)


class _Guest(asyncio.Protocol):
    """``/down`` streams SIZE bytes; anything else reads the body and gives a small answer."""

    def __init__(self) -> None:
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url = b""
        self._writable = asyncio.Event()
        self._writable.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_message_complete(self) -> None:
        if self._url == b"/down":
            task = asyncio.create_task(self._stream())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(ANSWER) + ANSWER)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def _stream(self) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % SIZE)
        for _ in range(SIZE // len(_BLOCK)):
            await self._writable.wait()
            self._transport.write(_BLOCK)


async def _serve_guest(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Guest, "127.0.0.1", port)
    await server.serve_forever()


async def _serve_proxy(port: int) -> None:
    settings = Settings.model_validate({"host": "127.0.0.1", "port": port})
    app = create_app(settings, cast(Orchestrator, FakeNode()), lambda _: False, services(""))
    await uvicorn.Server(uvicorn_config(app, settings)).serve()


def _connect(port: int) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            sock = socket.create_connection(("127.0.0.1", port))
            break
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _head(method: str, path: str, guest: int, length: int) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nhost: sandbox\r\nuser-agent: e2b-python-sdk/2.63\r\n"
        f"content-type: application/json\r\naccept: */*\r\nconnect-protocol-version: 1\r\nx-access-token: abcdef\r\n"
        f"e2b-sandbox-id: {ID}\r\ne2b-sandbox-port: {guest}\r\ncontent-length: {length}\r\n\r\n"
    ).encode()


def small_post(port: int, guest: int, count: int = 3000) -> list[float]:
    """Seconds of each of ``count`` round trips on one connection, sorted."""
    with _connect(port) as sock:
        request = _head("POST", "/process.Process/List", guest, 20) + b"x" * 20
        times = []
        for _ in range(count):
            start = time.perf_counter()
            sock.sendall(request)
            answer = b""
            while not answer.endswith(ANSWER):
                answer += sock.recv(65536)
            times.append(time.perf_counter() - start)
    return sorted(times[count // 10 :])


def download(port: int, guest: int) -> float:
    """MB/s of one large response."""
    buffer = bytearray(2**20)
    with _connect(port) as sock:
        start = time.perf_counter()
        sock.sendall(_head("GET", "/down", guest, 0))
        left = SIZE
        while left > 0:
            left -= sock.recv_into(buffer)
        return SIZE / 1e6 / (time.perf_counter() - start)


def upload(port: int, guest: int) -> float:
    """MB/s of one large request."""
    block = bytes(2**20)
    with _connect(port) as sock:
        start = time.perf_counter()
        sock.sendall(_head("POST", "/up", guest, SIZE))
        for _ in range(SIZE // len(block)):
            sock.sendall(block)
        sock.recv(65536)
        return SIZE / 1e6 / (time.perf_counter() - start)


def _cpu(pid: int) -> float:
    """Seconds of processor time a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    guest, proxy = 18081, 18080
    roles = [("guest", guest), ("proxy", proxy)]
    processes = [subprocess.Popen([sys.executable, "-m", "tests.proxy.bench", *map(str, role)]) for role in roles]
    try:
        for _ in range(3):
            direct, proxied = small_post(guest, guest), small_post(proxy, guest)
            print(f"small POST, median us: direct {statistics.median(direct) * 1e6:.0f}", end="")
            print(f", proxy {statistics.median(proxied) * 1e6:.0f}", end="")
            print(f"; p99: direct {direct[-len(direct) // 100] * 1e6:.0f}", end="")
            print(f", proxy {proxied[-len(proxied) // 100] * 1e6:.0f}")
        for name, measure in (("down", download), ("up", upload)):
            used = 0.0
            rates: tuple[list[float], list[float]] = ([], [])
            for _ in range(10):
                rates[0].append(measure(guest, guest))
                before = _cpu(processes[1].pid)
                rates[1].append(measure(proxy, guest))
                used += _cpu(processes[1].pid) - before
            print(f"100 MiB {name}, MB/s median (best): direct ", end="")
            print(f"{statistics.median(rates[0]):.0f} ({max(rates[0]):.0f})", end="")
            print(f", proxy {statistics.median(rates[1]):.0f} ({max(rates[1]):.0f})", end="")
            print(f"; proxy's processor time {used / (10 * SIZE / 1e9):.2f} s/GB; load {os.getloadavg()[0]:.1f}")
    finally:
        for process in processes:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        serve = _serve_guest if sys.argv[1] == "guest" else _serve_proxy
        uvloop.run(serve(int(sys.argv[2])))
    else:
        main()
