"""Ports that are forwarded: how they are written, and what a request's head becomes."""

import pytest

from aenv.cli.forward import Forward, parse, with_headers
from aenv.errors import AenvError


@pytest.mark.parametrize(
    ("text", "forward"),
    [
        ("8000", Forward(8000, 8000)),
        ("8080:80", Forward(8080, 80)),
        (":80", Forward(0, 80)),
        ("0:80", Forward(0, 80)),
    ],
)
def test_ports(text: str, forward: Forward) -> None:
    assert parse(text) == forward


@pytest.mark.parametrize("text", ["", "http", "0", "80:0", "70000", "70000:80", "1:2:3", "-1"])
def test_what_is_no_port(text: str) -> None:
    with pytest.raises(AenvError, match="is not a port") as caught:
        parse(text)
    assert "8080:80" in caught.value.hint


def test_a_head_gets_the_sandbox_and_serves_one_request() -> None:
    head = b"GET /a?b HTTP/1.1\r\nHost: localhost:8000\r\nConnection: keep-alive\r\nE2b-Sandbox-Id: other\r\n\r\n"
    assert with_headers(head, "/under", "i1", 80) == (
        b"GET /under/a?b HTTP/1.1\r\nE2b-Sandbox-Id: i1\r\nE2b-Sandbox-Port: 80\r\nConnection: close\r\n"
        b"Host: localhost:8000\r\n\r\n"
    )


def test_an_upgrade_keeps_its_connection() -> None:
    head = b"GET /ws HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert with_headers(head, "", "i1", 80).endswith(b"\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert b"close" not in with_headers(head, "", "i1", 80)


@pytest.mark.parametrize("head", [b"\x16\x03\x01\r\n\r\n", b"GET / HTTP/2\r\n\r\n", b"hello\r\n\r\n"])
def test_what_is_no_http_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError):
        with_headers(head, "", "i1", 80)
