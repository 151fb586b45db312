"""Files larger than any buffer, and than 32 bits where AENV_LARGE_FILE_GIB says 4: constant memory both ways."""

from __future__ import annotations

import http.client
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.envd.daemon import Envd

SIZE = (int(os.environ.get("AENV_LARGE_FILE_GIB", "1")) << 30) + 12_345
PIECE = 1 << 20
MARKS = {0: b"first", SIZE // 2: b"middle", SIZE - 4: b"last"}
LIMIT = 16_000  # kB
HEAD = b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
TAIL = b"\r\n--B--\r\n"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A sparse file: only its marks take space."""
    path = tmp_path / "source"
    with path.open("wb") as file:
        for at, mark in MARKS.items():
            file.seek(at)
            file.write(mark)
    assert path.stat().st_size == SIZE
    return path


def check_marks(path: Path) -> None:
    assert path.stat().st_size == SIZE
    with path.open("rb") as file:
        for at, mark in MARKS.items():
            file.seek(at)
            assert file.read(len(mark)) == mark


def peak(envd: Envd) -> int:
    status = Path(f"/proc/{envd.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def files(path: Path) -> str:
    return "/files?username=root&path=" + quote(str(path))


def whole(source: Path, head: bytes = b"", tail: bytes = b"") -> Iterator[bytes]:
    yield head
    with source.open("rb") as file:
        while data := file.read(PIECE):
            yield data
    yield tail


@pytest.mark.parametrize("form", [False, True], ids=["raw", "multipart"])
def test_upload(fresh: Envd, source: Path, tmp_path: Path, form: bool) -> None:
    target = tmp_path / "target"
    head, tail = (HEAD, TAIL) if form else (b"", b"")
    length = len(head) + SIZE + len(tail)
    kind = "multipart/form-data; boundary=B" if form else "application/octet-stream"
    connection = http.client.HTTPConnection(fresh.host, fresh.port, timeout=120)
    headers = {"Content-Length": str(length), "Content-Type": kind}
    connection.request("POST", files(target), whole(source, head, tail), headers)
    response = connection.getresponse()
    assert (response.status, response.read()) == (
        200,
        f'[{{"name":"target","path":"{target}","type":"file"}}]'.encode(),
    )
    connection.close()
    check_marks(target)
    target.unlink()
    assert peak(fresh) < LIMIT


def test_download(fresh: Envd, source: Path) -> None:
    connection = http.client.HTTPConnection(fresh.host, fresh.port, timeout=120)
    connection.request("GET", files(source))
    response = connection.getresponse()
    assert response.headers["content-length"] == str(SIZE)
    buffer = bytearray(PIECE)
    got, end = 0, b""
    while count := response.readinto(buffer):
        if got == 0:
            assert buffer.startswith(MARKS[0])
        got += count
        end = (end + buffer[max(0, count - 4) : count])[-4:]
    assert (got, end) == (SIZE, b"last")
    connection.request("GET", files(source), headers={"Range": f"bytes={SIZE // 2}-{SIZE // 2 + 5}"})
    response = connection.getresponse()
    assert (response.status, response.read()) == (206, b"middle")
    connection.close()
    assert peak(fresh) < LIMIT
