"""Disks of converted images, as plain files and as trees of files."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from aenv.config import Settings
from aenv.image.layerstore import LayerStore, StoredLayer
from aenv.image.rootfs import ConvertedImage, pull_image
from aenv.storage.runs import ZERO
from aenv.storage.source import FileSource
from aenv.storage.stack import Stack, open_layer


async def pull(name: str, settings: Settings, size_mib: int, **more: object) -> ConvertedImage:
    found = await pull_image(name, settings.home, size_mib=size_mib, settings=settings, **more)  # type: ignore[arg-type]
    assert isinstance(found, ConvertedImage)
    return found


def paths(home: Path, layers: tuple[StoredLayer, ...]) -> list[Path]:
    store = LayerStore(home)
    return [store.path(layer.digest) for layer in layers]


def flat(home: Path, image: ConvertedImage, out: Path) -> Path:
    """The disk as a sparse file."""
    with ExitStack() as stack, out.open("wb") as file:
        views = [open_layer(stack.enter_context(FileSource(path))) for path in paths(home, image.layers)]
        disk = Stack(views)
        assert disk.size == image.size
        file.truncate(disk.size)
        runs = disk.runs
        for start, end, layer in zip(runs.start.tolist(), runs.end.tolist(), runs.layer.tolist(), strict=True):
            if layer != ZERO:
                file.seek(start)
                file.write(disk.read(start, end - start))
    return out


@contextmanager
def mounted(disk: Path, folder: Path) -> Iterator[Path]:
    """The files on a disk."""
    folder.mkdir()
    options = "loop,ro,noload,nosuid,nodev,noexec"
    subprocess.run(["mount", "-t", "ext4", "-o", options, disk, folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
        folder.rmdir()
