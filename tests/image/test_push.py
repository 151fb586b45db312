"""Pushing to real registries: what is there is not sent, credentials, refusals, a registry that breaks off."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from aenv.config import RegistrySettings
from aenv.image.errors import (
    InvalidReferenceError,
    RegistryForbiddenError,
    RegistryUnauthorizedError,
    RegistryUnreachableError,
)
from aenv.image.manifest import OCI_MANIFEST
from aenv.image.push import RegistryWriter, target
from aenv.storage.source import FileSource, Source
from tests.image import registries
from tests.image.conftest import MakeSettings
from tests.image.disks import pull
from tests.image.registries import Registry
from tests.image.writer import Image, archive, digest_of, member

IMAGE = Image([archive([member("f", os.urandom(3_000_000))])], {"Env": ["A=b"]}, compression=("none",))


def stored(tmp_path: Path, data: bytes) -> Source:
    path = tmp_path / digest_of(data).partition(":")[2]
    path.write_bytes(data)
    return FileSource(path)


async def push_all(writer: RegistryWriter, name: str, tmp_path: Path) -> list[bool]:
    reference = target(name)
    sent = [await writer.push(reference, digest, stored(tmp_path, data)) for digest, data in IMAGE.blobs.items()]
    await writer.put_manifest(reference, IMAGE.manifest, OCI_MANIFEST)
    return sent


async def test_what_is_pushed_is_pulled_and_not_sent_twice(
    registry: Registry, make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(registry.host)
    name = f"{registry.host}/push/app:1"
    async with RegistryWriter(settings, backoff_s=0.01) as writer:
        assert all(await push_all(writer, name, tmp_path))
        assert not any(await push_all(writer, f"{registry.host}/push/app:2", tmp_path))
        other = target(f"{registry.host}/push/other:1")
        (layer, data), *_ = IMAGE.blobs.items()
        assert not await writer.has(other, layer)
        mounted = await writer.push(other, layer, stored(tmp_path, data), mount="push/app")
        assert not mounted and await writer.has(other, layer), "taken from the other repository"
    async with httpx.AsyncClient(base_url=registry.base, headers={"Accept": OCI_MANIFEST}) as client:
        for tag in (1, 2):
            assert (await client.get(f"/v2/push/app/manifests/{tag}")).content == IMAGE.manifest
    assert (await pull(name, settings, 64)).config.env == {"A": "b"}


async def test_credentials(make_settings: MakeSettings, tmp_path: Path) -> None:
    (tmp_path / "registry").mkdir()
    with registries.running(tmp_path / "registry", auth=registries.basic_auth(tmp_path)) as registry:
        settings = make_settings(registry.host)
        name = f"{registry.host}/push/app:1"
        for login, says in ((None, "anonymous"), ((registries.USER, "wrong"), "refuses the credentials")):
            async with RegistryWriter(settings, login, backoff_s=0.01) as writer:
                with pytest.raises(RegistryUnauthorizedError, match=says):
                    await push_all(writer, name, tmp_path)
        async with RegistryWriter(settings, (registries.USER, registries.PASSWORD), backoff_s=0.01) as writer:
            assert all(await push_all(writer, name, tmp_path))
    signer = registries.make_certificate(tmp_path)
    tokens = registries.TokenServer(signer)
    (tmp_path / "guarded").mkdir()
    with tokens.running(), registries.running(tmp_path / "guarded", auth=tokens.auth) as registry:
        account = RegistrySettings(plain_http=True, username=registries.USER, password=registries.PASSWORD)
        async with RegistryWriter(make_settings(registries={registry.host: account}), backoff_s=0.01) as writer:
            # This server's tokens are for pulling only.
            with pytest.raises(RegistryUnauthorizedError):
                await push_all(writer, f"{registry.host}/push/app:1", tmp_path)
        assert tokens.requests[-1][1]["scope"] == "repository:push/app:pull,push"


async def test_refusals(registry: Registry, make_settings: MakeSettings, tmp_path: Path) -> None:
    for name in ("app:1", f"{registry.host}/app@{IMAGE.digest}", "UPPER", ""):
        with pytest.raises(InvalidReferenceError):
            target(name)
    async with RegistryWriter(make_settings(registry.host, registry_allow=["docker.io"])) as writer:
        with pytest.raises(RegistryForbiddenError):
            await push_all(writer, f"{registry.host}/push/app:1", tmp_path)
    gone = f"127.0.0.1:{registries.free_port()}"
    async with RegistryWriter(make_settings(gone), backoff_s=0.01) as writer:
        with pytest.raises(RegistryUnreachableError, match="cannot be used"):
            await push_all(writer, f"{gone}/push/app:1", tmp_path)
    async with RegistryWriter(make_settings(registry.host), backoff_s=0.01) as writer:
        with pytest.raises(RegistryUnreachableError, match="status 400"):
            await writer.push(
                target(f"{registry.host}/push/x:1"), digest_of(b"another"), stored(tmp_path, b"content")
            )
