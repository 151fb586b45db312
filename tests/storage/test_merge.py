"""Merging disk layers keeps every layer's data."""

import subprocess
from pathlib import Path

import pytest

from aenv.errors import CorruptFileError
from aenv.storage.merge import merge_layers
from aenv.storage.qcow2 import backing_chain, create_overlay

CLUSTER = 65536


def io(path: Path, *commands: str, form: str = "qcow2") -> str:
    argv = ["qemu-io", "-f", form, *(part for command in commands for part in ("-c", command)), str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def content(path: Path, out: Path) -> bytes:
    subprocess.run(["qemu-img", "convert", "-O", "raw", path, out], check=True)
    return out.read_bytes()


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def test_layers_between_top_and_base_are_kept(tmp_path: Path) -> None:
    base = tmp_path / "base.raw"
    base.write_bytes(b"\x01" * (16 * CLUSTER))
    below = base
    for number in range(4):
        layer = tmp_path / f"layer{number}.qcow2"  # the disk is larger than its base image
        create_overlay(layer, below, 32 * CLUSTER, "qcow2" if number else "raw")
        # Each layer writes a place of its own, a place that the next one overwrites, and zeros over the base.
        io(layer, f"write -P {number + 16} {(number + 2) * CLUSTER} 512", f"write -P {number + 32} 0 4096")
        io(layer, f"write -z {(number + 8) * CLUSTER} {CLUSTER}", f"write -P 7 {(20 + number) * CLUSTER + 512} 1024")
        below = layer
    before = content(below, tmp_path / "before")
    merged = tmp_path / "merged.qcow2"
    await merge_layers(below, base, "raw", merged)
    assert content(merged, tmp_path / "after") == before
    assert backing_chain(merged) == [merged, base]
    assert not any(name.startswith(".") for name in names(tmp_path))


async def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    top = tmp_path / "top.qcow2"
    top.write_bytes(b"not an image")
    with pytest.raises(CorruptFileError, match="not a usable qcow2 image"):
        await merge_layers(top, tmp_path / "base.raw", "raw", tmp_path / "out")
    assert names(tmp_path) == ["top.qcow2"]
    base = tmp_path / "base.raw"
    base.write_bytes(bytes(CLUSTER))
    top.unlink()
    create_overlay(top, base, form="raw")
    image = bytearray(top.read_bytes())
    image[40:48] = b"\xff" * 8  # where its L1 table is
    top.write_bytes(image)
    with pytest.raises(CorruptFileError, match="cannot be merged"):
        await merge_layers(top, base, "raw", tmp_path / "out")
    assert sorted(names(tmp_path)) == ["base.raw", "top.qcow2"]


async def test_headers_lead_nowhere_else(tmp_path: Path) -> None:
    """They may have been written by a VMM that a guest had taken over, and the merge reads with all rights."""
    layers, host = tmp_path / "layers", tmp_path / "host"
    layers.mkdir()
    host.mkdir()
    secret = host / "secret"
    secret.write_bytes(b"secret".ljust(CLUSTER, b"."))
    base = layers / "base.raw"
    base.write_bytes(bytes(CLUSTER))
    create_overlay(layers / "evil.qcow2", secret, form="raw")
    create_overlay(layers / "top.qcow2", layers / "evil.qcow2")
    with pytest.raises(CorruptFileError, match="not a chain of layers"):
        await merge_layers(layers / "top.qcow2", base, "raw", layers / "out")
    create_overlay(layers / "other.qcow2", base, form="raw")
    image = bytearray((layers / "other.qcow2").read_bytes())
    image[79] |= 4  # incompatible feature: data in a file that a header extension names
    (layers / "other.qcow2").write_bytes(image)
    with pytest.raises(CorruptFileError, match="another file"):
        await merge_layers(layers / "other.qcow2", base, "raw", layers / "out")
    assert not (layers / "out").exists()
