"""Applies the layers of an image, one after the other, to a directory, as root.

Semantics: OCI image-spec 1.1 ``layer.md``. Where it is silent we do what umoci and containerd do: parents follow
symbolic links within the root, the last component never does, and a directory keeps its time when only its
contents change.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from aenv.image.budget import Budget
from aenv.image.compression import LayerStream
from aenv.image.confined import Directory, Root, clean, lstat
from aenv.image.errors import ArchiveError, DigestMismatchError, UnsafeArchiveError
from aenv.image.tar import (
    BLOCK_DEVICE,
    CHARACTER,
    DIRECTORY,
    FIFO,
    HARD_LINK,
    REGULAR,
    SYMLINK,
    Entry,
    TarReader,
)

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_AUFS = b".wh..wh."  # aufs's own bookkeeping, in images of its time
_SPECIAL = {CHARACTER: stat.S_IFCHR, BLOCK_DEVICE: stat.S_IFBLK, FIFO: stat.S_IFIFO}
_HOST_XATTRS = (b"security.selinux", b"security.ima", b"security.evm", b"trusted.overlay.", b"system.nfs4_acl")
"""Attributes that describe the machine where the layer was made."""
_MAX_ID = (1 << 32) - 2
_MOST_NOTES = 20  # of attributes that are left out: a stranger names them
_EARLIEST_NS, _LATEST_NS = -(1 << 31) * 10**9, ((1 << 34) - 1) * 10**9  # what ext4 can store


def apply_layer(
    tree: Path,
    layer: Path,
    budget: Budget,
    *,
    diff_id: str | None = None,
    whiteouts: bool = True,
    note: Callable[[str], None] = lambda text: None,
) -> str:
    """Apply the tar archive ``layer``, compressed or not, to ``tree``; the digest of its uncompressed bytes.

    ``whiteouts`` is false for the archive of a whole file system, where ``.wh.`` means nothing. ``note`` gets what
    could not be kept. Blocking. Raises ArchiveError and its kinds, DigestMismatchError, CapacityError. What was
    written stays: the caller discards the tree.
    """
    try:
        with LayerStream(layer, budget.charge_bytes) as stream:
            applier = _Applier(tree, budget, whiteouts, note)
            try:
                applier.apply(TarReader(stream))
            finally:
                applier.close()
            found = stream.finish()
    except RecursionError as error:
        raise UnsafeArchiveError("The layer nests symbolic links too deep.", "Do not use this image.") from error
    if diff_id is not None and diff_id.startswith("sha256:") and found != diff_id:
        raise DigestMismatchError(
            f"A layer's content should be {diff_id} and is {found}.",
            "The image, or this node's copy of it, is damaged. The copy was discarded: try again.",
        )
    return found


class _Applier:
    def __init__(self, tree: Path, budget: Budget, whiteouts: bool, note: Callable[[str], None]) -> None:
        self._tree = tree
        self._root = Root(tree, self._opened)
        self._budget = budget
        self._whiteouts = whiteouts
        self._note = note
        self._dropped: set[bytes] = set()
        self._made: set[bytes] = set()  # real paths of what this layer made: its own whiteouts spare it
        self._times: dict[bytes, int] = {}  # real path of a directory: its time, set once nothing changes it any more
        self._time_ns = 0

    def close(self) -> None:
        self._root.close()

    def apply(self, entries: Iterable[Entry] | TarReader) -> None:
        for entry in entries:
            try:
                self._apply(entry, entries)
            except OSError as error:
                raise self._explain(entry, error) from error
            except (OverflowError, ValueError) as error:  # a device number, a NUL in an attribute's name
                raise ArchiveError(f"{_shown(entry)} has what no file can have: {error}.") from error
        for path, time_ns in self._times.items():
            fd = self._root.open_real(path)
            if fd is not None:
                os.utime(fd, ns=(time_ns, time_ns))
                os.close(fd)
        for name in sorted(self._dropped):
            shown = repr(os.fsdecode(name)[:200])
            self._note(f"this node's file system cannot store the attribute {shown}; it is left out")

    def _apply(self, entry: Entry, reader: Iterable[Entry] | TarReader) -> None:
        self._budget.charge_entry()
        self._time_ns = min(max(entry.mtime_ns, _EARLIEST_NS), _LATEST_NS)
        if not (0 <= entry.uid <= _MAX_ID and 0 <= entry.gid <= _MAX_ID):
            raise ArchiveError(f"{_shown(entry)} has the impossible owner {entry.uid}:{entry.gid}.")
        path = clean(entry.name)
        above, _, name = path.rpartition(b"/")
        if self._whiteouts and name.startswith(_WHITEOUT):
            self._whiteout(above, name)
            return
        if self._whiteouts and path.startswith(_AUFS):
            return
        if not path:
            if entry.kind != DIRECTORY:
                raise ArchiveError("The archive replaces the root directory by something else.")
            root = self._root.find(b"")
            assert root is not None
            self._set_directory(root.fd, b"", entry, fresh=False)
            return
        parent = self._root.make(above, self._created)
        real = parent.child(name)
        if entry.kind == DIRECTORY:
            self._directory(parent, name, entry)
        elif entry.kind == HARD_LINK:
            parent = self._hard_link(parent, above, name, entry)
        else:
            self._replace(parent, name)
            if entry.kind == REGULAR:
                assert isinstance(reader, TarReader)
                self._file(self._root.make(above, self._created), name, entry, reader)
            else:
                self._special(self._root.make(above, self._created), name, entry)
        self._made.add(real)

    def _directory(self, parent: Directory, name: bytes, entry: Entry) -> None:
        status = lstat(parent.fd, name)
        fresh = status is None or not stat.S_ISDIR(status.st_mode)
        if fresh:
            if status is not None:
                os.unlink(name, dir_fd=parent.fd)
            os.mkdir(name, 0o700, dir_fd=parent.fd)
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent.fd)
        try:
            self._set_directory(fd, parent.child(name), entry, fresh)
        finally:
            os.close(fd)
        if status is not None and stat.S_ISLNK(status.st_mode):
            self._root.forget()

    def _set_directory(self, fd: int, real: bytes, entry: Entry, fresh: bool) -> None:
        os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
        if not fresh:
            for attribute in os.listxattr(fd):
                if os.fsencode(attribute) not in entry.xattrs and not _is_host(os.fsencode(attribute)):
                    os.removexattr(fd, attribute)
        self._set_xattrs(fd, entry)
        self._times[real] = self._time_ns

    def _file(self, parent: Directory, name: bytes, entry: Entry, reader: TarReader) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=parent.fd)
        try:
            end = 0
            for offset, piece in reader.content(entry):
                if offset != end:
                    os.lseek(fd, offset, os.SEEK_SET)
                end = offset + len(piece)
                while piece:
                    piece = piece[os.write(fd, piece) :]
            if end != entry.size:
                os.ftruncate(fd, entry.size)
            # In this order: a change of owner clears set-user-id bits and capabilities.
            os.fchown(fd, entry.uid, entry.gid)
            os.fchmod(fd, entry.mode)
            if entry.xattrs:
                self._set_xattrs(fd, entry)
            os.utime(fd, ns=(self._time_ns, self._time_ns))
        finally:
            os.close(fd)

    def _special(self, parent: Directory, name: bytes, entry: Entry) -> None:
        """A symbolic link, device or fifo."""
        if entry.kind == SYMLINK:
            if not entry.link or b"\0" in entry.link:
                raise ArchiveError(f"{_shown(entry)} is a symbolic link to nothing.")
            os.symlink(entry.link, name, dir_fd=parent.fd)
        else:
            os.mknod(name, _SPECIAL[entry.kind] | 0o600, os.makedev(*entry.device), dir_fd=parent.fd)
        os.chown(name, entry.uid, entry.gid, dir_fd=parent.fd, follow_symlinks=False)
        if entry.kind != SYMLINK:
            os.chmod(name, entry.mode, dir_fd=parent.fd)
        if entry.xattrs:
            self._set_xattrs(f"/proc/self/fd/{parent.fd}/".encode() + name, entry)
        os.utime(name, ns=(self._time_ns, self._time_ns), dir_fd=parent.fd, follow_symlinks=False)

    def _hard_link(self, parent: Directory, above: bytes, name: bytes, entry: Entry) -> Directory:
        """Another name for an existing file; its metadata is the file's."""
        target_above, _, target_name = clean(entry.link).rpartition(b"/")
        source = self._root.find(target_above)
        status = lstat(source.fd, target_name) if source is not None and target_name else None
        if source is None or status is None:
            raise ArchiveError(
                f"{_shown(entry)} is a hard link to {os.fsdecode(entry.link)[:200]!r}, which does not exist.",
                "The image is damaged: build it again.",
            )
        if stat.S_ISDIR(status.st_mode):
            raise ArchiveError(f"{_shown(entry)} is a hard link to a directory.", "Build the image again.")
        held = Directory(os.dup(source.fd), source.path)
        try:
            parent = self._root.make(above, self._created)
            if held.child(target_name) != parent.child(name):
                self._replace(parent, name)
                parent = self._root.make(above, self._created)
                os.link(target_name, name, src_dir_fd=held.fd, dst_dir_fd=parent.fd, follow_symlinks=False)
        finally:
            os.close(held.fd)
        return parent

    def _whiteout(self, above: bytes, name: bytes) -> None:
        parent = self._root.find(above)
        if name == _OPAQUE:
            if parent is not None:
                self._hide(parent.fd, parent.path)
                self._root.forget()
            return
        if name.startswith(_AUFS):
            return
        hidden = name[len(_WHITEOUT) :]
        if hidden in (b"", b".", b".."):
            raise UnsafeArchiveError(f"The layer has the impossible whiteout {os.fsdecode(name)!r}.")
        if parent is not None:
            self._hide_child(parent.fd, parent.path, hidden)
            self._root.forget()

    def _hide(self, fd: int, path: bytes) -> None:
        """Remove from a directory what lower layers put there."""
        with os.scandir(fd) as entries:
            names = [os.fsencode(entry.name) for entry in entries]
        for name in names:
            self._hide_child(fd, path, name)

    def _hide_child(self, fd: int, path: bytes, name: bytes) -> None:
        status = lstat(fd, name)
        if status is None:
            return
        real = path + b"/" + name if path else name
        if not stat.S_ISDIR(status.st_mode):
            if real not in self._made:
                os.unlink(name, dir_fd=fd)
            return
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        try:
            self._hide(inner, real)
        finally:
            os.close(inner)
        if real not in self._made:
            try:
                os.rmdir(name, dir_fd=fd)
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # something of this layer is in it
                    raise

    def _replace(self, parent: Directory, name: bytes) -> None:
        """Make way for a new entry. Never writes through what is there: it may be a link, or have other names."""
        status = lstat(parent.fd, name)
        if status is None:
            return
        self._root.remove(parent, name)
        if stat.S_ISDIR(status.st_mode):
            inside = parent.child(name) + b"/"
            self._made = {path for path in self._made if not path.startswith(inside)}
        if not stat.S_ISREG(status.st_mode):
            self._root.forget()

    def _opened(self, directory: Directory) -> None:
        if directory.path not in self._times:
            self._times[directory.path] = os.stat(directory.fd).st_mtime_ns  # noqa: PTH116

    def _created(self, parent: Directory, name: bytes) -> None:
        """A directory that the archive does not list is as old as what is in it."""
        self._budget.charge_entry()
        self._times[parent.child(name)] = self._time_ns
        self._made.add(parent.child(name))

    def _set_xattrs(self, target: int | bytes, entry: Entry) -> None:
        for name, value in entry.xattrs.items():
            if _is_host(name):
                continue
            try:
                if isinstance(target, int):
                    os.setxattr(target, name, value)
                else:
                    os.setxattr(target, name, value, follow_symlinks=False)
            except OSError as error:
                # EPERM: user attributes exist on files and directories only.
                if error.errno not in (errno.ENOTSUP, errno.EPERM):
                    raise
                if len(self._dropped) < _MOST_NOTES:
                    self._dropped.add(name)

    def _explain(self, entry: Entry, error: OSError) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return self._budget.exhausted()
        if error.errno in (errno.EPERM, errno.EACCES):
            return ArchiveError(f"Cannot write {_shown(entry)}: {error.strerror}.", "Unpacking images needs root.")
        return ArchiveError(f"Cannot write {_shown(entry)}: {error.strerror or error}.", "The image is damaged.")


def _is_host(name: bytes) -> bool:
    return name.startswith(_HOST_XATTRS)


def _shown(entry: Entry) -> str:
    return repr(os.fsdecode(entry.name)[:200])
