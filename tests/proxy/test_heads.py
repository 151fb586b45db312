"""Header rewriting and access rules, without a socket."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.proxy.access import is_control_path, refusal
from aenv.proxy.headers import Body, UnsupportedFramingError, request_head, response_headers
from aenv.proxy.routing import ENVD_PORT, Target
from tests.proxy.support import sandbox


def build(*headers: tuple[bytes, bytes], method: bytes = b"POST") -> tuple[list[bytes], Body]:
    head, body = request_head(method, b"/p", b"q=1", headers, client="192.0.2.1", scheme="http")
    assert head.endswith(b"\r\n\r\n")
    return head[:-4].split(b"\r\n"), body


def test_end_to_end_headers_keep_order_and_duplicates() -> None:
    lines, body = build((b"host", b"h"), (b"x-a", b"1"), (b"cookie", b"a=\xff"), (b"x-a", b"2"))
    assert lines[:5] == [b"POST /p?q=1 HTTP/1.1", b"host: h", b"x-a: 1", b"cookie: a=\xff", b"x-a: 2"]
    assert lines[5:] == [b"x-forwarded-for: 192.0.2.1", b"x-forwarded-proto: http", b"x-forwarded-host: h"]
    assert body is Body.NONE


def test_forwarding_headers_are_extended() -> None:
    lines, _ = build(
        (b"host", b"h"),
        (b"x-forwarded-for", b"10.0.0.1"),
        (b"x-forwarded-proto", b"https"),
        (b"x-forwarded-host", b"o"),
    )
    assert lines[2:] == [b"x-forwarded-for: 10.0.0.1, 192.0.2.1", b"x-forwarded-proto: https", b"x-forwarded-host: o"]


def test_hop_by_hop_and_routing_headers_are_removed() -> None:
    lines, _ = build(
        (b"x-early", b"1"),
        (b"connection", b"keep-alive, X-Early, x-late, content-length"),
        (b"x-late", b"1"),
        (b"content-length", b"3"),
        (b"te", b"trailers"),
        (b"expect", b"100-continue"),
        (b"e2b-sandbox-id", b"i"),
        (b"e2b-traffic-access-token", b"t"),
        (b"x-access-token", b"kept"),
    )
    assert [line for line in lines[1:] if not line.startswith(b"x-forwarded")] == [
        b"content-length: 3",
        b"x-access-token: kept",
    ]


def test_chunked_wins_over_length() -> None:
    lines, body = build((b"content-length", b"3"), (b"transfer-encoding", b"Chunked"))
    assert body is Body.CHUNKED
    assert lines[-1] == b"transfer-encoding: chunked"
    assert not any(line.startswith(b"content-length") for line in lines)


def test_other_codings_are_refused() -> None:
    with pytest.raises(UnsupportedFramingError):
        build((b"transfer-encoding", b"gzip, chunked"))


def test_response_headers() -> None:
    headers = [
        (b"set-cookie", b"a=1"),
        (b"connection", b"close, x-hop"),
        (b"x-hop", b"1"),
        (b"set-cookie", b"b=2"),
        (b"content-encoding", b"gzip"),
        (b"content-length", b"5"),
        (b"transfer-encoding", b"chunked"),
    ]
    kept = [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"content-encoding", b"gzip")]
    assert response_headers(200, headers, head=False) == [*kept, (b"content-length", b"5")]
    assert response_headers(304, headers, head=False) == kept
    assert response_headers(304, headers, head=True) == [*kept, (b"content-length", b"5")]


@pytest.mark.parametrize(
    "path",
    [b"/init", b"/init/", b"//init", b"/./init", b"/x/../init", b"/%69nit", b"/%2569nit", b"/INIT", b"/init;a"],
)
def test_control_paths_in_any_spelling(path: bytes) -> None:
    assert is_control_path(path)


@pytest.mark.parametrize(
    "path", [b"/", b"/files", b"/health", b"/process.Process/Start", b"/files/init", b"/initial"]
)
def test_other_paths(path: bytes) -> None:
    assert not is_control_path(path)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_control_check_never_raises(path: bytes) -> None:
    is_control_path(path)


def test_traffic_token_guards_user_ports_only() -> None:
    box = sandbox(traffic_access_token="token")
    user, envd = Target(box.id, 3000, b"/"), Target(box.id, ENVD_PORT, b"/health")
    right, wrong = [(b"e2b-traffic-access-token", b"token")], [(b"e2b-traffic-access-token", b"\xff")]
    assert refusal(user, right, box) is None
    assert refusal(user, wrong, box) is not None
    assert refusal(user, [], box) is not None
    assert refusal(envd, [], box) is None
    assert refusal(user, [], sandbox()) is None
