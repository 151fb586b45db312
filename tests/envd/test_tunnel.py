"""`/tunnel`: a raw connection to a program on the guest's loopback."""

from __future__ import annotations

import json
import socket
import struct
import threading

import pytest

from tests.envd.daemon import Envd, wait_until

UPGRADE = {"Connection": "upgrade", "Upgrade": "tcp"}


def opened(envd: Envd, port: int, *, early: bytes = b"", token: str | None = None) -> tuple[bytes, socket.socket]:
    """The head of the answer, and the connection."""
    access = f"X-Access-Token: {token}\r\n" if token else ""
    connection = socket.create_connection((envd.host, envd.port), timeout=30)
    request = f"GET /tunnel?port={port} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: TCP\r\n{access}\r\n"
    connection.sendall(request.encode() + early)
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = connection.recv(1)
        assert data, head
        head += data
    return head, connection


@pytest.fixture
def listener() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(30)
    return listener


def test_both_directions_and_half_closes(envd: Envd, listener: socket.socket) -> None:
    before = envd.descriptors
    head, connection = opened(envd, listener.getsockname()[1], early=b"early ")
    assert head.startswith(b"HTTP/1.1 101 ") and b"\r\nupgrade: tcp\r\n" in head
    program, _ = listener.accept()
    size = 32 << 20
    with connection, program:
        connection.sendall(b"hello")
        assert program.recv(11, socket.MSG_WAITALL) == b"early hello"

        def send() -> None:
            program.sendall(bytes(size))
            program.shutdown(socket.SHUT_WR)

        sender = threading.Thread(target=send)
        sender.start()
        got = 0
        while data := connection.recv(1 << 20):
            got += len(data)
        sender.join()
        assert got == size, "all of it, then the program's half-close"
        connection.sendall(b" and after")
        connection.shutdown(socket.SHUT_WR)
        rest = b""
        while data := program.recv(1 << 20):
            rest += data
        assert rest == b" and after"
    wait_until(lambda: envd.descriptors <= before, "the end of the tunnel")
    listener.close()


def test_resets_pass(envd: Envd, listener: socket.socket) -> None:
    for from_program in (True, False):
        _, connection = opened(envd, listener.getsockname()[1])
        program, _ = listener.accept()
        broken, other = (program, connection) if from_program else (connection, program)
        other.settimeout(30)
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        broken.close()
        with other, pytest.raises(ConnectionResetError):
            other.recv(1)
    listener.close()


def test_refusals(fresh: Envd, listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    assert fresh.request("GET", f"/tunnel?port={port}").status == 426
    assert fresh.request("POST", f"/tunnel?port={port}", headers=UPGRADE).status == 405
    for bad in ("", "?port=0", "?port=65536", "?port=http", "?port="):
        assert fresh.request("GET", f"/tunnel{bad}", headers=UPGRADE).status == 400
    with socket.create_server(("127.0.0.1", 0)) as closing:
        closed = closing.getsockname()[1]
    refused = fresh.request("GET", f"/tunnel?port={closed}", headers=UPGRADE)
    assert (refused.status, refused.json()["message"]) == (502, f"port {closed}: connection refused")
    assert fresh.request("POST", "/init", json.dumps({"accessToken": "secret"})).status == 204
    assert fresh.request("GET", f"/tunnel?port={port}", headers=UPGRADE).status == 401
    head, connection = opened(fresh, port, token="secret")
    assert head.startswith(b"HTTP/1.1 101 ")
    connection.close()
    listener.close()
