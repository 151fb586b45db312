"""Firecracker's API: HTTP over its Unix socket, one request at a time, every one with a deadline.

The server is small (``micro_http``): it keeps connections open and always says how long an answer is. So is this
client: an HTTP library would take longer for a request than Firecracker does.
"""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from aenv.errors import VmmError
from aenv.vmm.firecracker.requests import Request

TIMEOUT = 30.0  # seconds for an ordinary request; 1 ms on an idle host
POLL = 0.002  # seconds between attempts to connect to a process that has just been started
LARGEST = 1 << 20  # bytes of an answer


class FirecrackerApiError(VmmError):
    """Firecracker refused a request; ``fault`` is what it says (``fault_message``)."""

    def __init__(self, request: Request, status: int, fault: str) -> None:
        super().__init__(f"Firecracker refused {request.method} {request.path} ({status}): {fault}")
        self.status = status
        self.fault = fault


class FirecrackerApi:
    """The API of one process. Connects when it is needed, and again when the connection is gone."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._link: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def ready(self, timeout: float) -> None:
        """Wait until a new process listens. Raises VmmError when it does not within ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout), self._turn:
                while self._link is None:
                    try:
                        await self._connect()
                    except (FileNotFoundError, ConnectionRefusedError):
                        await asyncio.sleep(POLL)
        except TimeoutError as error:
            raise VmmError(f"Firecracker did not listen on {self._socket} within {timeout:g} s.") from error
        except OSError as error:
            raise VmmError(f"Firecracker's socket {self._socket} cannot be used: {error}.") from error

    async def send(self, request: Request, timeout: float = TIMEOUT) -> Any:
        """The answer's JSON, or None. Raises FirecrackerApiError when refused, VmmError when there is no answer."""
        try:
            async with asyncio.timeout(timeout), self._turn:
                status, body = await self._exchange(request)
        except TimeoutError as error:
            message = f"Firecracker did not answer {request.method} {request.path} within {timeout:g} s."
            raise VmmError(message) from error
        except (OSError, ValueError, EOFError, asyncio.LimitOverrunError) as error:
            message = f"Firecracker gave no answer to {request.method} {request.path}: {error or 'it ended'}."
            raise VmmError(message) from error
        if status >= 300:
            fault = body.get("fault_message") if isinstance(body, dict) else None
            raise FirecrackerApiError(request, status, str(fault or body or "it does not say why"))
        return body

    async def send_all(self, requests: list[Request], timeout: float = TIMEOUT) -> None:
        """One after the other; the first error ends it."""
        for request in requests:
            await self.send(request, timeout)

    def close(self) -> None:
        """No request is sent any more; idempotent."""
        self._closed = True
        self._drop()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._closed:
            raise ConnectionError("the VM was taken down")
        self._link = await asyncio.open_unix_connection(str(self._socket), limit=LARGEST)
        return self._link

    async def _exchange(self, request: Request) -> tuple[int, Any]:
        content = b"" if request.body is None else json.dumps(request.body).encode()
        head = f"{request.method} {request.path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n"
        if content:
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        reader, writer = self._link or await self._connect()
        done = False
        try:
            writer.write(f"{head}\r\n".encode() + content)
            await writer.drain()
            answer = await _read(reader)
            done = True
            return answer
        finally:
            if not done:  # an answer that comes late would be taken for that of the next request
                self._drop()

    def _drop(self) -> None:
        if self._link is not None:
            with contextlib.suppress(RuntimeError):  # the loop is gone
                self._link[1].close()
            self._link = None


async def _read(reader: asyncio.StreamReader) -> tuple[int, Any]:
    """Status and body of one answer. Raises ValueError for anything that is none."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    protocol, _, rest = first.partition(" ")
    if not protocol.startswith("HTTP/1."):
        raise ValueError(f"this is no HTTP: {first[:80]!r}")
    status = int(rest.split(" ", 1)[0])
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    length = int(headers.get("content-length", "0"))
    if not 0 <= length <= LARGEST:
        raise ValueError(f"an answer of {length} bytes")
    content = await reader.readexactly(length)
    return status, json.loads(content) if content.strip() else None
