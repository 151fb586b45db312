"""Layers and ZFiles against overlaybd's own C++ code, where a driver of it was built.

``AENV_OVERLAYBD_DRIVER`` names the driver; ``overlaybd/CMakeLists.txt`` says how it is built.
"""

import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from aenv.storage import layers, lsmt, zfile
from aenv.storage.source import FileSource
from aenv.storage.stack import LayerView, Stack, open_layer
from tests.storage import spec

DRIVER = os.environ.get("AENV_OVERLAYBD_DRIVER", "")
pytestmark = pytest.mark.skipif(not DRIVER, reason="AENV_OVERLAYBD_DRIVER names no driver of overlaybd")

SIZE = 16 << 20
SECTOR = 512
KINDS = [None, ("lz4", 4096), ("zstd", 32768), ("lz4", 32768), ("zstd", 16384)]


def overlaybd(*argv: object, text: str = "") -> None:
    subprocess.run([DRIVER, *map(str, argv)], input=text.encode(), check=True)


def generated(length: int, seed: int) -> bytes:
    """The driver's data: 64 equal bytes after each step of its generator."""
    out = bytearray()
    value = seed
    while len(out) < length:
        value = (value * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        out += bytes([value >> 56]) * 64
    return bytes(out[:length])


def script(rng: random.Random, disk: bytearray) -> str:
    """Writes and trims, also of single sectors, also over each other; they are done to ``disk`` as well."""
    lines = []
    for _ in range(rng.randrange(1, 60)):
        length = SECTOR * rng.choice([1, 3, 8, 64, 3000])
        offset = rng.randrange(0, (SIZE - length) // SECTOR + 1) * SECTOR
        if rng.random() < 0.3:
            lines.append(f"z {offset} {length}")
            disk[offset : offset + length] = bytes(length)
        else:
            seed = rng.randrange(1 << 62)
            lines.append(f"w {offset} {length} {seed}")
            disk[offset : offset + length] = generated(length, seed)
    return "\n".join(lines) + "\n"


def test_we_read_what_overlaybd_writes(tmp_path: Path) -> None:
    rng = random.Random(1)
    disk = bytearray(SIZE)
    views: list[LayerView] = []
    for number in range(10):
        kind = KINDS[number % len(KINDS)]
        options = [kind[0], kind[1] // 1024] if kind else []
        overlaybd("commit", tmp_path / f"layer{number}", SIZE, *options, text=script(rng, disk))
        view = open_layer(FileSource(tmp_path / f"layer{number}"))
        assert isinstance(view.source, zfile.ZFileSource) is (kind is not None)
        views.append(view)
    assert Stack(views).read(0, SIZE) == disk
    layers.compact(views, tmp_path / "compacted", bottom=True)
    overlaybd("read", tmp_path / "flat", tmp_path / "compacted")
    assert (tmp_path / "flat").read_bytes() == disk


def test_overlaybd_reads_what_we_write(tmp_path: Path) -> None:
    rng = random.Random(2)
    disk = bytearray(SIZE)
    paths: list[Path] = []
    for number in range(10):
        path = tmp_path / f"layer{number}"
        with lsmt.LayerWriter(path, SIZE) as writer:
            at = rng.randrange(0, 100) * SECTOR
            while at < SIZE:
                length = min(SIZE - at, SECTOR * rng.choice([1, 8, 64, 30000]))
                offsets, lengths = np.array([at], dtype=np.uint64), np.array([length], dtype=np.uint64)
                if rng.random() < 0.3:
                    writer.add_zeroed(offsets, lengths)
                    disk[at : at + length] = bytes(length)
                else:
                    data = generated(length, rng.randrange(1 << 62))
                    writer.add(offsets, lengths, data)
                    disk[at : at + length] = data
                at += length + rng.randrange(1, 3000) * SECTOR
            writer.commit()
        if kind := KINDS[number % len(KINDS)]:
            path = tmp_path / f"zfile{number}"
            zfile.write_zfile(tmp_path / f"layer{number}", path, algo=kind[0], block_size=kind[1])  # type: ignore[arg-type]
            overlaybd("verify", path)
        paths.append(path)
    overlaybd("read", tmp_path / "flat", *paths)
    assert (tmp_path / "flat").read_bytes() == disk


@pytest.mark.parametrize("algorithm", ["lz4", "zstd"])
@pytest.mark.parametrize("block", [4096, 32768, 65536])
def test_zfiles_of_any_bytes(tmp_path: Path, algorithm: zfile.Algorithm, block: int) -> None:
    """Both ways. Incompressible blocks of 64 KiB are too long for overlaybd's buffer, also when it wrote them."""
    rng = random.Random(3)
    plain = b"hello world " * 200_000 + (rng.randbytes(1_000_000) if block < 65536 else b"") + b"end"
    (tmp_path / "plain").write_bytes(plain)
    zfile.write_zfile(tmp_path / "plain", tmp_path / "ours", algo=algorithm, block_size=block)
    overlaybd("verify", tmp_path / "ours")
    overlaybd("extract", tmp_path / "ours", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == plain
    overlaybd("compress", tmp_path / "plain", tmp_path / "theirs", algorithm, block // 1024)
    with FileSource(tmp_path / "theirs") as file:
        theirs = zfile.ZFileSource(file)
        assert theirs.read(0, theirs.size) == plain


def test_the_second_implementation_agrees_with_overlaybd(tmp_path: Path) -> None:
    """``spec.py`` stands for overlaybd where its driver is not built."""
    disk = bytearray(SIZE)
    overlaybd("commit", tmp_path / "plain", SIZE, text=script(random.Random(4), disk))
    assert spec.read_layers([(tmp_path / "plain").read_bytes()]) == disk
    overlaybd("compress", tmp_path / "plain", tmp_path / "zfile", "zstd", 4)
    assert spec.read_zfile((tmp_path / "zfile").read_bytes()) == (tmp_path / "plain").read_bytes()
    (tmp_path / "mine").write_bytes(spec.write_zfile(bytes(disk[:300_000]), "lz4", 4096, checksums=True))
    overlaybd("extract", tmp_path / "mine", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == disk[:300_000]
