"""Layers within tar archives."""

import io
import tarfile
from pathlib import Path

import pytest

from aenv.errors import CorruptFileError
from aenv.storage import layers
from aenv.storage.source import FileSource
from aenv.storage.stack import Stack, open_layer
from aenv.storage.tarred import unwrapped
from aenv.storage.zfile import write_zfile


def wrapped(data: bytes, form: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as tar:
        info = tarfile.TarInfo("overlaybd.commit")
        info.size = len(data)
        tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("compressed", [True, False])
def test_a_wrapped_layer_reads_as_the_layer(tmp_path: Path, form: int, compressed: bool) -> None:
    content = bytes(range(256)) * 64 + bytes(1 << 20) + b"end".ljust(4096)
    (tmp_path / "flat").write_bytes(content)
    layers.from_flat(tmp_path / "flat", tmp_path / "layer")
    if compressed:
        write_zfile(tmp_path / "layer", tmp_path / "blob")
    else:
        (tmp_path / "layer").rename(tmp_path / "blob")
    (tmp_path / "tar").write_bytes(wrapped((tmp_path / "blob").read_bytes(), form))
    with FileSource(tmp_path / "tar") as source, FileSource(tmp_path / "blob") as bare:
        assert unwrapped(bare) is bare
        stack = Stack([open_layer(source)])
        assert stack.size == len(content) and stack.read(0, len(content)) == content
        with pytest.raises(CorruptFileError):
            unwrapped(source).read(unwrapped(source).size, 1)


@pytest.mark.parametrize(
    "damage", [(124, b"77777777777\0"), (124, b"garbage\0\0\0\0\0"), (124, b"\0" * 12), (156, b"5")]
)
def test_an_archive_that_does_not_hold_its_layer(tmp_path: Path, damage: tuple[int, bytes]) -> None:
    at, data = damage
    archive = bytearray(wrapped(bytes(10_000)))
    archive[at : at + len(data)] = data
    (tmp_path / "tar").write_bytes(archive)
    with FileSource(tmp_path / "tar") as source, pytest.raises(CorruptFileError):
        unwrapped(source)
