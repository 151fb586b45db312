"""Content of volumes: one folder of ``$AENV_HOME/volumes`` each, with the owners and modes that users give.

Everything here blocks. Paths are absolute within a volume. Nothing below follows a symbolic link, and no call makes
one. A file is written beside its place and renamed there, synced, so that readers and crashes see all of it or none;
a folder is renamed away before what is in it is removed.
"""

import errno
import os
import secrets
import shutil
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from aenv.errors import CapacityError, ConflictError, InvalidRequestError, NotFoundError
from aenv.storage.lsmt import disk_errors

MAX_ID = 2**32 - 2  # of users and groups; the last number means "none" to chown(2)
MAX_ENTRIES = 100_000  # of one listing
MAX_DEPTH = 128  # folders within folders: programs that walk trees recurse
_MAX_PATH = 4095  # bytes, PATH_MAX without its end
_PART = ".aenv-part-"  # names of what is being written or removed; users cannot have or see them

Kind = Literal["file", "directory", "symlink", "unknown"]


@dataclass(frozen=True, slots=True)
class Entry:
    """As stat(2) has it; ``mode`` is the permissions alone, sizes are bytes."""

    name: str
    kind: Kind
    path: str
    size: int
    mode: int
    uid: int
    gid: int
    accessed: datetime
    modified: datetime
    changed: datetime
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Attributes:
    """What to give a file or folder; None leaves it as it is, or as new ones are."""

    uid: int | None = None
    gid: int | None = None
    mode: int | None = None

    def apply(self, path: Path) -> None:
        if self.uid is not None or self.gid is not None:
            os.chown(
                path, *(-1 if number is None else number for number in (self.uid, self.gid)), follow_symlinks=False
            )
        if self.mode is not None:
            path.chmod(self.mode)  # after chown, which clears set-user-ID


def parts(path: str) -> tuple[str, ...]:
    """The names that lead to ``path``, none for the root. Raises InvalidRequestError for what no file can have."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    try:
        long = len(path.encode()) > _MAX_PATH or any(len(name.encode()) > 255 for name in names[:MAX_DEPTH])
    except UnicodeEncodeError:
        long = True
    if (
        long
        or len(names) > MAX_DEPTH
        or "\0" in path
        or ".." in names
        or any(name.startswith(_PART) for name in names)
    ):
        raise InvalidRequestError(f"path: {path[:200]!r} cannot be a path in a volume.", "Use one such as /dir/file.")
    return tuple(names)


class VolumeFiles:
    def __init__(self, folder: Path, reserve: int) -> None:
        """``reserve`` is bytes of disk that writing must leave free."""
        self._folder = folder
        self._reserve = reserve

    def create(self, volume_id: str) -> None:
        """The folder of a new volume; anyone inside a sandbox could write to it. Raises CapacityError."""
        with disk_errors(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            root = self._folder / volume_id
            root.mkdir()
            root.chmod(0o777)

    def destroy(self, volume_id: str) -> None:
        shutil.rmtree(self._folder / volume_id, ignore_errors=True)

    def prepare(self, volume_ids: Collection[str]) -> None:
        """For the start of a server: remove what no record names or was never finished, make what is missing."""
        for volume_id in volume_ids:
            if not (self._folder / volume_id).exists():
                self.create(volume_id)
        if not self._folder.exists():
            return
        for root in self._folder.iterdir():
            if root.name not in volume_ids:
                shutil.rmtree(root, ignore_errors=True)
                continue
            for removed in root.glob(f"{_PART}*/"):
                shutil.rmtree(removed, ignore_errors=True)
            for folder, _, names in os.walk(root):
                for name in names:
                    if name.startswith(_PART):
                        Path(folder, name).unlink(missing_ok=True)

    # -- one entry --------------------------------------------------------------------------------------

    def info(self, volume_id: str, path: str) -> Entry:
        """Raises NotFoundError, as all that follow do for what is not there."""
        with _errors(path):
            return _look(self._place(volume_id, path), parts(path))

    def listing(self, volume_id: str, path: str, depth: int) -> list[Entry]:
        """What is in a folder, ``depth`` levels of it, sorted by path. Raises InvalidRequestError for a file."""
        found: list[Entry] = []
        with _errors(path):
            self._collect(self._place(volume_id, path), parts(path), depth, found)
        return found

    def _collect(self, place: Path, names: tuple[str, ...], depth: int, found: list[Entry]) -> None:
        for name in sorted(os.listdir(place)):  # noqa: PTH208 - names alone
            if name.startswith(_PART):
                continue
            with suppress(FileNotFoundError, NotADirectoryError):  # it went meanwhile, or became another
                found.append(_look(place / name, (*names, name)))
                if len(found) > MAX_ENTRIES:
                    raise InvalidRequestError(f"There are more than {MAX_ENTRIES} entries.", "List with less depth.")
                if depth > 1 and found[-1].kind == "directory":
                    self._collect(place / name, (*names, name), depth - 1, found)

    def make_folder(self, volume_id: str, path: str, attributes: Attributes, *, parents: bool) -> Entry:
        """Raises ConflictError for one that exists, unless ``parents``, which also makes those that are missing."""
        names = parts(path)
        place = self._place(volume_id, path, parents=parents)
        with _errors(path), disk_errors(place):
            self.check_room(0)
            try:
                place.mkdir()
            except FileExistsError:
                if not parents or not stat.S_ISDIR(place.lstat().st_mode):
                    raise ConflictError(f"path: {path[:200]!r} exists.", "Choose another, or force it.") from None
            attributes.apply(place)
            return _look(place, names)

    def change(self, volume_id: str, path: str, attributes: Attributes) -> Entry:
        with _errors(path):
            place = self._place(volume_id, path)
            attributes.apply(place)
            return _look(place, parts(path))

    def remove(self, volume_id: str, path: str) -> None:
        """A file, or a folder with all that is in it, which is gone at once, also for who is writing there."""
        if not parts(path):
            raise InvalidRequestError("path: the root of a volume cannot be removed.", "Destroy the volume.")
        with _errors(path):
            place = self._place(volume_id, path)
            if stat.S_ISDIR(place.lstat().st_mode):
                removed = self._folder / volume_id / f"{_PART}{secrets.token_hex(8)}"
                place.rename(removed)
                shutil.rmtree(removed, ignore_errors=True)  # what is left then goes when the server starts
            else:
                place.unlink()

    def open(self, volume_id: str, path: str) -> int:
        """A file's content as it is now: a descriptor, for the caller to close. Raises InvalidRequestError."""
        with _errors(path):
            place = self._place(volume_id, path)
            # Neither a link nor a pipe may lead or hold anybody who opens it.
            if not stat.S_ISREG(place.lstat().st_mode):
                raise InvalidRequestError(f"path: {path[:200]!r} is not a file.")
            return os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    # -- writing a file ---------------------------------------------------------------------------------

    @contextmanager
    def writing(self, volume_id: str, path: str, *, parents: bool) -> Iterator["Part"]:
        """A new file beside ``path``, which takes its place with ``Part.commit`` and is gone otherwise."""
        place = self._place(volume_id, path, parents=parents)
        names = parts(path)
        with _errors(path), disk_errors(place):
            if not names or place.is_dir():
                raise InvalidRequestError(f"path: {path[:200]!r} is a folder.", "Name a file.")
            part = Part(self, place, names)
        try:
            yield part
        finally:
            part.close()

    def check_room(self, size: int) -> None:
        """Raises CapacityError when ``size`` more bytes would leave less than the reserve."""
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < size + self._reserve:
            raise CapacityError("No room for more on this node.", "Remove files, or free disk space under its home.")

    def _place(self, volume_id: str, path: str, *, parents: bool = False) -> Path:
        """Where ``path`` is, below folders that are none but folders; with ``parents`` missing ones are made."""
        place = self._folder / volume_id
        names = parts(path)
        with _errors(path), disk_errors(place):
            for name in names[:-1]:
                place /= name
                if parents:
                    with suppress(FileExistsError):
                        place.mkdir()
                if not stat.S_ISDIR(place.lstat().st_mode):
                    raise NotADirectoryError(place)
        return place / names[-1] if names else place


class Part:
    """A file on its way into a volume. Made by ``VolumeFiles.writing`` only."""

    def __init__(self, files: VolumeFiles, place: Path, names: tuple[str, ...]) -> None:
        self._files = files
        self._place = place
        self._names = names
        self._path = place.parent / f"{_PART}{secrets.token_hex(8)}"
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.size = 0

    def write(self, data: bytes) -> None:
        """Raises CapacityError."""
        self._files.check_room(len(data))
        with disk_errors(self._place):
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]
        self.size += len(data)

    def commit(self, attributes: Attributes) -> Entry:
        """Put it in its place. A file that is there lends it owner and mode, as overwriting would leave them."""
        with _errors("/".join(self._names)), disk_errors(self._place):
            with suppress(FileNotFoundError):
                old = self._place.lstat()
                if stat.S_ISREG(old.st_mode):
                    Attributes(old.st_uid, old.st_gid, stat.S_IMODE(old.st_mode)).apply(self._path)
            attributes.apply(self._path)
            os.fsync(self._fd)
            self._path.replace(self._place)
        return _entry(os.fstat(self._fd), self._names)

    def close(self) -> None:
        os.close(self._fd)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


@contextmanager
def _errors(path: str) -> Iterator[None]:
    """The kernel's words as ours."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"Path {path[:200]!r} not found.") from None
    except (IsADirectoryError, FileExistsError):
        raise ConflictError(f"path: {path[:200]!r} is in the way.", "Remove it first.") from None
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # with the folder of the volume before it
            raise
        raise InvalidRequestError(f"path: {path[:200]!r} and so on is too long.", "Use a shorter one.") from None


_KINDS: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


def _look(place: Path, names: tuple[str, ...]) -> Entry:
    status = place.lstat()
    return _entry(status, names, str(place.readlink()) if stat.S_ISLNK(status.st_mode) else None)


def _entry(status: os.stat_result, names: tuple[str, ...], target: str | None = None) -> Entry:
    kind = _KINDS.get(stat.S_IFMT(status.st_mode), "unknown")
    return Entry(
        name=names[-1] if names else "/",
        kind=kind,
        path="/" + "/".join(names),
        size=status.st_size,
        mode=stat.S_IMODE(status.st_mode),
        uid=status.st_uid,
        gid=status.st_gid,
        accessed=datetime.fromtimestamp(status.st_atime, UTC),
        modified=datetime.fromtimestamp(status.st_mtime, UTC),
        changed=datetime.fromtimestamp(status.st_ctime, UTC),
        target=target,
    )
