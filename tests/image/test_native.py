"""Overlaybd-native images: recognised, refused, and read by range from a real registry."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from aenv.config import RegistrySettings
from aenv.errors import InvalidRequestError, SourceError
from aenv.image.errors import UnsupportedImageError
from aenv.image.manifest import manifest
from aenv.image.native import NativeImage, is_native
from aenv.image.ranged import RegistryBlobs, described
from aenv.image.reference import parse
from aenv.image.rootfs import pull_image
from aenv.orchestrator.ondemand import volume_of
from aenv.storage.layerd.exports import Layer
from aenv.storage.layerd.opening import StoredLayers
from aenv.storage.stack import Stack, open_layer
from tests.image import overlaybd, registries
from tests.image.conftest import MakeSettings
from tests.image.registries import Registry
from tests.image.writer import Image, archive, digest_of, member, push

SIZE = 16  # MiB


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A file system before and after a file is added."""
    work = tmp_path_factory.mktemp("states")
    (work / "tree").mkdir()
    (work / "tree/f").write_bytes(b"below" * 100_000)
    (work / "more").write_bytes(b"above" * 10_000)
    base = overlaybd.ext4(work / "tree", work / "one", SIZE)
    return base, overlaybd.with_file(base, work / "two", work / "more", "more")


@pytest.fixture(scope="module")
def image(states: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> overlaybd.NativeImage:
    work = tmp_path_factory.mktemp("layers")
    below = overlaybd.layer((None, states[0]), work)
    above = overlaybd.layer(states, work, compressed=False, wrapped=False)
    return overlaybd.NativeImage([below, above], {"Env": ["A=b"], "WorkingDir": "/srv"})


async def test_nothing_but_what_is_read_is_fetched(
    registry: Registry, make_settings: MakeSettings, image: overlaybd.NativeImage, states: tuple[Path, Path]
) -> None:
    push(registry.base, "native/two", "1", [image])
    settings = make_settings(registry.host)
    name = f"{registry.host}/native/two:1"
    found = await pull_image(name, settings.home, size_mib=64, settings=settings)
    assert isinstance(found, NativeImage)
    assert found.reference.digest == image.digest and found.config.env == {"A": "b"}
    assert not {blob.name for blob in (settings.home / "images/blobs/sha256").iterdir()} & {
        digest_of(data).removeprefix("sha256:") for data in image.layers
    }
    volume = await asyncio.to_thread(volume_of, found, settings)
    assert volume.virtual_size == SIZE << 20
    # As the layer server opens them.
    repository = json.loads(json.dumps(described(found.reference, settings)))
    opener = StoredLayers()
    views = [open_layer(opener(repository, Layer(ref.digest, ref.size)), ref.digest) for ref in volume.layers]
    content = await asyncio.to_thread(Stack(views, volume.virtual_size).read, 0, volume.virtual_size)
    assert content == states[1].read_bytes()


async def test_a_registry_with_credentials_and_one_that_fails(
    tmp_path: Path, make_settings: MakeSettings, image: overlaybd.NativeImage
) -> None:
    signer = registries.make_certificate(tmp_path)
    tokens = registries.TokenServer(signer)
    (tmp_path / "registry").mkdir()
    with tokens.running(), registries.running(tmp_path / "registry") as plain:
        push(plain.base, "native/two", "1", [image])
    with tokens.running(), registries.running(tmp_path / "registry", auth=tokens.auth) as guarded:
        account = RegistrySettings(plain_http=True, username=registries.USER, password=registries.PASSWORD)
        settings = make_settings(registries={guarded.host: account})
        blobs = RegistryBlobs(described(parse(f"{guarded.host}/native/two:1"), settings))
        data = image.layers[0]
        source = blobs.open(digest_of(data), len(data))
        assert await asyncio.to_thread(source.read, 1000, 5000) == data[1000:6000]
        assert source.read(5, 0) == b""
        with pytest.raises(SourceError):
            await asyncio.to_thread(blobs.read, digest_of(b"unknown"), 0, 10)
        with pytest.raises(SourceError):
            await asyncio.to_thread(blobs.read, digest_of(data), len(data), 10)
        stranger = RegistryBlobs(described(parse(f"{guarded.host}/native/two:1"), make_settings(guarded.host)))
        with pytest.raises(SourceError, match=r"[Cc]redentials|authori[sz]|account"):
            await asyncio.to_thread(stranger.read, digest_of(data), 0, 10)
    with pytest.raises(SourceError, match="cannot be used"):
        await asyncio.to_thread(source.read, 0, 10)
    blobs.close()
    with pytest.raises(InvalidRequestError):
        RegistryBlobs({"reference": "x"})


def test_what_is_native(image: overlaybd.NativeImage) -> None:
    assert is_native(manifest(json.loads(image.manifest)))
    plain = Image([archive([member("a")])])
    assert not is_native(manifest(json.loads(plain.manifest)))
    for note, says in (
        ({f"{overlaybd.LABEL}blob-fs-type": "erofs"}, "erofs"),
        ({f"{overlaybd.LABEL}blob-digest": digest_of(b"another")}, "turboOCI"),
    ):
        changed = overlaybd.NativeImage(image.layers, annotations=note)
        with pytest.raises(UnsupportedImageError, match=says):
            is_native(manifest(json.loads(changed.manifest)))
    mixed = json.loads(image.manifest)
    del mixed["layers"][1]["annotations"]
    with pytest.raises(UnsupportedImageError, match="1 are overlaybd"):
        is_native(manifest(mixed))
