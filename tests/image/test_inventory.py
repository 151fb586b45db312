"""The image cache as images: names, sizes, sharing, use; removal and collection. Against a real registry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aenv.config import Settings
from aenv.errors import ConflictError, NotFoundError
from aenv.image.inventory import CachedImage, collect_images, images, remove
from aenv.image.rootfs import pull_rootfs
from aenv.image.store import BlobStore
from tests.image.conftest import MakeSettings
from tests.image.registries import Registry
from tests.image.writer import Image, archive, digest_of, member, push

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="ownership needs root")

BASE = archive([member("base", os.urandom(300_000))])
ONE = Image([BASE, archive([member("one", b"1")])], compression=("none",))
TWO = Image([BASE, archive([member("two", b"2")])], compression=("none",))
SIZE = 64  # MiB


async def pull(registry: Registry, settings: Settings, name: str) -> Path:
    path, _ = await pull_rootfs(f"{registry.host}/{name}", settings.home, size_mib=SIZE, settings=settings)
    return path


def age(home: Path, seconds: float) -> None:
    """As if nothing had been used for so long."""
    for path in [*(home / "images/blobs").glob("sha*/*"), *(home / "images/rootfs").glob("*.ext4")]:
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
    path = await pull(registry, settings, "inv/two:1")
    newest, older = images(home)
    assert (newest.digest, older.digest) == (TWO.digest, ONE.digest), "the last used first"
    assert newest.shared == older.shared >= len(BASE)
    blobs = {blob.digest: blob.size for blob in BlobStore(home).blobs()}
    converted = path.stat().st_blocks * 512
    assert newest.size == converted + sum(blobs[digest] for digest in {*TWO.blobs, TWO.digest})
    os.link(path, home / "layer")
    assert images(home)[0].users == 1


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
    for name in ("inv/one:1", "inv/two:1"):
        await pull(registry, settings, name)
    for unknown in ("inv/three:1", "nothing", "ab", ""):
        with pytest.raises(NotFoundError):
            remove(home, unknown)
    (path,) = (home / "images/rootfs").glob(f"{TWO.digest.partition(':')[2]}-*.ext4")
    os.link(path, home / "layer")
    with pytest.raises(ConflictError, match="in use by 1 disk"):
        remove(home, TWO.digest)
    (home / "layer").unlink()
    store = BlobStore(home)
    lease = store.lease(digest_of(BASE))
    assert lease is not None
    with lease:
        assert remove(home, "inv/one:1").digest == ONE.digest, "by its name without the registry"
    assert [image.digest for image in images(home)] == [TWO.digest]
    assert {blob.digest for blob in store.blobs()} == {*TWO.blobs, TWO.digest}
    lease = store.lease(digest_of(BASE))
    assert lease is not None
    with lease, pytest.raises(ConflictError, match="being pulled"):
        remove(home, TWO.digest)
    remove(home, TWO.digest.partition(":")[2][:12])
    assert images(home) == [] and not store.blobs()
    assert not list((home / "images/rootfs").iterdir()) and not list((home / "images/records").iterdir())


async def test_a_collection_keeps_what_is_used_and_forgets_what_went(
    registry: Registry, make_settings: MakeSettings
) -> None:
    settings = make_settings(registry.host)
    home = settings.home
    push(registry.base, "inv/one", "1", [ONE])
    push(registry.base, "inv/two", "1", [TWO])
    await pull(registry, settings, "inv/one:1")
    os.link(await pull(registry, settings, "inv/two:1"), home / "layer")
    assert collect_images(home, 0).removed == 0, "all of it was just used"
    age(home, 3600)
    done = collect_images(home, 0)
    assert done.removed and done.kept_bytes == 0
    ((names, left),) = named(home).items()
    assert names == (f"{registry.host}/inv/two:1",) and left.users == 1, "the disk in use stays listed"
    (home / "layer").unlink()
    age(home, 3600)
    collect_images(home, 0)
    assert images(home) == []
    # What was lost in between is no error, and what is no record is none.
    (home / "images/records").mkdir(exist_ok=True)
    (home / "images/records/x.json").write_text("{")
    await pull(registry, settings, "inv/one:1")
    assert [image.digest for image in images(home)] == [ONE.digest]
