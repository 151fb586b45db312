"""The file system that is made of a tree."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from aenv.image.errors import ImageTooLargeError
from aenv.image.ext4 import make_ext4

pytestmark = [pytest.mark.skipif(os.geteuid() != 0, reason="ownership needs root"), pytest.mark.timeout(20)]


def output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


async def test_the_root_directory_is_that_of_the_image(tmp_path: Path) -> None:
    tree, image = tmp_path / "tree", tmp_path / "image"
    tree.mkdir()
    (tree / "file").write_bytes(b"x")
    os.setxattr(tree, "user.note", b"root")
    os.chown(tree, 5, 6)
    tree.chmod(0o2711)
    await make_ext4(tree, image, "key", 16)
    root = output("debugfs", "-R", "stat <2>", str(image))
    assert "Mode:  02711" in root and "Type: directory" in root
    assert "User:     5   Group:     6" in root and "user.note" in root
    output("e2fsck", "-fn", str(image))


async def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for number in range(1500):
        (tree / str(number)).touch()
    with pytest.raises(ImageTooLargeError, match="16 MiB"):
        await make_ext4(tree, tmp_path / "image", "key", 16)
    for path in tree.iterdir():
        path.unlink()
    (tree / "noise").write_bytes(os.urandom(20 << 20))
    with pytest.raises(ImageTooLargeError, match="16 MiB"):
        await make_ext4(tree, tmp_path / "image", "key", 16)
