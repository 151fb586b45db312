"""The image cache as images: names, sizes, sharing, use; removal and collection. Against a real registry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv.config import Settings
from aenv.errors import ConflictError, NotFoundError
from aenv.image.inventory import CachedImage, collect_images, images, remove
from aenv.image.layerstore import LayerStore
from aenv.image.rootfs import ConvertedImage
from aenv.image.store import BlobStore
from tests.image import disks
from tests.image.conftest import MakeSettings
from tests.image.registries import Registry
from tests.image.writer import Image, archive, digest_of, member, push

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="ownership needs root")

BASE = archive([member("base", os.urandom(300_000))])
ONE = Image([BASE, archive([member("one", b"1")])], compression=("none",))
TWO = Image([BASE, archive([member("two", b"2")])], compression=("none",))
SIZE = 64  # MiB


async def pull(registry: Registry, settings: Settings, name: str) -> ConvertedImage:
    return await disks.pull(f"{registry.host}/{name}", settings, SIZE)


def use(home: Path, image: ConvertedImage, name: str) -> list[Path]:
    """Second names for its layers, as a disk that is on them has."""
    names = [home / f"{name}-{number}" for number in range(len(image.layers))]
    for path, layer in zip(names, disks.paths(home, image.layers), strict=True):
        os.link(layer, path)
    return names


def age(home: Path, seconds: float) -> None:
    """As if nothing had been used for so long."""
    for path in [*(home / "images/blobs").glob("sha*/*"), *LayerStore(home).paths()]:
        os.utime(path, (path.stat().st_mtime - seconds,) * 2)


def named(home: Path) -> dict[tuple[str, ...], CachedImage]:
    return {image.names: image for image in images(home)}


async def test_images_are_listed_with_what_they_share(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)
    home = settings.home
    assert images(home) == []
    push(registry.base, "inv/one", "1", [ONE])
    push(registry.base, "inv/two", "1", [TWO])
    await pull(registry, settings, "inv/one:1")
    (alone,) = images(home)
    assert (alone.digest, alone.names, alone.shared, alone.users) == (
        ONE.digest, (f"{registry.host}/inv/one:1",), 0, 0
    )  # fmt: skip
    two = await pull(registry, settings, "inv/two:1")
    newest, older = images(home)
    assert (newest.digest, older.digest) == (TWO.digest, ONE.digest), "the last used first"
    blobs = {blob.digest: blob.size for blob in BlobStore(home).blobs()}
    below = sum(layer.size for layer in two.layers[:2])  # the empty file system, and BASE on it
    assert newest.shared == older.shared == blobs[digest_of(BASE)] + below
    converted = sum(layer.size for layer in two.layers)
    assert newest.size == converted + sum(blobs[digest] for digest in {*TWO.blobs, TWO.digest})
    use(home, two, "disk")
    assert [image.users for image in images(home)] == [1, 0], "the other one's topmost layer is not used"


async def test_a_tag_that_moves_takes_its_name_along(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)
    name = f"{registry.host}/inv/moving:latest"
    for image in (ONE, TWO):
        push(registry.base, "inv/moving", "latest", [image])
        await pull(registry, settings, "inv/moving")
    assert {image.digest: image.names for image in images(settings.home)} == {TWO.digest: (name,), ONE.digest: ()}
    push(registry.base, "inv/other", "2", [TWO])
    await pull(registry, settings, "inv/other:2")
    assert images(settings.home)[0].names == (f"{registry.host}/inv/other:2", name)


async def test_removing_one_leaves_what_others_share(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)
    home = settings.home
    push(registry.base, "inv/one", "1", [ONE])
    push(registry.base, "inv/two", "1", [TWO])
    one, two = [await pull(registry, settings, name) for name in ("inv/one:1", "inv/two:1")]
    assert one.layers[:2] == two.layers[:2]
    for unknown in ("inv/three:1", "nothing", "ab", ""):
        with pytest.raises(NotFoundError):
            remove(home, unknown)
    names = use(home, two, "disk")
    with pytest.raises(ConflictError, match="in use: 1 of its disks"):
        remove(home, TWO.digest)
    store = BlobStore(home)
    lease = store.lease(digest_of(BASE))
    assert lease is not None
    with lease:
        assert remove(home, "inv/one:1").digest == ONE.digest, "by its name without the registry"
    assert [image.digest for image in images(home)] == [TWO.digest]
    assert {blob.digest for blob in store.blobs()} == {*TWO.blobs, TWO.digest}
    assert {path.name for path in LayerStore(home).paths()} == {x.digest.partition(":")[2] for x in two.layers}
    for path in names:
        path.unlink()
    lease = store.lease(digest_of(BASE))
    assert lease is not None
    with lease, pytest.raises(ConflictError, match="being pulled"):
        remove(home, TWO.digest)
    remove(home, TWO.digest.partition(":")[2][:12])
    assert images(home) == [] and not store.blobs()
    for folder in ("rootfs", "records", "chains"):
        assert not list((home / "images" / folder).iterdir())
    assert not LayerStore(home).paths()


async def test_a_collection_keeps_what_is_used_and_forgets_what_went(
    registry: Registry, make_settings: MakeSettings
) -> None:
    settings = make_settings(registry.host)
    home = settings.home
    push(registry.base, "inv/one", "1", [ONE])
    push(registry.base, "inv/two", "1", [TWO])
    await pull(registry, settings, "inv/one:1")
    on_disk = use(home, await pull(registry, settings, "inv/two:1"), "disk")
    assert collect_images(home, 0).removed == 0, "all of it was just used"
    age(home, 3600)
    done = collect_images(home, 0)
    assert done.removed and done.kept_bytes == 0
    ((names, left),) = named(home).items()
    assert names == (f"{registry.host}/inv/two:1",) and left.users == 1, "the disk in use stays listed"
    for path in on_disk:
        path.unlink()
    age(home, 3600)
    collect_images(home, 0)
    assert images(home) == []
    # What was lost in between is no error, and what is no record is none.
    (home / "images/records").mkdir(exist_ok=True)
    (home / "images/records/x.json").write_text("{")
    await pull(registry, settings, "inv/one:1")
    assert [image.digest for image in images(home)] == [ONE.digest]
