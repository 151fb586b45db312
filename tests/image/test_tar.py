"""The archive reader against Python's and GNU's writers."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.image.compression import LayerStream
from aenv.image.errors import ArchiveError
from aenv.image.tar import MAX_EXTENSION, Entry, TarReader, parse_pax
from tests.image.writer import archive, compress, folder, hard_link, member, symlink

LONG = "long/" * 60 + "name"


class Bytes:
    """A stream that gives its data in small pieces."""

    def __init__(self, data: bytes, piece: int = 1000) -> None:
        self._file = io.BytesIO(data)
        self._piece = piece

    def read(self, size: int) -> bytes:
        return self._file.read(size)

    def pieces(self, size: int) -> Iterator[memoryview]:
        while size > 0 and (data := self._file.read(min(size, self._piece))):
            size -= len(data)
            yield memoryview(data)


def read(data: bytes) -> list[tuple[Entry, bytes]]:
    reader = TarReader(Bytes(data))
    found = []
    for entry in reader:
        content = bytearray(entry.size if entry.kind == b"0" else 0)
        if entry.kind == b"0":
            for offset, piece in reader.content(entry):
                content[offset : offset + len(piece)] = piece
        found.append((entry, bytes(content)))
    return found


texts = st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1, max_size=40)
members = st.builds(
    member,
    st.builds(lambda text, many: text.strip("/") + "/x" * many + "f", texts, st.integers(0, 90)),
    st.binary(max_size=2000),
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**32 - 2),
    gid=st.integers(0, 2**21),
    mtime=st.integers(0, 2**33),
)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@given(items=st.lists(members, max_size=5))
def test_reads_what_python_writes(form: int, items: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    found = read(archive(items, form))
    assert len(found) == len(items)
    for (entry, content), (info, data) in zip(found, items, strict=True):
        assert entry.name == info.name.encode() and content == data
        assert (entry.mode, entry.uid, entry.gid) == (info.mode, info.uid, info.gid)
        assert entry.mtime_ns == int(info.mtime) * 10**9


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_every_kind_of_member(form: int) -> None:
    items = [
        folder("d/", mode=0o1777),
        symlink("s", "../target"),
        hard_link("h", "d/file"),
        member("c", kind=tarfile.CHRTYPE, device=(5, 1)),
        member("b", kind=tarfile.BLKTYPE, device=(259, 3)),
        member("f", kind=tarfile.FIFOTYPE),
        member("n/" * 60 + "x", b"prefix"),
    ]
    if form != tarfile.USTAR_FORMAT:
        items += [symlink(LONG, LONG), member("r", b"1" * 513)]
    found = read(archive(items, form))
    assert [(entry.kind, entry.link.decode(), entry.device) for entry, _ in found] == [
        (info.type, info.linkname, (info.devmajor, info.devminor)) for info, _ in items
    ]
    assert [entry.name.rstrip(b"/") for entry, _ in found] == [info.name.rstrip("/").encode() for info, _ in items]


def test_attributes_and_times() -> None:
    pax = {
        "SCHILY.xattr.user.a": "x\n=1",
        "LIBARCHIVE.xattr.user.b%20c": "aGVsbG8",
        "LIBARCHIVE.xattr.user.a": "d3Jvbmc",
        "mtime": "-1.5",
    }
    entry, _ = read(archive([member("x", pax=pax)]))[0]
    assert entry.xattrs == {b"user.a": b"x\n=1", b"user.b c": b"hello"}
    assert entry.mtime_ns == -1_500_000_000


@pytest.mark.skipif(shutil.which("tar") is None, reason="GNU tar is not installed")
@pytest.mark.parametrize(
    "options", ["--format=gnu", *(f"--format=pax --sparse-version={v}" for v in ("0.0", "0.1", "1.0"))]
)
def test_sparse_files_of_gnu_tar(tmp_path: Path, options: str) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        for number in range(60):
            file.seek(number * 200_000)
            file.write(b"data %d" % number)
        file.truncate(20_000_000)
    (tmp_path / "plain").write_bytes(b"after")
    argv = ["tar", "-c", "-S", *options.split(), "-C", str(tmp_path), "sparse", "plain"]
    packed = subprocess.run(argv, check=True, capture_output=True).stdout
    assert len(packed) < 2_000_000
    found = read(packed)
    assert [entry.name for entry, _ in found] == [b"sparse", b"plain"]
    assert found[0][1] == (tmp_path / "sparse").read_bytes() and found[1][1] == b"after"
    assert found[0][0].segments


def test_damaged_archives_are_typed_errors() -> None:
    good = archive([member("a", b"x" * 1000), member(LONG, b"y")])
    for end in range(1, len(good) - 10240, 97):
        try:
            read(good[:end])
        except ArchiveError:
            continue
        assert end % 512 == 0
    with pytest.raises(ArchiveError, match="not a good tar"):
        read(b"not a tar archive".ljust(512, b"x") * 2)


@given(st.data())
def test_any_damage_is_a_typed_error(data: st.DataObject) -> None:
    good = bytearray(archive([member("a", b"x" * 10, pax={"SCHILY.xattr.user.a": "1"}), symlink("l", "a")]))
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, 4000))] = data.draw(st.integers(0, 255))
        for at in range(0, 4096, 512):  # so that what is behind the checksum is reached
            good[at + 148 : at + 156] = b" " * 8
            good[at + 148 : at + 156] = b"%06o\0 " % sum(good[at : at + 512])
    try:
        read(bytes(good))
    except ArchiveError:
        pass
    except MemoryError:
        raise AssertionError("a size was believed") from None


@given(st.binary(max_size=200))
def test_any_extended_header_is_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(ArchiveError):
        list(parse_pax(data))


def test_extended_headers_are_bounded() -> None:
    info, _ = member("x", kind=b"x")
    info.type, info.size = b"x", MAX_EXTENSION + 1
    with pytest.raises(ArchiveError, match="too large"):
        read(info.tobuf(tarfile.USTAR_FORMAT) + bytes(MAX_EXTENSION + 1024))


@pytest.mark.parametrize("how", ["none", "gzip", "zstd"])
def test_compressed_streams(tmp_path: Path, how: str) -> None:
    data = os.urandom(100_000) + bytes(3 << 20)
    path = tmp_path / "layer"
    path.write_bytes(
        compress(data[:90_000], how) + compress(data[90_000:], how) + (b"\0" * 100 if how == "gzip" else b"")
    )
    charged: list[int] = []
    with LayerStream(path, charged.append) as stream:
        assert stream.read(1000) == data[:1000]
        assert b"".join(stream.pieces(200_000)) == data[1000:201_000]
        stream.finish()
    assert sum(charged) == len(data)


@pytest.mark.parametrize("how", ["gzip", "zstd"])
def test_damaged_streams(tmp_path: Path, how: str) -> None:
    packed = bytearray(compress(os.urandom(50_000), how))
    packed[4:30] = b"\xff" * 26
    path = tmp_path / "layer"
    path.write_bytes(packed)
    with LayerStream(path, lambda count: None) as stream, pytest.raises(ArchiveError):
        stream.finish()
    if how == "gzip":
        path.write_bytes(compress(os.urandom(50_000), how)[:-5])
        with LayerStream(path, lambda count: None) as stream, pytest.raises(ArchiveError, match="cut off"):
            stream.finish()
