"""A connection carries the next request whatever became of the one before: bodies are read to their end."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.envd.daemon import Envd, Reply, basic, envelope, wait_until

JSON = {"Content-Type": "application/json"}
STREAM = {"Content-Type": "application/connect+json", **basic("root")}
LAST = b"0\r\n\r\n"


class Wire:
    """One connection, on which the parts of a request are sent at the test's own pace."""

    def __init__(self, envd: Envd) -> None:
        self.socket = socket.create_connection(("127.0.0.1", envd.port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self.socket.sendall(f"{method} {path} HTTP/1.1\r\nHost: envd\r\n{lines}\r\n".encode())

    def begin_chunked(self, path: str, headers: Mapping[str, str], data: bytes) -> None:
        """A request with all of its body but the last chunk."""
        self.begin("POST", path, {**headers, "Transfer-Encoding": "chunked"})
        self.socket.sendall(b"%x\r\n%s\r\n" % (len(data), data))

    def reply(self) -> Reply:
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        reply = Reply(response.status, headers, response.read())
        response.close()
        return reply

    def alive(self) -> bool:
        """Whether the connection carries one more request, a call that is not idempotent."""
        self.begin("POST", "/process.Process/List", {**JSON, "Content-Length": "2"})
        self.socket.sendall(b"{}")
        return self.reply().status == 200

    def close(self) -> None:
        self.socket.close()


@contextmanager
def wire(envd: Envd) -> Iterator[Wire]:
    opened = Wire(envd)
    try:
        yield opened
    finally:
        opened.close()


def start(cmd: str, *args: str) -> bytes:
    return envelope(json.dumps({"process": {"cmd": cmd, "args": args}, "stdin": False}).encode())


WHOLE = {
    "unary": ("/filesystem.Filesystem/Stat", JSON, b'{"path": "/etc/passwd"}', 200),
    "failed unary": ("/filesystem.Filesystem/Stat", JSON, b'{"path": "/no/such"}', 404),
    "invalid unary": ("/process.Process/List", JSON, b"[", 400),
    "client stream": (
        "/process.Process/StreamInput",
        STREAM,
        envelope(b'{"start": {"process": {"pid": 1}}}'),
        200,
    ),
    "upload": ("/files?path=/tmp/envd-keepalive&username=root", {}, b"data", 200),
    "upload to a directory": ("/files?path=/tmp&username=root", {}, b"data", 400),
    "compose": ("/files/compose", JSON, b"{}", 400),
    "init": ("/init", JSON, b"{", 400),
}
EARLY = {
    "server stream": ("/process.Process/Start", STREAM, start("/bin/true"), 200),
    "failed server stream": ("/process.Process/Start", STREAM, start("/no/such/program"), 200),
    "broken message": ("/process.Process/Start", STREAM, envelope(b"{"), 200),
    "too large a message": ("/process.Process/Start", STREAM, b"\x00\xff\xff\xff\xff", 200),
    "messages too many": ("/process.Process/Start", STREAM, start("/bin/true") * 3, 200),
    "client stream without its process": (
        "/process.Process/StreamInput",
        STREAM,
        envelope(b'{"start": {"process": {"pid": 1}}}'),
        200,
    ),
    "unknown media type": ("/process.Process/List", {"Content-Type": "text/plain"}, b"{}", 415),
    "unknown media type of a stream": ("/process.Process/Start", JSON, b"{}", 415),
    "unknown method": ("/process.Process/Nothing", JSON, b"{}", 501),
    "unknown endpoint": ("/nothing", {}, b"data", 404),
    "method not allowed": ("/metrics", {}, b"data", 405),
    "control endpoint": ("/collapse", {}, b"data", 501),
    "upload without a path": ("/files", {}, b"data", 400),
    "upload for nobody": ("/files?path=/tmp/x&username=no-such-user", {}, b"data", 401),
    "upload in a strange coding": ("/files?path=/tmp/x", {"Content-Encoding": "br"}, b"data", 400),
    "upload with bad metadata": ("/files?path=/tmp/x", {"X-Metadata-A": "é"}, b"data", 400),
    "upload of a broken form": (
        "/files",
        {"Content-Type": "multipart/form-data; boundary=B"},
        b"--Bx\r\n",
        400,
    ),
}


@pytest.mark.parametrize("case", [*WHOLE, *EARLY])
def test_a_late_last_chunk(envd: Envd, case: str) -> None:
    path, headers, body, status = {**WHOLE, **EARLY}[case]
    with wire(envd) as one:
        for _ in range(3):
            one.begin_chunked(path, headers, body)
            time.sleep(0.03)
            one.socket.sendall(LAST)
            reply = one.reply()
            assert reply.status == status, reply.body
            assert "connection" not in reply.headers
            assert one.alive()


@pytest.mark.parametrize("case", EARLY)
def test_a_last_chunk_after_the_whole_answer(envd: Envd, case: str) -> None:
    path, headers, body, status = EARLY[case]
    with wire(envd) as one:
        for _ in range(3):
            one.begin_chunked(path, headers, body)
            assert one.reply().status == status
            one.socket.sendall(b"5\r\nstray\r\n" + LAST)
            assert one.alive()


def test_refused_for_its_token(fresh: Envd) -> None:
    assert fresh.request("POST", "/init", json.dumps({"accessToken": "secret"})).status == 204
    with wire(fresh) as one:
        for path in ("/process.Process/List", "/files?path=/tmp/x", "/init"):
            one.begin_chunked(path, JSON, b"{}")
            assert one.reply().status == 401
            one.socket.sendall(LAST)
        one.begin("POST", "/process.Process/List", {**JSON, "Content-Length": "2", "X-Access-Token": "secret"})
        one.socket.sendall(b"{}")
        assert one.reply().status == 200


def test_a_refused_upload_is_read_so_that_its_sender_sees_why(envd: Envd) -> None:
    size = 32 << 20
    with wire(envd) as one:
        one.begin("POST", "/files?path=/tmp&username=root", {"Content-Length": str(size)})
        for _ in range(size >> 20):
            one.socket.sendall(bytes(1 << 20))
        assert one.reply().status == 400
        assert one.alive()


def test_what_is_not_read_is_said(envd: Envd) -> None:
    """Nobody can use the connection again, and the answer says so."""
    with wire(envd) as one:
        one.begin("POST", "/nothing", {"Content-Length": str(1 << 40)})
        reply = one.reply()
        assert (reply.status, reply.headers["connection"]) == (404, "close")
        assert one.socket.recv(1) == b""
    with wire(envd) as one:
        one.begin("POST", "/nothing", {"Content-Length": "5", "Expect": "100-continue"})
        reply = one.reply()
        assert (reply.status, reply.headers["connection"]) == (404, "close")


def test_a_client_that_leaves_within_its_body_is_noticed(envd: Envd) -> None:
    before = envd.descriptors
    with wire(envd) as one:
        one.begin_chunked("/process.Process/Start", STREAM, start("/bin/sleep", "1000"))
        started = http.client.HTTPResponse(one.socket)
        started.begin()
        started.read(10)
        started.close()
        (child,) = envd.children()
    # The process lives on without its subscriber: its two pipes stay, the connection goes.
    wait_until(lambda: envd.descriptors <= before + 2, "the end of the connection")
    assert Path(f"/proc/{child}").exists()
    selector = {"process": {"pid": child}, "signal": "SIGNAL_SIGKILL"}
    assert envd.rpc("process.Process/SendSignal", selector).status == 200
