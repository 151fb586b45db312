"""The registry client against real registries, and against one that misbehaves."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from pathlib import Path

import pytest

from aenv.config import RegistrySettings
from aenv.image.errors import (
    DigestMismatchError,
    ImageNotFoundError,
    RegistryForbiddenError,
    RegistryUnauthorizedError,
    RegistryUnreachableError,
)
from aenv.image.manifest import Descriptor
from aenv.image.reference import Reference, parse
from aenv.image.registry import RegistryClient
from aenv.image.store import BlobStore
from tests.image import faulty
from tests.image.conftest import MakeSettings
from tests.image.registries import (
    PASSWORD,
    PROGRAM,
    USER,
    Registry,
    TokenServer,
    basic_auth,
    free_port,
    make_certificate,
    running,
)
from tests.image.writer import Image, archive, digest_of, member, push

pytestmark = pytest.mark.timeout(20)
real = pytest.mark.skipif(PROGRAM is None, reason="docker-registry is not installed")

LAYER = archive([member("noise", os.urandom(3 << 20))])
IMAGE = Image([LAYER], compression=("none",))
DIGEST = digest_of(LAYER)
BLOB = Descriptor(DIGEST, len(LAYER))


def ignore(count: int) -> None:
    pass


async def fetch_blob(client: RegistryClient, name: Reference, home: Path, blob: Descriptor = BLOB) -> bytes:
    lease = await client.blob(name, blob, BlobStore(home), ignore)
    with lease:
        return await asyncio.to_thread(lease.path.read_bytes)


@real
async def test_anonymous_pull_by_tag_and_digest(
    registry: Registry, make_settings: MakeSettings, tmp_path: Path
) -> None:
    push(registry.base, "a/b", "t", [IMAGE])
    async with RegistryClient(make_settings(registry.host)) as client:
        by_tag = await client.manifest(parse(f"{registry.host}/a/b:t"))
        assert (by_tag.data, by_tag.digest) == (IMAGE.manifest, IMAGE.digest)
        name = parse(f"{registry.host}/a/b@{IMAGE.digest}")
        assert await client.manifest(name) == by_tag
        assert await fetch_blob(client, name, tmp_path) == LAYER
        with pytest.raises(ImageNotFoundError, match="a/b:missing"):
            await client.manifest(parse(f"{registry.host}/a/b:missing"))


@real
async def test_basic_authentication(make_settings: MakeSettings, tmp_path: Path) -> None:
    with running(tmp_path, auth=basic_auth(tmp_path)) as started:
        secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        push(started.base, "private/x", "1", [IMAGE], headers={"Authorization": f"Basic {secret}"})
        name = parse(f"{started.host}/private/x:1")
        settings = make_settings(started.host)
        async with RegistryClient(settings) as client:
            with pytest.raises(RegistryUnauthorizedError, match="anonymous"):
                await client.manifest(name)
        async with RegistryClient(settings, (USER, "wrong")) as client:
            with pytest.raises(RegistryUnauthorizedError, match="refuses the credentials") as caught:
                await client.manifest(name)
            assert "wrong" not in str(caught.value)
        async with RegistryClient(settings, (USER, PASSWORD)) as client:
            assert (await client.manifest(name)).digest == IMAGE.digest
            assert await fetch_blob(client, name, tmp_path) == LAYER
        configured = RegistrySettings(plain_http=True, username=USER, password=PASSWORD)
        async with RegistryClient(make_settings(registries={started.host: configured})) as client:
            assert (await client.manifest(name)).digest == IMAGE.digest
        file = tmp_path / "docker.json"
        file.write_text(json.dumps({"auths": {started.host: {"auth": secret}}}))
        async with RegistryClient(make_settings(started.host, docker_config=file)) as client:
            assert (await client.manifest(name)).digest == IMAGE.digest


@real
async def test_token_authentication(make_settings: MakeSettings, tmp_path: Path) -> None:
    tokens = TokenServer(make_certificate(tmp_path))
    with tokens.running(), running(tmp_path, auth=tokens.auth) as started:
        for repository in ("public/x", "private/x"):
            token = tokens.token(repository, ["pull", "push"])
            push(started.base, repository, "1", [IMAGE], headers={"Authorization": f"Bearer {token}"})
        public, private = (parse(f"{started.host}/{name}/x:1") for name in ("public", "private"))
        settings = make_settings(started.host)
        async with RegistryClient(settings) as client:
            assert (await client.manifest(public)).digest == IMAGE.digest
            assert await fetch_blob(client, public, tmp_path) == LAYER
            assert len(tokens.requests) == 1  # one token for all of a repository
            assert tokens.requests[0][1]["scope"] == "repository:public/x:pull"
            with pytest.raises(RegistryUnauthorizedError, match="anonymous"):
                await client.manifest(private)
        async with RegistryClient(settings, (USER, PASSWORD)) as client:
            assert (await client.manifest(private)).digest == IMAGE.digest
        async with RegistryClient(settings, (USER, "wrong")) as client:
            with pytest.raises(RegistryUnauthorizedError, match="refuses"):
                await client.manifest(private)
        file = tmp_path / "docker.json"
        file.write_text(json.dumps({"auths": {started.host: {"identitytoken": tokens.identity_token}}}))
        async with RegistryClient(make_settings(started.host, docker_config=file)) as client:
            assert (await client.manifest(private)).digest == IMAGE.digest
        assert tokens.requests[-1][1]["grant_type"] == "refresh_token"


@real
async def test_private_authority_and_plain_http(make_settings: MakeSettings, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    with running(tmp_path, tls=certificate) as started:
        push(started.base, "a/b", "1", [IMAGE])
        name = parse(f"{started.host}/a/b:1")
        async with RegistryClient(make_settings()) as client:
            with pytest.raises(RegistryUnreachableError, match="certificate") as caught:
                await client.manifest(name)
            assert "ca_file" in caught.value.hint
        trusted = RegistrySettings(ca_file=certificate.certificate)
        async with RegistryClient(make_settings(registries={started.host: trusted})) as client:
            assert (await client.manifest(name)).digest == IMAGE.digest


async def test_errors_of_the_connection(make_settings: MakeSettings) -> None:
    client = RegistryClient(make_settings(), backoff_s=0.001)
    async with faulty.FaultyRegistry(IMAGE).running() as bad, client:  # https to a plain server
        with pytest.raises(RegistryUnreachableError) as caught:
            await client.manifest(parse(f"{bad.host}/a:1"))
        assert "plain_http" in caught.value.hint
    nobody = f"127.0.0.1:{free_port()}"
    async with RegistryClient(make_settings(nobody), backoff_s=0.001) as client:
        with pytest.raises(RegistryUnreachableError, match="cannot be used"):
            await client.manifest(parse(f"{nobody}/a:1"))


async def test_allowlist(make_settings: MakeSettings) -> None:
    async with RegistryClient(make_settings(registry_allow=["*.example.org", "localhost:5000"])) as client:
        for name in ("evil.org/a", "example.org.evil/a", "localhost:5001/a", "docker.io/a"):
            with pytest.raises(RegistryForbiddenError, match="not allowed"):
                await client.manifest(parse(name))


async def test_what_passes_is_tried_again(make_settings: MakeSettings) -> None:
    faults = [faulty.status(503), faulty.status(429, Retry_After="0"), faulty.breaks_off(IMAGE.manifest, 10)]
    async with faulty.FaultyRegistry(IMAGE, faults).running() as bad:
        async with RegistryClient(make_settings(bad.host), backoff_s=0.001) as client:
            assert (await client.manifest(parse(f"{bad.host}/a:1"))).digest == IMAGE.digest
        assert len(bad.requests) == 4
        bad.faults = [faulty.status(500)] * 5
        async with RegistryClient(make_settings(bad.host), backoff_s=0.001) as client:
            with pytest.raises(RegistryUnreachableError, match="500"):
                await client.manifest(parse(f"{bad.host}/a:1"))
        bad.faults = [faulty.status(400)]
        async with RegistryClient(make_settings(bad.host), backoff_s=0.001) as client:
            with pytest.raises(RegistryUnreachableError, match="400"):
                await client.manifest(parse(f"{bad.host}/a:1"))
        assert not bad.faults


@pytest.mark.parametrize("ranges", [True, False])
async def test_interrupted_downloads_continue(make_settings: MakeSettings, tmp_path: Path, ranges: bool) -> None:
    half = len(LAYER) // 2
    bad = faulty.FaultyRegistry(IMAGE, [faulty.breaks_off(LAYER, half)] + [faulty.status(500)] * 9, ranges=ranges)
    async with bad.running():
        name = parse(f"{bad.host}/a:1")
        async with RegistryClient(make_settings(bad.host), backoff_s=0.001) as client:
            with pytest.raises(RegistryUnreachableError):
                await fetch_blob(client, name, tmp_path)
        bad.faults = []
        async with RegistryClient(make_settings(bad.host), backoff_s=0.001) as client:  # as after a restart
            assert await fetch_blob(client, name, tmp_path) == LAYER
        asked = bad.requests[-1].headers["Range"]
        assert 0 < int(asked.removeprefix("bytes=").removesuffix("-")) <= half
        before = len(bad.requests)
        async with RegistryClient(make_settings(bad.host)) as client:
            assert await fetch_blob(client, name, tmp_path) == LAYER
        assert len(bad.requests) == before  # it is cached


async def test_foreign_leftovers_are_replaced(make_settings: MakeSettings, tmp_path: Path) -> None:
    partial = tmp_path / "images/blobs/partial" / DIGEST.removeprefix("sha256:")
    async with faulty.FaultyRegistry(IMAGE).running() as bad:
        for leftover in (b"x" * (len(LAYER) + 1), b"x" * 1000, b"x" * len(LAYER)):
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(leftover)
            async with RegistryClient(make_settings(bad.host), backoff_s=0.001) as client:
                name = parse(f"{bad.host}/a:1")
                if len(leftover) <= len(LAYER):
                    with pytest.raises(DigestMismatchError):
                        await fetch_blob(client, name, tmp_path)
                assert await fetch_blob(client, name, tmp_path) == LAYER
            assert not partial.exists()
            assert BlobStore(tmp_path).remove(DIGEST)


async def test_wrong_content_is_never_kept(make_settings: MakeSettings, tmp_path: Path) -> None:
    wrong = bytes(len(LAYER))
    faults = [faulty.body(wrong), faulty.body(LAYER + b"x"), faulty.body(IMAGE.manifest + b" ")]
    async with faulty.FaultyRegistry(IMAGE, faults).running() as bad:
        name = parse(f"{bad.host}/a@{IMAGE.digest}")
        async with RegistryClient(make_settings(bad.host), backoff_s=0.001) as client:
            with pytest.raises(DigestMismatchError, match="should be"):
                await fetch_blob(client, name, tmp_path)
            with pytest.raises(DigestMismatchError, match="more than"):
                await fetch_blob(client, name, tmp_path)
            with pytest.raises(DigestMismatchError):
                await client.manifest(name)
    assert BlobStore(tmp_path).blobs() == []


async def test_mirrors_are_asked_first_and_never_get_the_password(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    origin, good, bad = (faulty.FaultyRegistry(IMAGE) for _ in range(3))
    async with origin.running(), good.running(), bad.running():
        mirrored = RegistrySettings(plain_http=True, mirrors=[bad.host, f"{good.host}/prefix"])
        settings = make_settings(bad.host, good.host, registries={origin.host: mirrored})
        name = parse(f"{origin.host}/a/b:1")
        bad.faults = [faulty.status(500), faulty.body(bytes(len(LAYER)))]
        async with RegistryClient(settings, (USER, PASSWORD), backoff_s=0.001) as client:
            assert (await client.manifest(name)).digest == IMAGE.digest
            assert await fetch_blob(client, name, tmp_path) == LAYER
            assert not origin.requests and len(good.requests) == len(bad.requests) == 2
            assert good.requests[0].path == "/v2/prefix/a/b/manifests/1"
            bad.faults, good.faults = [faulty.status(404)], [faulty.status(401, WWW_Authenticate="Basic realm=x")]
            origin.faults = [faulty.status(401, WWW_Authenticate="Basic realm=x")]
            assert (await client.manifest(name)).digest == IMAGE.digest
        assert all("Authorization" not in request.headers for request in (*good.requests, *bad.requests))
        assert origin.requests[-1].headers["Authorization"].startswith("Basic ")


async def test_a_redirect_elsewhere_does_not_take_the_password_along(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    storage, front = faulty.FaultyRegistry(IMAGE), faulty.FaultyRegistry(IMAGE)
    async with storage.running(), front.running():
        location = f"http://{storage.host}/v2/a/blobs/{DIGEST}"
        front.faults = [faulty.status(401, WWW_Authenticate="Basic realm=x"), faulty.status(307, Location=location)]
        async with RegistryClient(make_settings(front.host), (USER, PASSWORD)) as client:
            assert await fetch_blob(client, parse(f"{front.host}/a:1"), tmp_path) == LAYER
        assert "Authorization" in front.requests[-1].headers
        assert "Authorization" not in storage.requests[-1].headers


async def test_parts_are_read_where_the_registry_sent_us(make_settings: MakeSettings) -> None:
    storage, front = faulty.FaultyRegistry(IMAGE), faulty.FaultyRegistry(IMAGE)
    async with storage.running(), front.running():
        location = f"http://{storage.host}/v2/a/blobs/{DIGEST}"
        moved = faulty.status(307, Location=location)
        front.faults = [faulty.status(401, WWW_Authenticate="Basic realm=x"), moved]
        name = parse(f"{front.host}/a:1")
        async with RegistryClient(make_settings(front.host), (USER, PASSWORD)) as client:
            for at in range(5):
                assert await client.part(name, DIGEST, 10 * at, 10) == LAYER[10 * at : 10 * at + 10]
            assert (len(front.requests), len(storage.requests)) == (2, 5), "asked once"
            assert not any("Authorization" in request.headers for request in storage.requests)
            # An address that does not hold any more is asked for anew, whatever it says.
            for gone in (faulty.status(403), faulty.status(500), faulty.breaks_off(LAYER, 0), faulty.body(LAYER)):
                front.faults, storage.faults = [moved], [gone]
                assert await client.part(name, DIGEST, 7, 9) == LAYER[7:16]
                assert not front.faults and not storage.faults
            # One that says that it must not be used again is not.
            asked = len(front.requests)
            front.faults = [faulty.status(307, Location=location, Cache_Control="no-store")] * 2
            storage.faults = [faulty.status(404)]
            for _ in range(2):
                assert await client.part(name, DIGEST, 0, 1) == LAYER[:1]
            assert len(front.requests) == asked + 2


async def test_redirects_within_the_registry_are_asked_for_each_time(make_settings: MakeSettings) -> None:
    async with faulty.FaultyRegistry(IMAGE).running() as front:
        moved = faulty.status(307, Location=f"http://{front.host}/v2/other/blobs/{DIGEST}")
        async with RegistryClient(make_settings(front.host)) as client:
            for _ in range(2):
                front.faults = [moved]
                assert await client.part(parse(f"{front.host}/a:1"), DIGEST, 0, 4) == LAYER[:4]
        assert len(front.requests) == 4


async def test_tasks_share_one_download(make_settings: MakeSettings, tmp_path: Path) -> None:
    async with faulty.FaultyRegistry(IMAGE).running() as bad, RegistryClient(make_settings(bad.host)) as client:
        name = parse(f"{bad.host}/a:1")
        assert await asyncio.gather(*(fetch_blob(client, name, tmp_path) for _ in range(4))) == [LAYER] * 4
        assert len(bad.requests) == 1


async def test_a_cancelled_download_is_continued(make_settings: MakeSettings, tmp_path: Path) -> None:
    async with faulty.FaultyRegistry(IMAGE).running() as bad, RegistryClient(make_settings(bad.host)) as client:
        name = parse(f"{bad.host}/a:1")
        for wanted in (1, 1 << 20, 1 << 20):
            arrived = asyncio.Event()
            total = 0

            def received(count: int) -> None:
                nonlocal total
                total += count
                if total >= wanted:  # noqa: B023
                    arrived.set()  # noqa: B023

            task = asyncio.ensure_future(client.blob(name, BLOB, BlobStore(tmp_path), received))
            waiting = asyncio.ensure_future(arrived.wait())
            await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
            task.cancel()
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await task).close()
        assert await fetch_blob(client, name, tmp_path) == LAYER
        assert BlobStore(tmp_path).remove(DIGEST)  # no lease was lost
