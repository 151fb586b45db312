"""bzImage to vmlinux, on synthetic images laid out as the boot protocol says."""

import gzip
import lzma
import struct
from collections.abc import Callable

import lz4.block
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from aenv.guest import bzimage
from aenv.guest.commands import GuestArtifactError
from tests.guest import elf

KERNEL = elf.with_note(b"Xen", 18, banner=b"Linux version 6.12.9+deb-cloud (builder) #1\n\x00")


def image(payload: bytes, *, sectors: int = 4, offset: int = 100, version: int = 0x20F) -> bytes:
    """A bzImage whose protected-mode code has ``payload`` at ``offset``."""
    boot = bytearray(((sectors or 4) + 1) * 512)
    boot[0x1F1] = sectors
    boot[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", boot, 0x206, version)
    struct.pack_into("<II", boot, 0x248, offset, len(payload))
    return bytes(boot) + b"\xcc" * offset + payload + b"after"


def lz4_legacy(data: bytes) -> bytes:
    block: bytes = lz4.block.compress(data, store_size=False)
    return b"\x02\x21\x4c\x18" + struct.pack("<I", len(block)) + block


def size(data: bytes) -> bytes:
    return struct.pack("<I", len(data))


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "xz": lambda data: lzma.compress(data, lzma.FORMAT_XZ) + size(data),
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE) + size(data),
    "zstd": lambda data: zstandard.compress(data) + size(data),
    "lz4": lambda data: lz4_legacy(data) + size(data),
}


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("sectors", [0, 1, 39])
def test_vmlinux_from_each_compression(compression: str, sectors: int) -> None:
    assert bzimage.vmlinux(image(COMPRESSIONS[compression](KERNEL), sectors=sectors)) == KERNEL


@given(st.binary(max_size=2000), st.sampled_from(sorted(COMPRESSIONS)))
def test_decompress_ignores_the_appended_size(data: bytes, compression: str) -> None:
    assert bzimage.decompress(COMPRESSIONS[compression](data)) == data


def test_an_elf_kernel_is_used_as_it_is() -> None:
    assert bzimage.vmlinux(KERNEL) is KERNEL
    assert bzimage.release(KERNEL) == "6.12.9+deb-cloud"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a Linux bzImage"),
        (b"#!/bin/sh\n" * 200, "not a Linux bzImage"),
        (image(b"x", version=0x207), "older than 2.08"),
        (image(gzip.compress(KERNEL))[:-50], "cut short"),
        (image(b""), "cut short"),
        (image(b"unknown format"), "unknown compression"),
        (image(gzip.compress(elf.with_note(b"GNU", 18))), "no PVH"),
        (image(gzip.compress(elf.with_note(b"Xen", 5))), "no PVH"),
        (image(COMPRESSIONS["xz"](KERNEL)[:40] + b"\xff" * 40), "damaged"),
    ],
)
def test_what_is_not_a_kernel_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(GuestArtifactError, match=message):
        bzimage.vmlinux(data)
