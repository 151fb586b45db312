"""qcow2 overlays of our own, checked with QEMU's tools."""

import contextlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import CorruptFileError
from aenv.storage import qcow2

needs_qemu_img = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img")


def raw(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def info(path: Path) -> dict[str, object]:
    output = subprocess.run(["qemu-img", "info", "--output=json", path], check=True, capture_output=True)
    parsed: dict[str, object] = json.loads(output.stdout)
    return parsed


@needs_qemu_img
@pytest.mark.parametrize("size", [512, 1 << 20, (4 << 30) + 512, 5 << 40])
def test_qemu_img_agrees(tmp_path: Path, size: int) -> None:
    base = raw(tmp_path / "base", 1 << 20)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    qcow2.create_overlay(ours, base, size, "raw")
    command = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(base), "-F", "raw", str(theirs), str(size)]
    subprocess.run(command, check=True)
    subprocess.run(["qemu-img", "check", "-q", ours], check=True)
    keys = ("virtual-size", "cluster-size", "format", "backing-filename", "backing-filename-format")
    assert {k: info(ours)[k] for k in keys} == {k: info(theirs)[k] for k in keys}
    subprocess.run(["qemu-img", "compare", "-q", ours, theirs], check=True)
    assert qcow2.read_header(ours) == qcow2.read_header(theirs)


@needs_qemu_img
def test_it_can_be_written(tmp_path: Path) -> None:
    base = raw(tmp_path / "base", 8 << 20)
    qcow2.create_overlay(tmp_path / "a", base, form="raw")
    subprocess.run(["qemu-io", "-c", "write -P 7 1M 2M", tmp_path / "a"], check=True, capture_output=True)
    subprocess.run(["qemu-img", "check", "-q", tmp_path / "a"], check=True)
    qcow2.create_overlay(tmp_path / "b", tmp_path / "a")
    read = subprocess.run(["qemu-io", "-c", "read -P 7 1M 2M", tmp_path / "b"], check=True, capture_output=True)
    assert b"Pattern verification failed" not in read.stdout


def test_chain_and_size(tmp_path: Path) -> None:
    base = raw(tmp_path / "base", (1 << 20) + 1)
    qcow2.create_overlay(tmp_path / "a", base, form="raw")
    qcow2.create_overlay(tmp_path / "b", tmp_path / "a")
    header = qcow2.read_header(tmp_path / "b")
    assert (header.size, header.backing, header.backing_format) == ((1 << 20) + 512, tmp_path / "a", "qcow2")
    assert qcow2.backing_chain(tmp_path / "b") == [tmp_path / "b", tmp_path / "a", base]
    assert (tmp_path / "b").stat().st_blocks * 512 <= 16384, "an idle overlay is small"
    with pytest.raises(FileExistsError):
        qcow2.create_overlay(tmp_path / "b", base, form="raw")
    base.unlink()
    with pytest.raises(CorruptFileError, match="missing"):
        qcow2.backing_chain(tmp_path / "b")


def test_loops_are_found(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(qcow2.encode_overlay(1 << 20, str(tmp_path / "b"), "qcow2"))
    qcow2.create_overlay(tmp_path / "b", tmp_path / "a")
    with pytest.raises(CorruptFileError, match="loops"):
        qcow2.backing_chain(tmp_path / "b")


def test_a_raw_disk_that_looks_like_an_image_is_raw(tmp_path: Path) -> None:
    """A guest writes what it likes to the first sectors of its disk: the name of a file of the host, for one."""
    disk = raw(tmp_path / "disk", 1 << 20)
    disk.write_bytes(qcow2.encode_overlay(1 << 20, "/etc/shadow", "raw").ljust(1 << 20, b"\0"))
    qcow2.create_overlay(tmp_path / "a", disk, form="raw")
    assert qcow2.read_header(tmp_path / "a").backing_format == "raw"
    assert qcow2.backing_chain(tmp_path / "a") == [tmp_path / "a", disk]


@given(st.binary(max_size=300))
def test_junk(junk: bytes) -> None:
    for data in (junk, qcow2.MAGIC + junk, qcow2.MAGIC + b"\0\0\0\3" + junk):
        try:
            header = qcow2.parse_header(data, Path("/x"))
            assert header.version in (2, 3)
        except CorruptFileError:
            pass


@given(st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=300)
def test_damage(position: int, value: int) -> None:
    blob = bytearray(qcow2.encode_overlay(1 << 30, "/some/base", "raw"))
    blob[position] = value
    with contextlib.suppress(CorruptFileError):
        qcow2.parse_header(bytes(blob), Path("/x"))


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(ValueError, match="longer"):
        qcow2.encode_overlay(1 << 20, "/" + "x" * 1024, "raw")
