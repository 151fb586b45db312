"""The initramfs writer: what is written is read back, by us and by any newc reader, and pages are whole."""

import shutil
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.guest.commands import GuestArtifactError
from aenv.guest.initramfs import PAGE, Entry, guest_entries, read_cpio, write_cpio
from aenv.guest.modules import Module

names = st.text(st.characters(min_codepoint=0x21, exclude_categories=["Cs"]), min_size=1, max_size=40)
entries = st.lists(
    st.builds(
        Entry,
        path=names.filter(lambda name: name != "TRAILER!!!"),
        mode=st.sampled_from([stat.S_IFREG | 0o644, stat.S_IFDIR | 0o755, stat.S_IFCHR | 0o600]),
        data=st.binary(max_size=300),
        device=st.tuples(st.integers(0, 255), st.integers(0, 255)),
    ),
    max_size=8,
)


@given(entries)
def test_what_is_written_is_read_back(wanted: list[Entry]) -> None:
    archive = write_cpio(wanted)
    assert len(archive) % PAGE == 0
    assert list(read_cpio(archive)) == wanted


def test_guest_archive() -> None:
    modules = [Module("a", b"A" * 5, ()), Module("b", b"B", ("a",))]
    archive = write_cpio(guest_entries(b"\x7fELF envd", modules))
    found = {entry.path: entry for entry in read_cpio(archive)}
    assert found["init"].mode == stat.S_IFREG | 0o755
    assert found["init"].data == b"\x7fELF envd"
    assert found["modules/order"].data == b"a.ko\nb.ko\n"
    assert found["modules/b.ko"].data == b"B"
    assert found["dev/console"].device == (5, 1)
    assert archive == write_cpio(guest_entries(b"\x7fELF envd", modules))


@pytest.mark.skipif(shutil.which("cpio") is None, reason="cpio is not installed")
def test_cpio_reads_it(tmp_path: Path) -> None:
    archive = write_cpio(guest_entries(b"envd", [Module("a", b"A", ())]))
    listed = subprocess.run(["cpio", "-t"], input=archive, capture_output=True, check=True).stdout.decode()
    assert {"init", "modules/order", "modules/a.ko", "dev/console"} <= set(listed.split())


def test_a_damaged_archive_is_refused() -> None:
    archive = bytearray(write_cpio(guest_entries(b"envd", [])))
    archive[0] = 0
    with pytest.raises(GuestArtifactError, match="damaged"):
        list(read_cpio(bytes(archive)))
