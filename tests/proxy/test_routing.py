"""Routing decisions, without a socket."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.proxy.routing import ENVD_PORT, Router, Target, Unroutable, sandbox_id

ID = "abcdefghij0123456789"
ROUTER = Router("sandbox.test:8000")


def match(path: bytes = b"/x", **headers: str) -> Target | Unroutable | None:
    return ROUTER.match([(k.replace("_", "-").encode(), v.encode("latin-1")) for k, v in headers.items()], path)


def test_e2b_headers() -> None:
    assert match(e2b_sandbox_id=ID, e2b_sandbox_port="3000") == Target(ID, 3000, b"/x")
    assert match(e2b_sandbox_id=ID) == Target(ID, ENVD_PORT, b"/x")
    assert match(e2b_sandbox_id=ID + "-1a2b3c4d") == Target(ID, ENVD_PORT, b"/x")


def test_agentenv_headers() -> None:
    assert match(x_agentenv_sandbox_id=ID, x_agentenv_sandbox_port="80") == Target(ID, 80, b"/x")
    assert match(x_agentenv_sandbox_id=ID) == Target(ID, ENVD_PORT, b"/x")


def test_headers_win_over_host_and_path() -> None:
    found = match(b"/proxy/other/1/", host=f"1-{ID}.sandbox.test", e2b_sandbox_id="mine", e2b_sandbox_port="2")
    assert found == Target("mine", 2, b"/proxy/other/1/")


@pytest.mark.parametrize(
    "host",
    [
        f"3000-{ID}.sandbox.test",
        f"3000-{ID}.sandbox.test:8000",
        f"3000-{ID.upper()}.SANDBOX.test",
        f"3000-{ID}.localhost:8000",
        f"3000-{ID}-client.sandbox.test",
        f"3000-{ID}.any.other.domain",
    ],
)
def test_host(host: str) -> None:
    assert match(host=host) == Target(ID, 3000, b"/x")


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000",
        "127.0.0.1:8000",
        "10-0-0-1.example.org",
        "8000-user-repo-x1y2z3.ws.gitpod.io",
        "3000-short.example.org",
        f"3000-{ID}",
        f"-{ID}.sandbox.test",
        f"x3000-{ID}.sandbox.test",
        "[::1]:8000",
        "",
    ],
)
def test_hosts_of_the_api(host: str) -> None:
    assert match(host=host) is None


def test_short_ids_under_our_own_domain() -> None:
    assert match(host="80-x.sandbox.test") == Target("x", 80, b"/x")


def test_path() -> None:
    prefix = f"/proxy/{ID}/3000".encode()
    assert match(prefix + b"/a/b%2Fc") == Target(ID, 3000, b"/a/b%2Fc", prefix)
    assert match(prefix) == Target(ID, 3000, b"/", prefix)
    assert match(prefix + b"/") == Target(ID, 3000, b"/", prefix)
    assert match(b"/proxy/") is None
    assert match(b"/proxy") is None
    assert match(b"/proxies/a/1/") is None


@pytest.mark.parametrize("port", ["0", "65536", "-1", "abc", "", "1e3", "٣", "000080"])
def test_bad_ports(port: str) -> None:
    value = port.encode().decode("latin-1")
    assert match(e2b_sandbox_id=ID, e2b_sandbox_port=value) == Unroutable(ID, bad_port=True)


@pytest.mark.parametrize("bad", ["", "a/b", "../etc", "a b", "é", "a.b", "a" * 65, "-", "a\n"])
def test_bad_ids(bad: str) -> None:
    found = match(e2b_sandbox_id=bad)
    assert isinstance(found, Unroutable)
    assert not found.bad_port


@settings(deadline=None)
@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=10))
def test_arbitrary_bytes_never_raise(path: bytes, host: bytes, identity: bytes, port: bytes) -> None:
    for headers in (
        [(b"host", host)],
        [(b"host", host), (b"e2b-sandbox-id", identity), (b"e2b-sandbox-port", port)],
        [(b"x-agentenv-sandbox-id", identity), (b"x-agentenv-sandbox-port", port)],
    ):
        found = ROUTER.match(headers, path)
        if isinstance(found, Target):
            assert 0 < found.port < 65536
            assert sandbox_id(found.sandbox_id.encode()) == found.sandbox_id
            assert found.raw_path == path or path == found.prefix + found.raw_path or found.raw_path == b"/"


@settings(deadline=None)
@given(st.from_regex(r"[a-z0-9]{1,40}", fullmatch=True), st.integers(1, 65535))
def test_all_forms_agree(identity: str, port: int) -> None:
    path = b"/p"
    by_header = match(path, e2b_sandbox_id=identity, e2b_sandbox_port=str(port))
    by_host = match(path, host=f"{port}-{identity}.sandbox.test")
    by_path = match(f"/proxy/{identity}/{port}/p".encode())
    assert by_header == by_host == Target(identity, port, path)
    assert isinstance(by_path, Target)
    assert (by_path.sandbox_id, by_path.port, by_path.raw_path) == (identity, port, path)
