"""Moves files and folders between this machine and a sandbox, with a progress bar on a terminal.

A file goes straight through envd. A folder goes as one tar archive, packed or unpacked by the guest's own tar, which
keeps modes, times and links and takes one request where a folder may have thousands of files.
"""

import os
import posixpath
import shutil
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

from aenv.cli.progress import progress
from aenv.client.sandbox import SandboxClient
from aenv.errors import AenvError

# $1 the archive, $2 the folder to unpack into. The archive goes, however it ends.
UNPACK = 'mkdir -p "$2" && tar -C "$2" -xpf "$1" -o; code=$?; rm -f "$1"; exit $code'
# $1 the archive, $2 the folder to pack. It is its owner's alone.
PACK = 'umask 077; tar -C "$2" -cf "$1" . || { code=$?; rm -f "$1"; exit $code; }'


# -- into the sandbox


def upload(client: SandboxClient, source: Path, target: str, *, user: str | None) -> str:
    """Copy a file or folder to ``target``; into it if it ends with ``/`` or is a folder. Where it went.

    Raises AenvError when ``source`` cannot be read.
    """
    if not source.exists():
        raise AenvError(f"{source} does not exist.")
    name = source.resolve().name
    entry = client.stat(target or ".", user=user)
    if target in ("", ".") or target.endswith("/") or (entry is not None and entry["type"] == "FILE_TYPE_DIRECTORY"):
        target = posixpath.join(target, name)
    try:
        if source.is_dir():
            _upload_folder(client, source, target, user)
        else:
            with source.open("rb") as file, progress(name) as shown:
                size = os.fstat(file.fileno()).st_size
                shown.begin(size)
                client.write(target, file, size, user=user, progress=shown.advance)
    except OSError as error:
        raise AenvError(f"{error.filename or source} cannot be read: {error.strerror}.") from error
    return target


def _upload_folder(client: SandboxClient, source: Path, target: str, user: str | None) -> None:
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(source, arcname=".", filter=_plain)
        size = file.tell()
        file.seek(0)
        remote = f"/tmp/.aenv-upload-{os.urandom(8).hex()}.tar"
        try:
            with progress(f"{source.resolve().name}/") as shown:
                shown.begin(size)
                client.write(remote, file, size, user=user, progress=shown.advance)
            _run(client, UNPACK, remote, target, user=user)
        except BaseException:
            with suppress(AenvError):
                client.run('rm -f "$1"', remote, user=user)
            raise


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files, folders and links, of whoever unpacks them. Sockets, pipes and devices stay behind."""
    return info if info.isreg() or info.isdir() or info.issym() or info.islnk() else None


# -- out of the sandbox


def download(client: SandboxClient, source: str, target: Path, *, user: str | None) -> Path:
    """Copy a file or folder to ``target``; into it if it is a folder. Where it went; nothing, if it fails.

    Raises AenvError when there is no ``source``, or ``target`` cannot be written.
    """
    entry = client.stat(source, user=user)
    if entry is None:
        raise AenvError(f"There is no {source} in the sandbox.", f"`aenv exec {client.sandbox_id} ls` looks around.")
    if target.is_dir():
        target /= entry["name"] or "root"
    try:
        if entry["type"] == "FILE_TYPE_DIRECTORY":
            _download_folder(client, entry["path"], target, user)
        else:
            _download_file(client, entry["path"], target, user, int(entry.get("mode", 0o644)))
    except OSError as error:
        raise AenvError(f"{error.filename or target} cannot be written: {error.strerror}.") from error
    return target


def _download_file(client: SandboxClient, source: str, target: Path, user: str | None, mode: int) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("xb") as file, progress(target.name) as shown:
            client.read(source, file, user=user, progress=shown.advance, begin=shown.begin)
        part.chmod(mode & 0o777)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _download_folder(client: SandboxClient, source: str, target: Path, user: str | None) -> None:
    remote = f"/tmp/.aenv-download-{os.urandom(8).hex()}.tar"
    _run(client, PACK, remote, source, user=user)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with tempfile.TemporaryFile() as file:
            with progress(f"{target.name}/") as shown:
                client.read(remote, file, user=user, progress=shown.advance, begin=shown.begin)
            file.seek(0)
            part.mkdir()
            with tarfile.open(fileobj=file) as archive:
                _unpack(archive, part)
        _merge(part, target)
    except tarfile.TarError as error:
        raise AenvError(f"The folder from the sandbox cannot be unpacked: {error}.") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        with suppress(AenvError):
            client.run('rm -f "$1"', remote, user=user)


def _unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Raises AenvError for names and links that lead out of ``folder``: a guest is not trusted.

    The rules are PEP 706's filter "data", which Python has from 3.11.4 on; Debian 12's is older.
    """
    root = folder.resolve()
    archive.extraction_filter = lambda member, _: member  # what follows stands for it where there are filters
    for member in archive:
        if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
            continue
        places = [root / member.name]
        if member.issym():
            places.append(places[0].parent / member.linkname)
        elif member.islnk():
            places.append(root / member.linkname)
        if not all(_is_inside(place, root) for place in places):
            raise AenvError(f"The folder from the sandbox has {member.name!r}, which leads out of it.")
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        member.mode &= 0o777
        archive.extract(member, root)


def _is_inside(place: Path, root: Path) -> bool:
    """Links that have been unpacked already are followed: they lead inside, or would not be there."""
    try:
        return place.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # links in a circle
        return False


def _merge(part: Path, target: Path) -> None:
    """Move the finished folder into place; into what is there already, if there is."""
    if not target.exists():
        part.rename(target)
        return
    for folder, _, files in os.walk(part):
        place = target / Path(folder).relative_to(part)
        place.mkdir(exist_ok=True)
        for name in files:
            (Path(folder) / name).replace(place / name)


def _run(client: SandboxClient, script: str, *parameters: str, user: str | None) -> None:
    code, _, stderr = client.run(script, *parameters, user=user)
    if code != 0:
        said = stderr.decode(errors="replace").strip().splitlines()
        raise AenvError(f"The sandbox could not copy the folder: {said[-1] if said else f'exit status {code}'}.")
