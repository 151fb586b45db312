"""The FUSE kernel protocol, as far as a read-only file system needs it: bytes to values and back. Pure.

Structures and numbers are those of Linux's ``include/uapi/linux/fuse.h``, protocol 7.38 (Linux 6.2); all of them are
in 7.31 (Linux 5.4) already unless said otherwise. Integers have the host's order, which is little-endian on every
host that AgentENV runs on.
"""

import errno
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, IntFlag

ROOT = 1  # FUSE_ROOT_ID
MAJOR, MINOR = 7, 38
MIN_MINOR = 31
MIN_READ_BUFFER = 8192  # the kernel refuses a read(2) of the device with less room
MAX_WRITE = 4096  # the smallest allowed; nothing is ever written
PAGE = 4096

IN_HEADER = struct.Struct("<IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding
OUT_HEADER = struct.Struct("<IiQ")  # len, error, unique
READ_IN = struct.Struct("<QQII")  # fh, offset, size, read_flags; lock_owner and flags follow
FH_IN = struct.Struct("<Q")  # how fuse_release_in and others begin
OPEN_IN = struct.Struct("<II")
LSEEK_IN = struct.Struct("<QQII")
INIT_IN = struct.Struct("<IIII")  # major, minor, max_readahead, flags; flags2 follows since 7.36
INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
ENTRY_OUT = struct.Struct("<QQQQII")
ATTR_OUT = struct.Struct("<QII")
OPEN_OUT = struct.Struct("<QiI")
STATFS_OUT = struct.Struct("<QQQQQIIII24x")
DIRENT = struct.Struct("<QQII")
INVAL_INODE_OUT = struct.Struct("<Qqq")

NOTIFY_INVAL_INODE = 2
NOTIFY_RESEND = 7  # Linux 6.9: the kernel sends again what it was not answered
RESENT = 1 << 63  # set in ``unique`` of a request that was sent again

FOPEN_KEEP_CACHE = 1 << 1
S_IFDIR, S_IFREG = 0o040000, 0o100000
DT_DIR, DT_REG = 4, 8

FOREVER = 1 << 30  # seconds for which the kernel may believe an attribute: files never change


class Op(IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    STATFS = 17
    RELEASE = 18
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42
    LSEEK = 46


# Numbers rather than the enumeration: compared once per request.
NO_REPLY = frozenset({int(Op.FORGET), int(Op.INTERRUPT), int(Op.BATCH_FORGET)})
# What would change something: SETATTR, SYMLINK .. LINK, WRITE, SETXATTR, REMOVEXATTR, CREATE, FALLOCATE, RENAME2,
# COPY_FILE_RANGE, TMPFILE.
MODIFYING = frozenset({4, 6, 8, 9, 10, 11, 12, 13, 16, 21, 24, 35, 43, 45, 47, 51})


class Flag(IntFlag):
    """Of INIT; those above bit 31 travel in ``flags2``."""

    ASYNC_READ = 1 << 0
    ASYNC_DIO = 1 << 15
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    INIT_EXT = 1 << 30
    HAS_RESEND = 1 << 39


WANTED = Flag.ASYNC_READ | Flag.ASYNC_DIO | Flag.PARALLEL_DIROPS | Flag.MAX_PAGES | Flag.INIT_EXT | Flag.HAS_RESEND


class FuseError(Exception):
    """A request is answered with an error number."""

    def __init__(self, number: int) -> None:
        super().__init__(errno.errorcode.get(number, str(number)))
        self.number = number


@dataclass(frozen=True, slots=True)
class Session:
    """What was agreed with the kernel when the mount was made; holds as long as the mount."""

    minor: int
    flags: int
    max_pages: int  # of one request

    @property
    def resends(self) -> bool:
        return bool(self.flags & Flag.HAS_RESEND)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What stat(2) shows of a file or the root. Times in seconds since 1970."""

    inode: int
    size: int
    mode: int
    uid: int
    time: int
    links: int = 1


def initialise(request: bytes | memoryview, max_pages: int, max_background: int) -> tuple[bytes, Session]:
    """The answer to INIT, and what was agreed. ``max_pages`` is the largest request wanted.

    Raises FuseError(EPROTO) for a kernel that is too old, or bytes that are no INIT.
    """
    if len(request) < IN_HEADER.size + INIT_IN.size:
        raise FuseError(errno.EPROTO)
    _, opcode, unique, *_ = IN_HEADER.unpack_from(request)
    major, minor, readahead, flags = INIT_IN.unpack_from(request, IN_HEADER.size)
    if opcode != Op.INIT or major != MAJOR or minor < MIN_MINOR:
        raise FuseError(errno.EPROTO)
    if flags & Flag.INIT_EXT and len(request) >= IN_HEADER.size + INIT_IN.size + 4:
        flags |= struct.unpack_from("<I", request, IN_HEADER.size + INIT_IN.size)[0] << 32
    agreed = flags & int(WANTED)
    pages = max_pages if agreed & Flag.MAX_PAGES else 32  # FUSE_DEFAULT_MAX_PAGES_PER_REQ
    session = Session(min(minor, MINOR), agreed, pages)
    body = INIT_OUT.pack(
        MAJOR, session.minor, readahead, agreed & 0xFFFFFFFF, max_background, max_background * 3 // 4,
        MAX_WRITE, 1, pages, 0, agreed >> 32,
    )  # fmt: skip
    return reply_header(unique, len(body)) + body, session


def reply_header(unique: int, length: int) -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size + length, 0, unique)


def error_reply(unique: int, number: int) -> bytes:
    return OUT_HEADER.pack(OUT_HEADER.size, -number, unique)


def attributes(a: Attributes) -> bytes:
    blocks = -(-a.size // 512)
    return ATTR.pack(a.inode, a.size, blocks, a.time, a.time, a.time, 0, 0, 0, a.mode, a.links, a.uid, 0, 0, PAGE, 0)


def entry_reply(a: Attributes) -> bytes:
    """Of LOOKUP. The kernel must not remember the name: it may be given to another file later."""
    return ENTRY_OUT.pack(a.inode, 0, 0, FOREVER, 0, 0) + attributes(a)


def attributes_reply(a: Attributes) -> bytes:
    return ATTR_OUT.pack(FOREVER if a.inode != ROOT else 0, 0, 0) + attributes(a)


def open_reply(handle: int, flags: int = FOPEN_KEEP_CACHE) -> bytes:
    """The kernel keeps what it has cached of the file from earlier opens: contents never change."""
    return OPEN_OUT.pack(handle, flags, 0)


def statfs_reply(total: int, files: int) -> bytes:
    """``total`` bytes, none of them free."""
    return STATFS_OUT.pack(-(-total // PAGE), 0, 0, files, 0, PAGE, 255, PAGE, 0)


def directory_reply(entries: Iterable[tuple[int, int, bytes, bool]], size: int) -> bytes:
    """Entries are (position of the next, inode, name, whether a folder); as many as ``size`` bytes hold."""
    parts: list[bytes] = []
    room = size
    for position, inode, name, folder in entries:
        length = DIRENT.size + len(name)
        padded = -(-length // 8) * 8
        if padded > room:
            break
        head = DIRENT.pack(inode, position, len(name), DT_DIR if folder else DT_REG)
        parts.append((head + name).ljust(padded, b"\0"))
        room -= padded
    return b"".join(parts)


def forget_pages(inode: int) -> bytes:
    """A message to the kernel: drop what is cached of a file."""
    body = INVAL_INODE_OUT.pack(inode, 0, -1)
    return OUT_HEADER.pack(OUT_HEADER.size + len(body), NOTIFY_INVAL_INODE, 0) + body


def resend() -> bytes:
    """A message to the kernel: send again what was read and not answered (``Flag.HAS_RESEND``)."""
    return OUT_HEADER.pack(OUT_HEADER.size, NOTIFY_RESEND, 0)
