"""Writes overlaybd-native images for the tests, as containerd's accelerated-container-image pushes them."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aenv.image.manifest import OCI_CONFIG, OCI_MANIFEST
from aenv.storage import layers
from aenv.storage.source import FileSource
from aenv.storage.zfile import write_zfile
from tests.image.writer import Image, digest_of

LABEL = "containerd.io/snapshot/overlaybd/"  # accelerated-container-image, pkg/label/label.go


def ext4(folder: Path, image: Path, size_mib: int) -> Path:
    """A file system with what is in ``folder``."""
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-d", folder, image], check=True)
    return image


def with_file(image: Path, out: Path, source: Path, name: str) -> Path:
    """A copy of a file system with one more file, executable."""
    subprocess.run(["cp", "--sparse=always", image, out], check=True)
    commands = f"write {source} {name}\nset_inode_field {name} mode 0100755\n"
    subprocess.run(["debugfs", "-w", "-f", "-", out], input=commands, text=True, check=True, capture_output=True)
    return out


def layer(states: tuple[Path | None, Path], work: Path, *, compressed: bool = True, wrapped: bool = True) -> bytes:
    """What a disk's second state has over the first (None: nothing), as a blob."""
    before, after = states
    plain, zipped = work / "plain", work / "zfile"
    if before is None:
        layers.from_flat(after, plain)
    else:
        with FileSource(before) as old, FileSource(after) as new:
            layers.difference(old, new, plain)
    if compressed:
        write_zfile(plain, zipped)
    data = (zipped if compressed else plain).read_bytes()
    if not wrapped:
        return data
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        info = tarfile.TarInfo("overlaybd.commit")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@dataclass
class NativeImage(Image):
    """``layers`` are blobs, from the bottom up."""

    annotations: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config: dict[str, Any] = {
            "os": "linux",
            "architecture": "amd64",
            "config": dict(self.config),
            "rootfs": {"type": "layers", "diff_ids": [digest_of(data) for data in self.layers]},
        }
        entries = []
        for data in self.layers:
            entry = self._add(data, "application/vnd.oci.image.layer.v1.tar")
            notes = {
                f"{LABEL}blob-digest": digest_of(data),
                f"{LABEL}blob-size": str(len(data)),
                f"{LABEL}version": "0.1.0",
                **self.annotations,
            }
            entries.append({**entry, "annotations": notes})
        value = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": self._add(json.dumps(config).encode(), OCI_CONFIG),
            "layers": entries,
        }
        self.manifest = json.dumps(value).encode()


def unpacked(archives: Sequence[bytes], folder: Path) -> Path:
    """The files of plain archives, for ``ext4``."""
    folder.mkdir(exist_ok=True)
    for data in archives:
        subprocess.run(["tar", "-xpf", "-", "-C", folder], input=data, check=True)
    return folder
