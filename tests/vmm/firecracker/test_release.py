"""Firecracker's releases: what is downloaded is checked, and there whole or not at all."""

import hashlib
import io
import socket
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from aenv.errors import AenvError, CorruptFileError, VmmError
from aenv.vmm.firecracker import release
from aenv.vmm.firecracker.binary import SUPPORTED
from tests.vmm.firecracker import fake

VERSION = "1.16.1"
PROGRAM = f'#!/bin/sh\nexec {sys.executable} {fake.__file__} "$@"\n'.encode()


def archive(
    content: bytes = PROGRAM, name: str = release.member_name(VERSION, "x86_64"), kind: bytes = tarfile.REGTYPE
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size, member.type, member.linkname = len(content), kind, "/bin/sh"
        tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


class Releases:
    """A server of releases; ``files`` by path."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.url = ""

    def publish(self, content: bytes, digest: str | None = None) -> str:
        path = release.archive_url(VERSION, "x86_64", "")
        self.files[path] = content
        found = hashlib.sha256(content).hexdigest()
        self.files[f"{path}.sha256.txt"] = f"{digest or found}  firecracker-v{VERSION}-x86_64.tgz\n".encode()
        return found

    async def get(self, request: web.Request) -> web.Response:
        self.asked.append(request.path)
        if request.path not in self.files:
            raise web.HTTPNotFound
        return web.Response(body=self.files[request.path])


@pytest.fixture
async def releases() -> AsyncIterator[Releases]:
    made = Releases()
    app = web.Application()
    app.router.add_get("/{path:.*}", made.get)
    async with TestServer(app) as server:
        made.url = str(server.make_url("")).rstrip("/")
        yield made


async def install(releases: Releases, directory: Path, sha256: str | None = None) -> Path:
    return await release.install(
        directory, progress=lambda _: None, version=VERSION, sha256=sha256, releases=releases.url, machine="x86_64"
    )


async def test_a_release_is_installed_once(releases: Releases, tmp_path: Path) -> None:
    releases.publish(archive())
    program = await install(releases, tmp_path / "bin")
    assert program.read_bytes() == PROGRAM and program.stat().st_mode & 0o777 == 0o755
    asked = len(releases.asked)
    assert await install(releases, tmp_path / "bin") == program
    assert len(releases.asked) == asked
    assert [path.name for path in (tmp_path / "bin").iterdir()] == [program.name]


async def test_a_configured_digest_wins_over_the_published_one(releases: Releases, tmp_path: Path) -> None:
    found = releases.publish(archive(), digest="0" * 64)
    with pytest.raises(CorruptFileError, match="should have 0000"):
        await install(releases, tmp_path)
    releases.asked.clear()
    await install(releases, tmp_path, found.upper())
    assert not any(path.endswith(".sha256.txt") for path in releases.asked)


@pytest.mark.parametrize("content", [
    b"", b"no archive", archive()[:-200], archive(name="something else"), archive(b"", kind=tarfile.SYMTYPE),
    archive(b"#!/bin/sh\necho Firecracker v1.2.3\n"), archive(b"\x7fELF of another machine"),
])  # fmt: skip
async def test_what_is_no_firecracker_leaves_nothing(releases: Releases, tmp_path: Path, content: bytes) -> None:
    releases.publish(content)
    with pytest.raises(AenvError):
        await install(releases, tmp_path / "bin")
    assert list((tmp_path / "bin").iterdir()) == []


async def test_a_release_that_is_not_there_says_what_to_do(releases: Releases, tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="404") as caught:
        await install(releases, tmp_path)
    assert f"put the program of that release at {tmp_path}" in caught.value.hint


async def test_a_closed_network_says_what_to_do(releases: Releases, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        releases.url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(VmmError, match="cannot be downloaded") as caught:
        await install(releases, tmp_path)
    assert "no network" in caught.value.hint


async def test_a_machine_without_releases_is_told(tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="riscv64"):
        await release.install(tmp_path, progress=lambda _: None, machine="riscv64")


def test_urls_and_digests() -> None:
    assert release.archive_url("1.16.1", "aarch64").endswith("/v1.16.1/firecracker-v1.16.1-aarch64.tgz")
    assert tuple(int(part) for part in release.PINNED.split(".")[:2]) in SUPPORTED
    digest = "ab" * 32
    assert release.published_digest(f"{digest.upper()}  firecracker.tgz\n") == digest
    for text in ("", "abc", "<html>", digest[:-1]):
        with pytest.raises(CorruptFileError):
            release.published_digest(text)
