"""Images whose files are put into a folder of another image."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from aenv.image.drives import DriveImage
from aenv.image.errors import ArchiveError, ImageNotFoundError, UnsafeArchiveError
from aenv.image.layerstore import LayerStore
from tests.image.conftest import MakeSettings
from tests.image.disks import flat, mounted, pull
from tests.image.registries import Registry
from tests.image.trees import describe
from tests.image.writer import Image, archive, folder, hard_link, member, push, symlink

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="unpacking needs root"),
    pytest.mark.timeout(60),
]

SIZE = 64  # MiB
ROOT = [folder("mnt"), member("mnt/kept", b"kept"), folder("srv"), folder("srv/data"), member("srv/data/hidden"),
        symlink("link", "srv"), symlink("up", "../../../srv"), member("victim", b"untouched")]  # fmt: skip
BELOW = [folder("./", mode=0o750, uid=7), folder("a"), member("a/one", b"1"), folder("a/b"), member("a/b/two", b"2"),
         member("gone", b"gone"), symlink("out", "/victim"), symlink("alias", "a/b")]  # fmt: skip
ABOVE = [
    member(".wh.gone"),
    hard_link("a/again", "a/one"),
    member("a/../out", b"replaced"),
    member("alias/three", b"3"),
]


def content(data: bytes) -> tuple[int, str]:
    """As ``describe`` has it."""
    return len(data), hashlib.sha256(data).hexdigest()


async def attached(
    registry: Registry, make_settings: MakeSettings, tmp_path: Path, *drives: DriveImage
) -> dict[str, tuple[object, ...]]:
    """The tree of a root image with drives."""
    settings = make_settings(registry.host)
    push(registry.base, "drives/root", "1", [Image([archive(ROOT)])])
    push(registry.base, "drives/data", "1", [Image([archive(BELOW), archive(ABOVE)])])
    found = await pull(f"{registry.host}/drives/root:1", settings, SIZE, drives=drives)
    with mounted(flat(settings.home, found, tmp_path / "disk.img"), tmp_path / "tree") as tree:
        return describe(tree)


async def test_a_drive_is_what_its_image_is(registry: Registry, make_settings: MakeSettings, tmp_path: Path) -> None:
    drive = DriveImage(f"{registry.host}/drives/data:1", "mnt/data")
    tree = await attached(registry, make_settings, tmp_path, drive)
    within = {name for name in tree if name.startswith("mnt/data/")}
    assert within == {
        *("mnt/data/a", "mnt/data/a/one", "mnt/data/a/again", "mnt/data/a/b", "mnt/data/a/b/two"),
        *("mnt/data/a/b/three", "mnt/data/out", "mnt/data/alias"),
    }
    assert tree["mnt/data"][:2] == ("40750", 7), "its root's mode and owner"
    assert tree["mnt/data/a/again"][-1] == "mnt/data/a/again" == tree["mnt/data/a/one"][-1], "one file"
    assert [tree[name][5] for name in ("mnt/kept", "victim")] == [content(b"kept"), content(b"untouched")]
    assert not [name for name in tree if "aenv-drive" in name]


@pytest.mark.parametrize(
    ("path", "sub", "shown", "absent"),
    [
        ("srv/data", "", "srv/data/a/one", "srv/data/hidden"),
        ("srv/data", "a", "srv/data/one", "srv/data/a"),
        ("data", "alias", "data/two", "data/a"),
        ("link/new/deep", "a/b", "srv/new/deep/three", "link/new"),
        ("up/new", "", "srv/new/a", "up/new"),
        ("victim", "a", "victim/one", "victim/a"),
        ("link", "a", "link/one", "srv/one"),
    ],
)
async def test_where_it_is(
    registry: Registry, make_settings: MakeSettings, tmp_path: Path, path: str, sub: str, shown: str, absent: str
) -> None:
    drive = DriveImage(f"{registry.host}/drives/data:1", path, sub)
    tree = await attached(registry, make_settings, tmp_path, drive)
    assert shown in tree and absent not in tree
    assert not [name for name in tree if "aenv-drive" in name]
    assert "mnt/kept" in tree and ("victim" in tree)


async def test_what_is_made_once_is_used_again(
    registry: Registry, make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(registry.host)
    drive = DriveImage(f"{registry.host}/drives/data:1", "mnt/data")
    await attached(registry, make_settings, tmp_path, drive)
    root, count = f"{registry.host}/drives/root:1", len(LayerStore(settings.home).paths())
    lines: list[str] = []
    one = await pull(root, settings, SIZE, drives=[drive], progress=lines.append)
    assert not lines
    plain = await pull(root, settings, SIZE, progress=lines.append)
    assert plain.layers == one.layers[:-1] and len(LayerStore(settings.home).paths()) == count
    other = DriveImage(drive.image, "mnt/other", "a")
    both = await pull(root, settings, SIZE, drives=[drive, other], progress=lines.append)
    assert both.layers[:-1] == one.layers, "the first drive is there already"
    assert [line for line in lines if "adding" in line] == [f"adding {drive.image} at /mnt/other"]


async def test_drives_that_cannot_be(registry: Registry, make_settings: MakeSettings, tmp_path: Path) -> None:
    settings = make_settings(registry.host)
    push(registry.base, "drives/root", "1", [Image([archive(ROOT)])])
    push(registry.base, "drives/data", "1", [Image([archive(BELOW), archive(ABOVE)])])
    hostile: list[Any] = [member("../../victim", b"evil")]
    push(registry.base, "drives/hostile", "1", [Image([archive(hostile)])])
    sneaky: list[Any] = [symlink("d", "../.."), member("d/victim", b"evil")]
    push(registry.base, "drives/sneaky", "1", [Image([archive(sneaky)])])
    root = f"{registry.host}/drives/root:1"
    for name, path, sub, kind in (
        ("data:1", "mnt/x", "nothing", ArchiveError),
        ("data:1", "mnt/x", "a/one", ArchiveError),
        ("none:1", "mnt/x", "", ImageNotFoundError),
        ("hostile:1", "mnt/x", "", UnsafeArchiveError),
    ):
        with pytest.raises(kind):
            await pull(root, settings, SIZE, drives=[DriveImage(f"{registry.host}/drives/{name}", path, sub)])
    # A link that leads out of the drive leads to the drive's root, as in a container.
    sneaked = DriveImage(f"{registry.host}/drives/sneaky:1", "mnt/sneaky")
    tree = await attached(registry, make_settings, tmp_path, sneaked)
    assert "mnt/sneaky/victim" in tree and tree["victim"][5] != tree["mnt/sneaky/victim"][5]
