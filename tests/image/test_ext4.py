"""The file system that images begin with."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from aenv.image.errors import ImageError
from aenv.image.ext4 import make_blank

pytestmark = pytest.mark.timeout(20)


def output(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def blank(path: Path, size_mib: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size_mib << 20)
    make_blank(path)
    return path


def test_it_is_empty_whole_and_the_same_each_time(tmp_path: Path) -> None:
    one, two = (blank(tmp_path / name, 64) for name in ("one", "two"))
    assert [
        line.split()[-1] for line in output("debugfs", "-R", "ls -p /", str(one)).split("/\n") if "lost" in line
    ] == []
    assert "Type: directory    Mode:  0755" in output("debugfs", "-R", "stat <2>", str(one))
    output("e2fsck", "-fn", str(one))
    assert len({hashlib.sha256(path.read_bytes()).hexdigest() for path in (one, two)}) == 1
    features = output("dumpe2fs", "-h", str(one))
    assert "Block size:               4096" in features and "has_journal" in features
    assert "Inode count:              4096" in features


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match="cannot be made"):
        blank(tmp_path / "tiny", 0)
