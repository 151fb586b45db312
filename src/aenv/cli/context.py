"""Files of a build: a folder and its ``.dockerignore``, packed into the archives that COPY steps upload.

An archive's members lie below one name, ``source``, that the step copies: a folder's contents for anything that goes
into a folder, a file for a single one. Its digest is made of names, modes and contents, and not of times, so that a
fresh checkout finds the server's cache.
"""

import hashlib
import io
import os
import stat
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from aenv.errors import InvalidRequestError
from aenv.template import globs
from aenv.template.dockerfile_model import InlineFile
from aenv.template.dockerignore import Ignore

FOLDER = "files"  # the name of what is copied into a folder
BLOCK = 1 << 20


@dataclass(slots=True)
class Archive:
    """``source`` is what the step copies out of ``file``, a tar archive; the caller closes the file."""

    file: IO[bytes]
    size: int  # bytes
    digest: str
    source: str


class Packer:
    """Writes one archive."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it becomes the archive's
        self._tar = tarfile.open(fileobj=self._file, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._digest = hashlib.sha256()

    def close(self) -> None:
        self._file.close()

    def finish(self, source: str) -> Archive:
        self._tar.close()
        self._digest.update(source.encode())
        size = self._file.tell()
        self._file.seek(0)
        return Archive(self._file, size, self._digest.hexdigest(), source)

    def path(self, path: Path, name: str) -> None:
        """Add one file, link or folder (without what is in it) under ``name``. Other kinds are left out."""
        info = self._tar.gettarinfo(path, name)
        if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
            return
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        if info.isreg() or info.islnk():  # a second name of the same file is a file like any other
            info.type, info.linkname = tarfile.REGTYPE, ""
            info.size = path.stat().st_size
            with path.open("rb") as file:
                self._entry(info, file)
        else:
            self._entry(info, None)

    def folder(self) -> None:
        """The folder that everything else is in. Without it an empty one would be no member at all."""
        info = tarfile.TarInfo(FOLDER)
        info.type, info.mode = tarfile.DIRTYPE, 0o755
        self._entry(info, None)

    def content(self, name: str, content: bytes, mode: int = 0o644) -> None:
        info = tarfile.TarInfo(name)
        info.size, info.mode, info.mtime = len(content), mode, int(time.time())
        self._entry(info, io.BytesIO(content))

    def member(self, info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        """Add a member of another archive."""
        self._entry(info, file)

    def _entry(self, info: tarfile.TarInfo, file: IO[bytes] | None) -> None:
        self._digest.update(f"{info.name}\0{info.type!r}\0{info.mode:o}\0{info.linkname}\0{info.size}\0".encode())
        self._tar.addfile(info, None if file is None else _Hashed(file, self._digest))


class _Hashed:
    """A file whose content is hashed as it is read."""

    def __init__(self, file: IO[bytes], digest: "hashlib._Hash") -> None:
        self._file = file
        self._digest = digest

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._digest.update(data)
        return data


class Context:
    def __init__(self, folder: Path, dockerfile: Path) -> None:
        """Reads ``NAME.dockerignore`` beside the Dockerfile, else ``.dockerignore``. Raises InvalidRequestError."""
        self._folder = folder
        if not folder.is_dir():
            raise InvalidRequestError(f"{folder} is not a folder.", "--context names the one that COPY copies from.")
        special = dockerfile.with_name(dockerfile.name + ".dockerignore")
        file = special if special.is_file() else folder / ".dockerignore"
        text = file.read_text(encoding="utf-8-sig") if file.is_file() else ""
        self._ignore = Ignore(text.splitlines())
        self._names: list[str] | None = None

    def pack(self, sources: Iterable[str], *, unpack: bool) -> Archive:
        """The files that ``sources`` (relative paths, or patterns) name. Raises InvalidRequestError if one has none.

        ``unpack``: tar archives are replaced by their contents.
        """
        found: list[str] = []
        for source in sources:
            found += self._find(source)
        only = self._folder / found[0]
        packer = Packer()
        try:
            if len(found) == 1 and not only.is_dir() and not (unpack and _is_tar(only)):
                # The destination may turn out to be a folder, so the file keeps its name.
                packer.path(only.resolve(), only.name)
                return packer.finish(only.name)
            packer.folder()
            for name in found:
                self._add(packer, name, unpack)
            return packer.finish(FOLDER)
        except BaseException:
            packer.close()
            raise

    def _add(self, packer: Packer, name: str, unpack: bool) -> None:
        """One source below FOLDER: a folder's contents, or a file under its name."""
        path = self._folder / name
        if path.is_dir():
            for below in self._below(name):
                packer.path(self._folder / below, f"{FOLDER}/{os.path.relpath(below, name)}")
        elif unpack and _is_tar(path):
            _unpack(packer, path)
        else:
            packer.path(path.resolve(), f"{FOLDER}/{path.name}")

    def _find(self, source: str) -> list[str]:
        if globs.has_magic(source) and not os.path.lexists(self._folder / source):
            found = globs.matches(source, self._all())
        else:
            found = [source] if self._visible(source) else []
        if not found:
            raise InvalidRequestError(
                f"{source!r} is not in the build context {self._folder}, or .dockerignore excludes it."
            )
        return found

    def _visible(self, name: str) -> bool:
        path = self._folder / name
        if not os.path.lexists(path):
            return False
        # Below an excluded folder there may be files that are taken back.
        return (
            name == "." or not self._ignore.excludes(name) or (path.is_dir() and any(True for _ in self._below(name)))
        )

    def _all(self) -> list[str]:
        if self._names is None:
            self._names = list(self._below("."))
        return self._names

    def _below(self, name: str) -> Iterator[str]:
        """Everything in a folder that is not excluded, folders before what is in them, sorted."""
        prefix = "" if name == "." else f"{name}/"
        for entry in sorted(os.scandir(self._folder / name), key=lambda entry: entry.name):
            below = prefix + entry.name
            excluded = self._ignore.excludes(below)
            if not excluded:
                yield below
            if entry.is_dir(follow_symlinks=False) and (not excluded or self._ignore.has_exceptions):
                yield from self._below(below)


def inline(files: Sequence[InlineFile]) -> Archive:
    """Here-documents as an archive."""
    packer = Packer()
    if len(files) == 1:
        packer.content(files[0].name, files[0].content.encode())
        return packer.finish(files[0].name)
    packer.folder()
    for file in files:
        packer.content(f"{FOLDER}/{file.name}", file.content.encode())
    return packer.finish(FOLDER)


def repack(source: IO[bytes], only: str | None) -> Archive:
    """An archive of another machine, all below FOLDER, as ours. ``only``: it is one file of that name."""
    packer = Packer()
    with tarfile.open(fileobj=source, mode="r:") as archive:
        for member in archive:
            info = copy(member)
            info.pax_headers = {}
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            if only is not None:
                if member.name != f"{FOLDER}/{only}":
                    continue
                info.name = only
            packer.member(info, archive.extractfile(member) if member.isreg() else None)
    return packer.finish(FOLDER if only is None else only)


def _is_tar(path: Path) -> bool:
    """Whether ADD unpacks it: a tar archive, compressed or not."""
    return path.is_file() and tarfile.is_tarfile(path)


def _unpack(packer: Packer, path: Path) -> None:
    """The members of a tar archive below FOLDER. Names that lead out of it are refused."""
    with tarfile.open(path, "r:*") as archive:
        for member in archive:
            name = os.path.normpath(member.name.lstrip("/"))
            if name == ".":
                continue
            if name.startswith(".."):
                raise InvalidRequestError(f"{path} has a member {member.name!r} outside of itself.")
            info = copy(member)
            file = archive.extractfile(member) if member.isreg() else None
            if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                continue
            info.name = f"{FOLDER}/{name}"
            if member.islnk():
                info.linkname = f"{FOLDER}/{os.path.normpath(member.linkname.lstrip('/'))}"
            info.mode = stat.S_IMODE(info.mode)
            info.pax_headers = {}
            packer.member(info, file)
