"""Forms of any boundary, content and cut, against what was put into them; bodies that are larger than they look."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import string
import zlib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from e2b import Sandbox
from e2b.sandbox.filesystem.filesystem import WriteEntry
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.envd.daemon import Envd, wait_until
from tests.envd.test_large_files import LIMIT, peak

# bchars of RFC 2046, section 5.1.1; one that ends with a space is not allowed.
BOUNDARIES = st.text(string.digits + "abAB'()+_,-./:=? ", min_size=1, max_size=70).filter(lambda b: b[-1] != " ")
BOUNDED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@st.composite
def forms(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A boundary, and contents that come as near to it as they may."""
    boundary = draw(BOUNDARIES)
    delimiter = f"\r\n--{boundary}".encode()
    near = st.integers(0, len(delimiter) - 1).map(lambda n: delimiter[:n])
    far = st.integers(1, len(delimiter)).map(lambda n: delimiter[n:])
    piece = st.one_of(near, far, st.sampled_from([b"\r\n", b"\r", b"\n", b"--", b"\0\xff"]), st.binary(max_size=40))
    large = st.integers(0, 40_000).map(lambda n: delimiter[:-1] * (n // len(delimiter)) + b"x")
    content = st.lists(st.one_of(piece, large), max_size=8).map(b"".join)
    contents = [
        c for c in draw(st.lists(content, min_size=1, max_size=4)) if delimiter not in b"\r\n" + c + delimiter[:-1]
    ]
    assume(contents)
    return boundary, contents


def render(boundary: str, folder: Path, contents: list[bytes], *, preamble: bytes, padding: bytes) -> bytes:
    """What RFC 2046 allows: words before and after, white space behind boundaries, fields that are no files."""
    line = b"--" + boundary.encode() + padding + b"\r\n"
    body = preamble + line + b'Content-Disposition: form-data; name="other"\r\n\r\nnot a file\r\n'
    for number, content in enumerate(contents):
        head = f'content-disposition: form-data; filename="{folder}/{number}"; name="file"\r\nX-Other: a: b\r\n\r\n'
        body += line + head.encode() + content + b"\r\n"
    return body + b"--" + boundary.encode() + b"--\r\nwords after"


def post(envd: Envd, boundary: str, body: bytes, cuts: list[int]) -> tuple[int, bytes]:
    """One chunk for each piece between ``cuts``."""
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})

    def pieces() -> Iterator[bytes]:
        for first, last in itertools.pairwise(edges):
            yield body[first:last]

    with contextlib.closing(http.client.HTTPConnection(envd.host, envd.port, timeout=60)) as connection:
        kind = f'multipart/form-data; charset=utf-8; boundary="{boundary}"'
        connection.request("POST", "/files?username=root", pieces(), {"Content-Type": kind}, encode_chunked=True)
        response = connection.getresponse()
        return response.status, response.read()


@BOUNDED
@given(
    form=forms(),
    cuts=st.lists(st.integers(0, 1 << 20), max_size=20),
    preamble=st.sampled_from([b"", b"\r\n", b"words before\r\n", b"--\r\n"]),
    padding=st.sampled_from([b"", b" ", b"\t \t"]),
)
def test_contents_arrive_as_they_were_sent(
    envd: Envd, tmp_path: Path, form: tuple[str, list[bytes]], cuts: list[int], preamble: bytes, padding: bytes
) -> None:
    boundary, contents = form
    body = render(boundary, tmp_path, contents, preamble=preamble, padding=padding)
    status, answer = post(envd, boundary, body, cuts)
    assert status == 200, answer
    assert [Path(entry["path"]).read_bytes() for entry in json.loads(answer)] == contents


def test_every_unfinished_form_is_refused(envd: Envd, tmp_path: Path) -> None:
    body = render("b", tmp_path, [b"\r\n--", b""], preamble=b"", padding=b"")
    end = body.index(b"--b--") + len(b"--b--")
    for length in range(end):
        status, answer = post(envd, "b", body[:length], [length // 2])
        assert status == 400, (length, answer)
    assert post(envd, "b", body[:end], [])[0] == 200


def test_names_that_clients_escape(sandbox: Sandbox, tmp_path: Path) -> None:
    names = ['quote"d', "back\\slash", "tab\tand\nline", "ünï 文", "semi;colon=x", "100%", "50%41"]
    entries = [WriteEntry(path=str(tmp_path / name), data=name) for name in names]
    assert [w.path for w in sandbox.files.write_files(entries, user="root")] == [e["path"] for e in entries]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: name for name in names}


@pytest.mark.parametrize("form", [False, True], ids=["raw", "multipart"])
def test_what_is_compressed_a_thousandfold_takes_no_more_memory(fresh: Envd, tmp_path: Path, form: bool) -> None:
    size = 512 << 20
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    head, tail = (b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\n', b"\r\n--B--") if form else (b"", b"")
    body = packer.compress(head) + b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20))
    body += packer.compress(tail) + packer.flush()
    assert len(body) * 900 < size
    kind = "multipart/form-data; boundary=B" if form else "application/octet-stream"
    path = f"/files?username=root&path={quote(str(tmp_path / 'zeros'))}"
    reply = fresh.request("POST", path, body, {"Content-Type": kind, "Content-Encoding": "gzip"})
    assert reply.status == 200, reply.body
    assert (tmp_path / "zeros").stat().st_size == size
    assert peak(fresh) < LIMIT, f"{peak(fresh)} kB"
    # Broken and unfinished ones are told, and leave a daemon that works.
    for wrong in (body[: len(body) // 2], b"no gzip" * 999, body[:9999] + b"\xff" * 9999):
        headers = {"Content-Type": kind, "Content-Encoding": "gzip"}
        assert fresh.request("POST", path, wrong, headers).status == 400


def test_a_client_that_leaves_in_the_middle_of_a_form(envd: Envd, tmp_path: Path) -> None:
    body = render("b", tmp_path, [b"x" * 300_000], preamble=b"", padding=b"")
    before = envd.descriptors
    for sent in (10, 200, 100_000, 290_000):
        with socket.create_connection((envd.host, envd.port)) as client:
            head = f"POST /files?username=root HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
            client.sendall(head.encode() + b"Content-Type: multipart/form-data; boundary=b\r\n\r\n" + body[:sent])
    assert post(envd, "b", body, [])[0] == 200
    assert (tmp_path / "0").read_bytes() == b"x" * 300_000
    wait_until(lambda: envd.descriptors <= before, "the connections to close")
