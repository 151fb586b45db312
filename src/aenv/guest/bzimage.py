"""From a distribution's bzImage to the uncompressed ELF kernel that QEMU's microvm and Firecracker start.

Source of the format: "The Linux/x86 Boot Protocol" (Documentation/arch/x86/boot.rst in the kernel tree):
the setup header starts at 0x1f1, and since protocol 2.08 it names where the compressed payload lies. The PVH
entry point is an ELF note of owner "Xen" and type 18 (XEN_ELFNOTE_PHYS32_ENTRY, Xen's elfnote.h).
"""

from __future__ import annotations

import lzma
import re
import struct
import zlib

import lz4.block
import zstandard

from aenv.guest.commands import GuestArtifactError

_SECTOR = 512
_HEADER_MAGIC = b"HdrS"
_FIRST_VERSION_WITH_PAYLOAD = 0x0208
_LZ4_LEGACY_BLOCK = 8 << 20
_PT_NOTE = 4
_PVH_NOTE_TYPE = 18
_HINT = "use an x86-64 bzImage or an uncompressed vmlinux built with CONFIG_PVH=y"


def is_bzimage(image: bytes) -> bool:
    """Whether the setup header's magic is where the boot protocol puts it."""
    return image[0x202:0x206] == _HEADER_MAGIC


def is_elf(image: bytes) -> bool:
    """Whether this is an ELF file."""
    return image[:4] == b"\x7fELF"


def payload(image: bytes) -> bytes:
    """The compressed kernel inside a bzImage.

    ``payload_offset`` counts from the start of the protected-mode code, which follows the boot sector and
    ``setup_sects`` sectors (zero means four).
    """
    if not is_bzimage(image):
        raise GuestArtifactError("not a Linux bzImage: the setup header is missing", hint=_HINT)
    (version,) = struct.unpack_from("<H", image, 0x206)
    if version < _FIRST_VERSION_WITH_PAYLOAD:
        raise GuestArtifactError(f"boot protocol {version:#06x} is older than 2.08", hint=_HINT)
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = ((image[0x1F1] or 4) + 1) * _SECTOR + offset
    if length == 0 or start + length > len(image):
        raise GuestArtifactError("the bzImage is cut short: its payload ends past the file", hint=_HINT)
    return image[start : start + length]


def decompress(data: bytes) -> bytes:
    """Undo any compression that the kernel build or a module package uses; uncompressed data is returned as is.

    The kernel build appends the uncompressed size (4 bytes) to every format but gzip, so what follows the
    end of the stream is ignored.
    """
    try:
        if data[:2] == b"\x1f\x8b":
            return zlib.decompressobj(wbits=31).decompress(data)
        if data[:6] == b"\xfd7zXZ\x00":
            return lzma.LZMADecompressor(lzma.FORMAT_XZ).decompress(data)
        if data[:4] == b"\x28\xb5\x2f\xfd":
            return zstandard.ZstdDecompressor().decompressobj().decompress(data)
        if data[:4] == b"\x02\x21\x4c\x18":
            return _lz4_legacy(data)
        if data[:3] == b"\x5d\x00\x00":
            return lzma.LZMADecompressor(lzma.FORMAT_ALONE).decompress(data)
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, lz4.block.LZ4BlockError, struct.error) as error:
        raise GuestArtifactError(f"compressed data is damaged: {error}", hint="fetch the package again") from error
    return data


def _lz4_legacy(data: bytes) -> bytes:
    """LZ4's legacy frame (lz4_Frame_format.md): a magic number, then blocks of up to 8 MiB, each with its size.

    The last four bytes are the uncompressed size that the kernel build appends: no block fits there.
    """
    blocks: list[bytes] = []
    at = 4
    while at + 4 < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        blocks.append(lz4.block.decompress(data[at + 4 : at + 4 + size], uncompressed_size=_LZ4_LEGACY_BLOCK))
        at += 4 + size
    return b"".join(blocks)


def vmlinux(image: bytes) -> bytes:
    """The bootable ELF kernel in a bzImage, or the image itself where it is one already.

    Raises GuestArtifactError where the result is not ELF or has no PVH entry point.
    """
    elf = image if is_elf(image) else decompress(payload(image))
    if not is_elf(elf):
        raise GuestArtifactError("the kernel's payload is in an unknown compression format", hint=_HINT)
    if not has_pvh_entry(elf):
        raise GuestArtifactError("the kernel has no PVH entry point", hint=_HINT)
    return elf


def has_pvh_entry(elf: bytes) -> bool:
    """Whether one of the 64-bit ELF file's notes is Xen's 32-bit physical entry point."""
    (table,) = struct.unpack_from("<Q", elf, 32)
    entry_size, count = struct.unpack_from("<HH", elf, 54)
    for index in range(count):
        kind, _, offset, _, _, size = struct.unpack_from("<IIQQQQ", elf, table + index * entry_size)
        if kind == _PT_NOTE and _PVH_NOTE_TYPE in _xen_notes(elf[offset : offset + size]):
            return True
    return False


def _xen_notes(segment: bytes) -> set[int]:
    """The types of the notes whose owner is Xen."""
    found: set[int] = set()
    at = 0
    while at + 12 <= len(segment):
        name_size, desc_size, kind = struct.unpack_from("<III", segment, at)
        name = segment[at + 12 : at + 12 + name_size].rstrip(b"\x00")
        if name == b"Xen":
            found.add(kind)
        at += 12 + (name_size + 3 & ~3) + (desc_size + 3 & ~3)
    return found


def release(elf: bytes) -> str:
    """What ``uname -r`` prints under this kernel, read from its version banner."""
    banner = re.search(rb"Linux version (\d[\x21-\x7e]*) ", elf)
    if banner is None:
        raise GuestArtifactError("the kernel image has no version banner", hint=_HINT)
    return banner.group(1).decode()
