"""Content of volumes through the API: who may, what paths may be, what is left when something goes wrong."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from aenv.accounts.volume_files import Attributes, VolumeFiles, parts
from aenv.errors import CapacityError, InvalidRequestError, NotFoundError
from tests.api.fakes import KEY, FakeOrchestrator, api, application, served


async def volume(client: httpx.AsyncClient, name: str = "data") -> dict[str, str]:
    made = await client.post("/volumes", json={"name": name})
    assert made.status_code == 201, made.text
    found: dict[str, str] = made.json()
    return found


async def test_a_token_opens_its_volume_alone() -> None:
    transport = httpx.ASGITransport(application(FakeOrchestrator()))
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test") as client:

        async def ask(volume_id: str, shown: str | None, header: str = "Authorization") -> int:
            value = {} if shown is None else {header: f"Bearer {shown}" if header == "Authorization" else shown}
            answer = await client.get(f"/volumecontent/{volume_id}/dir", params={"path": "/"}, headers=value)
            return answer.status_code

        client.headers["X-API-Key"] = KEY
        first, second = await volume(client), await volume(client, "other")
        assert (await client.get(f"/volumecontent/{first['volumeID']}/dir", params={"path": ""})).json() == []
        del client.headers["X-API-Key"]
        assert await ask(first["volumeID"], first["token"]) == 200
        assert await ask(first["volumeID"], KEY) == 200
        for token in (second["token"], "", "x", None):
            assert await ask(first["volumeID"], token) == 401
        # Strangers do not learn which volumes there are; who has a key does.
        assert await ask("vol0", first["token"]) == 401
        assert await ask("vol0", KEY, "X-API-Key") == 404


async def test_files_and_folders() -> None:
    async with api(FakeOrchestrator()) as client:
        base = f"/volumecontent/{(await volume(client))['volumeID']}"

        async def status(method: str, what: str, path: str, **more: Any) -> int:
            answer = await client.request(
                method, f"{base}/{what}", params={"path": path, **more.pop("query", {})}, **more
            )
            return answer.status_code

        assert await status("PUT", "file", "/f", content=b"one") == 201
        assert await status("PUT", "file", "/f", content=b"two") == 201
        assert (await client.get(f"{base}/file", params={"path": "f"})).content == b"two"
        assert await status("PUT", "file", "/f/below", content=b"") == 404
        assert await status("PUT", "file", "/f/below", content=b"", query={"force": True}) == 404
        assert await status("PUT", "file", "/a/b", content=b"", query={"force": True}) == 201
        assert await status("PUT", "file", "/a", content=b"") == 400
        assert await status("POST", "dir", "/a") == 409
        assert await status("POST", "dir", "/f", query={"force": True}) == 409
        assert await status("POST", "dir", "/a", query={"force": True, "mode": 0o700}) == 201
        assert (await client.get(f"{base}/path", params={"path": "/a/"})).json()["mode"] == 0o700
        assert await status("GET", "dir", "/f") == 404
        assert await status("GET", "file", "/a") == 400
        assert await status("DELETE", "path", "/") == 400
        assert await status("PATCH", "path", "/f", json={"mode": 0o10000}) == 400
        assert await status("PATCH", "path", "/f", json={"uid": -1}) == 400
        for bad in ("..", "/a/../../x", "a\0b", "x" * 256, "/".join("d" * 200), "/.aenv-part-1"):
            assert await status("GET", "path", bad) == 400, bad
        names = [
            entry["path"] for entry in (await client.get(f"{base}/dir", params={"path": "/", "depth": 2})).json()
        ]
        assert names == ["/a", "/a/b", "/f"]


async def test_an_upload_that_breaks_off_leaves_what_was_there() -> None:
    app = application(FakeOrchestrator())
    files = app.api.state.context.services.volumes.files
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://api.test", headers={"X-API-Key": KEY}
    ) as client:
        made = await volume(client)
        path = f"/volumecontent/{made['volumeID']}/file"
        assert (await client.put(path, params={"path": "/f"}, content=b"whole")).status_code == 201

        messages = iter(
            [{"type": "http.request", "body": b"x" * (2 << 20), "more_body": True}, {"type": "http.disconnect"}]
        )
        answers: list[Any] = []

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            answers.append(message)

        scope = {
            "type": "http", "method": "PUT", "path": path, "raw_path": path.encode(), "query_string": b"path=/f",
            "headers": [(b"x-api-key", KEY.encode())], "http_version": "1.1", "scheme": "http", "root_path": "",
            "server": ("api.test", 80), "client": ("127.0.0.1", 1),
        }  # fmt: skip
        await app(scope, receive, send)
        assert answers[0]["status"] == 400
        assert (await client.get(path, params={"path": "/f"})).content == b"whole"
        assert [entry.name for entry in files.listing(made["volumeID"], "/", 1)] == ["f"]
        assert len(os.listdir(files._folder / made["volumeID"])) == 1  # noqa: PTH208


def content(files: VolumeFiles, path: str) -> bytes:
    with os.fdopen(files.open("v1", path), "rb") as file:
        return file.read()


def write(files: VolumeFiles, path: str, data: bytes) -> None:
    with files.writing("v1", path, parents=True) as part:
        part.write(data)
        part.commit(Attributes())


def test_what_is_read_is_one_state_of_a_file(tmp_path: Path) -> None:
    files = VolumeFiles(tmp_path / "volumes", reserve=0)
    files.create("v1")
    write(files, "/f", b"first")
    fd = files.open("v1", "/f")
    write(files, "/f", b"and the second")
    files.remove("v1", "/f")
    with os.fdopen(fd, "rb") as file:
        assert os.fstat(fd).st_size == 5
        assert file.read() == b"first"


def test_readers_among_writers_and_removers() -> None:
    """Each answer is all of one file, or says that there is none."""
    with served(FakeOrchestrator()) as url:

        def client() -> httpx.Client:
            return httpx.Client(base_url=url, headers={"X-API-Key": KEY}, timeout=60)

        with client() as first:
            base = f"/volumecontent/{first.post('/volumes', json={'name': 'data'}).json()['volumeID']}"

        def each(work: Callable[[httpx.Client, int], Any]) -> list[Any]:
            with client() as mine:
                return [work(mine, number) for number in range(40)]

        def put(mine: httpx.Client, number: int) -> int:
            body = bytes([number]) * (number * 5000 + 1)
            return mine.put(f"{base}/file", params={"path": "/f"}, content=body).status_code

        def get(mine: httpx.Client, number: int) -> tuple[int, int]:
            answer = mine.get(f"{base}/file", params={"path": "/f"})
            return answer.status_code, len(set(answer.content))

        def remove(mine: httpx.Client, number: int) -> int:
            return mine.delete(f"{base}/path", params={"path": "/f"}).status_code

        with ThreadPoolExecutor(6) as executor:
            writers = [executor.submit(each, put) for _ in range(2)]
            readers = [executor.submit(each, get) for _ in range(3)]
            remover = executor.submit(each, remove)
        assert {status for writer in writers for status in writer.result()} == {201}
        assert set(remover.result()) <= {204, 404}
        assert {size for reader in readers for status, size in reader.result() if status == 200} <= {1}
        assert {status for reader in readers for status, _ in reader.result()} <= {200, 404}


def test_a_folder_goes_at_once_whoever_writes_into_it(tmp_path: Path) -> None:
    files = VolumeFiles(tmp_path / "volumes", reserve=0)
    files.create("v1")
    write(files, "/t/a/f", b"x")
    with files.writing("v1", "/t/a/f", parents=False) as part:
        part.write(b"y")
        files.remove("v1", "/t")
        with pytest.raises(NotFoundError):
            part.commit(Attributes())
    assert files.listing("v1", "/", 3) == []

    removed = 0

    def writer(number: int) -> None:
        for turn in range(60):
            with suppress(NotFoundError):
                write(files, f"/t/{number}/{turn % 7}/f", b"x")

    def remover() -> None:
        nonlocal removed
        for _ in range(60):
            with suppress(NotFoundError):
                files.remove("v1", "/t")
                removed += 1

    with ThreadPoolExecutor(4) as executor:
        done = [executor.submit(writer, number) for number in range(3)] + [executor.submit(remover)]
    for future in done:
        future.result()
    write(files, "/t/f", b"x")
    files.remove("v1", "/t")
    assert removed and list((tmp_path / "volumes/v1").iterdir()) == []


async def test_paths_that_only_the_kernel_finds_too_long() -> None:
    async with api(FakeOrchestrator()) as client:
        base = f"/volumecontent/{(await volume(client))['volumeID']}"
        path = "/".join(["d" * 254] * 16)
        assert (await client.get(f"{base}/path", params={"path": path})).status_code in (400, 404)
        for method, what in (("POST", "dir"), ("PUT", "file"), ("GET", "file"), ("DELETE", "path")):
            answer = await client.request(method, f"{base}/{what}", params={"path": path, "force": True})
            assert answer.status_code == 400 and "too long" in answer.text, (method, what)


async def test_a_long_listing() -> None:
    app = application(FakeOrchestrator())
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://api.test", headers={"X-API-Key": KEY}
    ) as client:
        volume_id = (await volume(client))["volumeID"]
        for number in range(1203):
            (app.api.state.context.services.volumes.files._folder / volume_id / f"{number:05}").touch()
        listed = (await client.get(f"/volumecontent/{volume_id}/dir", params={"path": "/"})).json()
        assert [entry["name"] for entry in listed] == [f"{number:05}" for number in range(1203)]
        assert set(listed[0]) == {
            "name", "type", "path", "size", "mode", "uid", "gid", "atime", "mtime", "ctime"
        }  # fmt: skip


def test_room_links_and_debris(tmp_path: Path) -> None:
    files = VolumeFiles(tmp_path / "volumes", reserve=0)
    files.create("v1")
    with files.writing("v1", "/f", parents=False) as part:
        part.write(b"abc")
        part.commit(Attributes(mode=0o600))
    full = VolumeFiles(tmp_path / "volumes", reserve=1 << 60)
    with pytest.raises(CapacityError), full.writing("v1", "/f", parents=False) as part:
        part.write(b"x")
    assert content(files, "/f") == b"abc"
    # A link that somehow came to be there is shown and never followed.
    (tmp_path / "secret").write_text("s")
    (tmp_path / "volumes/v1/link").symlink_to(tmp_path)
    assert files.info("v1", "/link").target == str(tmp_path)
    with pytest.raises(InvalidRequestError):
        files.open("v1", "/link")
    with pytest.raises(Exception, match="not found"):
        files.open("v1", "/link/secret")
    # What a dead server left.
    (tmp_path / "volumes/v1/.aenv-part-0").write_text("half")
    (tmp_path / "volumes/v1/.aenv-part-1/of/a/folder").mkdir(parents=True)
    files.create("v0")
    files.prepare({"v1", "v2"})
    assert sorted(path.name for path in (tmp_path / "volumes").iterdir()) == ["v1", "v2"]
    assert sorted(path.name for path in (tmp_path / "volumes/v1").iterdir()) == ["f", "link"]


def test_paths() -> None:
    assert parts("/a//b/./c/") == ("a", "b", "c")
    assert parts("") == parts("/") == ()
    for bad in ("../a", "a/..", "\ud800"):
        with pytest.raises(InvalidRequestError):
            parts(bad)
