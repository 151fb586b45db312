"""Connections to ports of a guest: straight, or through envd to what listens on the guest's loopback only.

Many development servers bind 127.0.0.1. The guest's address refuses their port, and only then envd is asked for a
connection from inside (``/tunnel``); what it hands over is an ordinary TCP connection to the program.
"""

import asyncio
import re
import socket
from collections.abc import Callable
from typing import TypeVar

from aenv.proxy.routing import ENVD_PORT
from aenv.proxy.upstream import CONNECT_TIMEOUT, ConnectError

_MAX_HEAD = 16 * 1024  # bytes of envd's answer

P = TypeVar("P", bound=asyncio.BaseProtocol)


async def dial(factory: Callable[[], P], host: str, port: int, token: str | None) -> P:
    """A protocol of ``factory``, connected to ``port``; ``token`` is envd's. Raises ConnectError."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            try:
                return await _straight(factory, host, port)
            except ConnectError as error:
                if not error.refused or port == ENVD_PORT:
                    raise
            return await _inside(factory, host, port, token)
    except TimeoutError:
        raise ConnectError(f"no answer from port {port} in {CONNECT_TIMEOUT:.0f} s", refused=False) from None


async def _straight(factory: Callable[[], P], host: str, port: int) -> P:
    try:
        _, protocol = await asyncio.get_running_loop().create_connection(factory, host, port)
    except OSError as error:
        raise ConnectError(str(error), refused=isinstance(error, ConnectionError)) from None
    return protocol


async def _inside(factory: Callable[[], P], host: str, port: int, token: str | None) -> P:
    loop = asyncio.get_running_loop()
    # With the protocol named, asyncio turns Nagle's algorithm off.
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        connection.setblocking(False)
        try:
            await loop.sock_connect(connection, (host, ENVD_PORT))
            await loop.sock_sendall(connection, _request(host, port, token))
            status = await _status(connection)
        except OSError as error:
            # The port was refused; that envd does not answer either does not change it.
            raise ConnectError(f"no tunnel to port {port}: {error}", refused=True) from None
        if status != 101:
            # 502: refused inside the guest too. 404: an envd without tunnels, of an old snapshot.
            raise ConnectError(f"envd answered {status} for port {port}", refused=status in (404, 502))
        _, protocol = await loop.create_connection(factory, sock=connection)
    except BaseException:
        connection.close()
        raise
    return protocol


def _request(host: str, port: int, token: str | None) -> bytes:
    access = f"x-access-token: {token}\r\n" if token else ""
    head = f"GET /tunnel?port={port} HTTP/1.1\r\nhost: {host}\r\nconnection: upgrade\r\nupgrade: tcp\r\n{access}\r\n"
    return head.encode()


async def _status(connection: socket.socket) -> int:
    """The status of envd's answer, whose head is all that is read: what follows is the program's. Raises OSError."""
    loop = asyncio.get_running_loop()
    seen = b""
    while b"\r\n\r\n" not in seen:
        data = await loop.sock_recv(connection, _MAX_HEAD)
        seen += data
        if not data or len(seen) > _MAX_HEAD:
            raise ConnectionError("not an answer of envd")
    head, _, rest = seen.partition(b"\r\n\r\n")
    line = re.match(rb"HTTP/1\.[01] ([0-9]{3})\b", head)
    if line is None:
        raise ConnectionError("not an answer of envd")
    status = int(line[1])
    if status == 101 and rest:
        # HTTP servers wait to be asked.
        raise ConnectError("the program spoke first, so it is not an HTTP server", refused=False)
    return status
