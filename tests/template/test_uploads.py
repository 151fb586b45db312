"""The upload address of COPY archives: who may write, how much, and what is left of a broken upload."""

import tarfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from aenv.api.template_uploads import LIFETIME, PREFIX, UploadLinks, Uploads
from aenv.errors import InvalidRequestError
from aenv.template.archives import Archives
from aenv.template.engine import member_names

DIGEST = "ab" * 32
LIMIT = 3 << 20
BASE = "http://node.test"


@pytest.fixture
def archives(tmp_path: Path) -> Archives:
    made = Archives(tmp_path, 1 << 30)
    made.open()
    return made


@pytest.fixture
def links() -> UploadLinks:
    return UploadLinks()


@pytest.fixture
async def client(archives: Archives, links: UploadLinks) -> AsyncIterator[httpx.AsyncClient]:
    application = Uploads(links, archives, limit=LIMIT, reserve=0)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application)) as made:
        yield made


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


async def test_upload(client: httpx.AsyncClient, links: UploadLinks, archives: Archives, tmp_path: Path) -> None:
    url = links.make(BASE + "/", DIGEST)
    assert url.startswith(f"{BASE}{PREFIX}{DIGEST}?")
    body = bytes(range(256)) * 10_000
    assert (await client.put(url, content=body)).status_code == 200
    assert archives.path(DIGEST).read_bytes() == body
    assert (await client.put(url, content=b"again")).status_code == 200
    assert archives.path(DIGEST).read_bytes() == b"again"
    assert files(tmp_path) == [DIGEST]


async def test_only_the_link_lets_in(
    client: httpx.AsyncClient, links: UploadLinks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = links.make(BASE, DIGEST)
    wrong = [
        url.replace(DIGEST, "cd" * 32),
        url.replace("signature=", "signature=0"),
        url.replace("expires=", "expires=9"),
        url.partition("?")[0],
        f"{BASE}{PREFIX}?expires=x&signature=y",
        UploadLinks().make(BASE, DIGEST),
        url.replace("signature=", "signature=%C3%A9"),
    ]
    for each in wrong:
        assert (await client.put(each, content=b"x")).status_code == 403, each
    assert (await client.post(url, content=b"x")).status_code == 405
    now = time.time()
    monkeypatch.setattr("aenv.api.template_uploads.time.time", lambda: now + LIFETIME + 2)
    assert (await client.put(url, content=b"x")).status_code == 403
    assert files(tmp_path) == []


async def test_bounds(client: httpx.AsyncClient, links: UploadLinks, tmp_path: Path) -> None:
    url = links.make(BASE, DIGEST)
    answer = await client.put(url, content=b"x" * (LIMIT + 1))
    assert answer.status_code == 413
    assert "max_upload" in answer.json()["message"]

    async def endless() -> AsyncIterator[bytes]:  # no length announced
        for _ in range(10):
            yield b"x" * (1 << 20)

    assert (await client.put(url, content=endless())).status_code == 413
    assert (await client.put(url, content=b"")).status_code == 400
    assert files(tmp_path) == []


async def test_a_full_disk_is_said(links: UploadLinks, archives: Archives, tmp_path: Path) -> None:
    application = Uploads(links, archives, limit=LIMIT, reserve=1 << 60)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(application)) as client:
        answer = await client.put(links.make(BASE, DIGEST), content=b"x")
    assert answer.status_code == 503
    assert files(tmp_path) == []


async def test_an_upload_that_breaks_off_leaves_nothing(
    links: UploadLinks, archives: Archives, tmp_path: Path
) -> None:
    application = Uploads(links, archives, limit=LIMIT, reserve=0)
    url = httpx.URL(links.make(BASE, DIGEST))
    events: Iterator[dict[str, object]] = iter(
        [{"type": "http.request", "body": b"x" * (2 << 20), "more_body": True}, {"type": "http.disconnect"}]
    )

    async def receive() -> dict[str, object]:
        return next(events)

    async def send(message: object) -> None:
        pass

    scope = {"type": "http", "method": "PUT", "path": url.path, "query_string": url.query, "headers": []}
    await application(scope, receive, send)
    assert files(tmp_path) == []


def test_archives_that_are_none_or_too_much(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(b"not a tar archive")
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        member_names(path, 100)
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(1000)
    with tarfile.open(path, "w:gz") as tar:
        tar.add(big, "big")
    assert member_names(path, 1000) == ["big"]
    with pytest.raises(InvalidRequestError, match="does not fit"):
        member_names(path, 999)
