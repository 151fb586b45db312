"""What the mount answers to each request of the kernel. No descriptors here: bytes in, bytes out."""

import errno
import os
import struct
import time
from collections.abc import Callable

import structlog

from aenv.errors import AenvError
from aenv.storage.cacheaccount import Account, charge
from aenv.storage.layerd import protocol
from aenv.storage.layerd.exports import Export, Exports
from aenv.storage.layerd.library import Library
from aenv.storage.layerd.mount import ReadAhead
from aenv.storage.layerd.protocol import Attributes, FuseError, Op
from aenv.storage.layerd.shared import Shared
from aenv.storage.layerd.touched import Touched

log = structlog.get_logger()

LARGEST_READ = 1 << 20
# The kernel's read-ahead (docs/internals/layer-server.md): around each page fault into a memory, where more is mostly
# fetched in vain, and ahead of read(2) in order, which scattered reads do not set off.
MAPPED_KIB, SEQUENTIAL_KIB = 32, 1024

Payload = bytes | bytearray | memoryview


class Filesystem:
    """One flat folder of read-only files. Thread-safe.

    ``gone`` is called with an export that was hidden and that nobody has open any more.
    """

    def __init__(
        self,
        exports: Exports,
        library: Library,
        shared: Shared,
        read_ahead: ReadAhead,
        gone: Callable[[Export], None],
    ) -> None:
        self._exports = exports
        self._library = library
        self._shared = shared
        self._read_ahead = read_ahead
        self._gone = gone
        self._uid = os.getuid()
        # Written to once, so that its pages exist: a copy from pages that do not is cut short by SIGKILL.
        self._zeros = memoryview(bytes(bytearray(b"\1") * LARGEST_READ).replace(b"\1", b"\0"))
        self.accounts: dict[int, Account] = {}
        self.touched: dict[int, Touched] = {}
        self._complained: dict[int, float] = {}
        self._calls: dict[int, Callable[[int, int, memoryview], bytes]] = {
            Op.LOOKUP: self._lookup,
            Op.GETATTR: self._getattr,
            Op.OPEN: self._open,
            Op.RELEASE: self._release,
            Op.OPENDIR: lambda *_: protocol.open_reply(0, 0),
            Op.READDIR: self._readdir,
            Op.RELEASEDIR: lambda *_: b"",
            Op.STATFS: self._statfs,
            Op.LSEEK: self._lseek,
            Op.DESTROY: lambda *_: b"",
        }

    def answer(self, opcode: int, node: int, unique: int, body: memoryview) -> Payload:
        """The payload of the reply. Raises FuseError."""
        if opcode == Op.READ:
            _, offset, size, _ = protocol.READ_IN.unpack_from(body)
            return self.read(node, offset, size)
        call = self._calls.get(opcode)
        if call is None:
            raise FuseError(errno.EROFS if opcode in protocol.MODIFYING else errno.ENOSYS)
        return call(node, unique, body)

    def read(self, inode: int, offset: int, size: int) -> Payload:
        """Bytes of a file; fewer than ``size`` at its end. Raises FuseError(EIO) for this read alone."""
        export = self._find(inode)
        length = min(size, export.virtual_size - offset)
        if length <= 0:
            return b""
        account = self.account(export)
        charge(account)
        try:
            data = self._library.open(export).read(offset, length)
        except (AenvError, OSError, MemoryError) as error:
            account.add(errors=1)
            self._complain(export, offset, length, error)
            raise FuseError(errno.EIO) from error
        self.touched[inode].add(offset, length)
        account.add(asked=length)
        return self._zeros[:length] if data is None else data

    def _complain(self, export: Export, offset: int, length: int, error: Exception) -> None:
        """Once per second and file: a guest may repeat its reads for hours."""
        now = time.monotonic()
        if now > self._complained.get(export.inode, 0.0) + 1.0:
            self._complained[export.inode] = now
            log.error("a read failed", export=export.name, offset=offset, length=length, error=str(error))

    def account(self, export: Export) -> Account:
        account = self.accounts.get(export.inode)
        if account is None:
            self.touched.setdefault(export.inode, Touched(export.virtual_size))
            account = self.accounts.setdefault(export.inode, Account())
        return account

    def forget(self, inode: int) -> None:
        """Drop the figures of a file that is gone."""
        self.accounts.pop(inode, None)
        self.touched.pop(inode, None)
        self._complained.pop(inode, None)

    def _find(self, inode: int) -> Export:
        export = self._exports.by_inode(inode)
        if export is None:
            raise FuseError(errno.ESTALE)
        return export

    def _attributes(self, export: Export) -> Attributes:
        # Readable by VMMs that run as users of their own. Nobody else gets there: the root is for its owner alone.
        mode = protocol.S_IFREG | 0o444
        return Attributes(export.inode, export.virtual_size, mode, self._uid, export.created)

    def _root(self) -> Attributes:
        return Attributes(protocol.ROOT, 0, protocol.S_IFDIR | 0o500, self._uid, 0, 2)

    def _lookup(self, node: int, unique: int, body: memoryview) -> bytes:
        name = bytes(body).split(b"\0", 1)[0].decode(errors="replace")
        export = self._exports.by_name(name) if node == protocol.ROOT else None
        if export is None:
            raise FuseError(errno.ENOENT)
        return protocol.entry_reply(self._attributes(export))

    def _getattr(self, node: int, unique: int, body: memoryview) -> bytes:
        attributes = self._root() if node == protocol.ROOT else self._attributes(self._find(node))
        return protocol.attributes_reply(attributes)

    def _open(self, node: int, unique: int, body: memoryview) -> bytes:
        flags, _ = protocol.OPEN_IN.unpack_from(body)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise FuseError(errno.EROFS)
        handle = unique & ~protocol.RESENT
        new = self._shared.opened(handle, node)
        # Only now: who removes an export hides it first and looks for open files then. An open that a former server
        # recorded counts already.
        export = self._exports.by_inode(node)
        if export is None or (new and export.removed):
            self._shared.released(handle)
            raise FuseError(errno.ENOENT)
        self._read_ahead.set(SEQUENTIAL_KIB if export.sequential else MAPPED_KIB)
        return protocol.open_reply(handle)

    def _release(self, node: int, unique: int, body: memoryview) -> bytes:
        (handle,) = protocol.FH_IN.unpack_from(body)
        self._shared.released(handle)
        export = self._exports.by_inode(node)
        if export is not None and export.removed and not self._shared.is_open(node):
            self._gone(export)
        return b""

    def _readdir(self, node: int, unique: int, body: memoryview) -> bytes:
        _, offset, size, _ = protocol.READ_IN.unpack_from(body)
        entries = [(1, protocol.ROOT, b".", True), (2, protocol.ROOT, b"..", True)]
        # A position is the inode before which to go on, so that files may come and go meanwhile.
        entries += [(e.inode + 1, e.inode, e.name.encode(), False) for e in self._exports.all() if not e.removed]
        return protocol.directory_reply([e for e in entries if e[0] > offset], size)

    def _statfs(self, node: int, unique: int, body: memoryview) -> bytes:
        exports = self._exports.all()
        return protocol.statfs_reply(sum(e.virtual_size for e in exports), len(exports))

    def _lseek(self, node: int, unique: int, body: memoryview) -> bytes:
        _, offset, whence, _ = protocol.LSEEK_IN.unpack_from(body)
        export = self._find(node)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise FuseError(errno.EINVAL)
        if offset >= export.virtual_size:
            raise FuseError(errno.ENXIO)
        try:
            found = self._library.open(export).seek(offset, data=whence == os.SEEK_DATA)
        except (AenvError, OSError) as error:
            raise FuseError(errno.EIO) from error
        if found is None:
            raise FuseError(errno.ENXIO)
        return struct.pack("<Q", found)
