"""The guest's initramfs: envd as ``/init`` and the kernel modules it loads, as one newc cpio archive.

Format: Documentation/driver-api/early-userspace/buffer-format.rst in the kernel tree. The result is a function
of its input alone (inode numbers count up, times and owners are zero), so its digest names it.

Under ``-M microvm,acpi=on`` QEMU puts the ACPI tables directly after the initrd; where the initrd's size is
not a whole number of pages they overlap and the guest spins in ``acpi_ut_verify_checksum``. The archive is
therefore padded with zeros, which the kernel skips.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aenv.guest.commands import GuestArtifactError
from aenv.guest.modules import Module

PAGE = 4096
_MAGIC = b"070701"
_TRAILER = "TRAILER!!!"
_HEADER_SIZE = 110


@dataclass(frozen=True)
class Entry:
    """One file of an archive. ``mode`` holds type and permissions; ``device`` is a node's (major, minor)."""

    path: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def _pad4(length: int) -> bytes:
    return b"\x00" * (-length % 4)


def _record(entry: Entry, inode: int) -> bytes:
    name = entry.path.encode() + b"\x00"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    fields = (inode, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0)
    head = _MAGIC + b"".join(b"%08X" % field for field in fields) + name
    return head + _pad4(len(head)) + entry.data + _pad4(len(entry.data))


def write_cpio(entries: Iterable[Entry]) -> bytes:
    """The archive of ``entries`` in their order, padded to whole pages. Paths are relative to the root."""
    parts = [_record(entry, inode) for inode, entry in enumerate(entries, start=1)]
    parts.append(_record(Entry(_TRAILER, 0), 0))
    size = sum(map(len, parts))
    return b"".join((*parts, b"\x00" * (-size % PAGE)))


def read_cpio(archive: bytes) -> Iterator[Entry]:
    """The entries of a newc archive up to its trailer.

    Raises GuestArtifactError where the archive is damaged.
    """
    at = 0
    while True:
        header = archive[at : at + _HEADER_SIZE]
        if len(header) < _HEADER_SIZE or header[:6] != _MAGIC:
            raise GuestArtifactError("the initramfs is damaged", hint="remove it: it is built again")
        field = [int(header[6 + 8 * index : 14 + 8 * index], 16) for index in range(13)]
        mode, size, device, name_size = field[1], field[6], (field[9], field[10]), field[11]
        name = archive[at + _HEADER_SIZE : at + _HEADER_SIZE + name_size - 1].decode()
        at += _HEADER_SIZE + name_size
        at += -at % 4
        if name == _TRAILER:
            return
        yield Entry(name, mode, archive[at : at + size], device)
        at += size + -size % 4


def guest_entries(envd: bytes, modules: Iterable[Module]) -> list[Entry]:
    """What is in the guest's initramfs. ``/modules/order`` has one file name per line, in load order."""
    modules = list(modules)
    directories = [Entry(name, stat.S_IFDIR | 0o755) for name in ("dev", "proc", "sys", "run", "newroot", "modules")]
    order = "".join(f"{module.name}.ko\n" for module in modules).encode()
    return [
        *directories,
        # The kernel opens this for init's standard streams before anything can mount devtmpfs.
        Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1)),
        Entry("modules/order", stat.S_IFREG | 0o644, order),
        *(Entry(f"modules/{module.name}.ko", stat.S_IFREG | 0o644, module.data) for module in modules),
        Entry("init", stat.S_IFREG | 0o755, envd),
    ]
