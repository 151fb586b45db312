"""Firecracker from its public releases: a pinned version, checked before anything of it is run.

A release of Firecracker is one archive for each architecture, and beside it a text with the archive's SHA-256
(``.sha256.txt``). The digests of published archives are not part of this program: a digest that is configured is what
the archive must have; without one it must have the published one, which guards against a torn download and not
against whoever can change the release.
"""

import asyncio
import hashlib
import os
import platform
import re
import tarfile
import uuid
from collections.abc import Callable
from pathlib import Path

import aiohttp

from aenv.errors import CorruptFileError, VmmError
from aenv.storage.lsmt import disk_errors
from aenv.vmm.firecracker.binary import find_firecracker

PINNED = "1.16.1"
RELEASES = "https://github.com/firecracker-microvm/firecracker/releases/download"
ARCHITECTURES = ("x86_64", "aarch64")
LARGEST = 256 << 20  # bytes of an archive; 10 MB are usual
TIMEOUT = aiohttp.ClientTimeout(total=600, connect=20, sock_read=60)
PIECE = 1 << 20


def archive_url(version: str, machine: str, releases: str = RELEASES) -> str:
    return f"{releases}/v{version}/firecracker-v{version}-{machine}.tgz"


def member_name(version: str, machine: str) -> str:
    """The program in the archive."""
    return f"release-v{version}-{machine}/firecracker-v{version}-{machine}"


def published_digest(text: str) -> str:
    """The digest in the text beside an archive (as sha256sum(1) prints it). Raises CorruptFileError."""
    found = re.match(r"\s*([0-9a-fA-F]{64})\b", text)
    if not found:
        raise CorruptFileError(f"This is no SHA-256 of a release: {text[:100]!r}.")
    return found[1].lower()


async def install(
    directory: Path,
    *,
    progress: Callable[[str], None],
    version: str = PINNED,
    sha256: str | None = None,
    releases: str = RELEASES,
    machine: str = platform.machine(),
) -> Path:
    """The program in ``directory``, downloaded if it is not there yet; its name has the version.

    ``sha256`` is the archive's, from the configuration. Raises VmmError when it cannot be had, CorruptFileError when
    it is not what it should be, CapacityError when the disk is full. It is there whole or not at all.
    """
    target = directory / f"firecracker-v{version}"
    if target.exists():
        return target
    if machine not in ARCHITECTURES:
        raise VmmError(f"Firecracker has no release for {machine}.", "Set AENV_VMM=qemu.")
    url = archive_url(version, machine, releases)
    await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
    archive = directory / f".{target.name}.{uuid.uuid4().hex[:8]}.tgz"
    program = archive.with_suffix(".new")
    try:
        async with aiohttp.ClientSession(timeout=TIMEOUT, trust_env=True) as session:
            wanted = sha256.lower() if sha256 else published_digest(await _text(session, f"{url}.sha256.txt"))
            progress(f"downloading Firecracker {version}")
            found = await _download(session, url, archive)
        if found != wanted:
            raise CorruptFileError(
                f"{url} has the SHA-256 {found} and should have {wanted}.",
                "Try again; if it persists the release or the configured digest is wrong: it was not installed.",
            )
        await asyncio.to_thread(_unpack, archive, member_name(version, machine), program)
        await find_firecracker(str(program))
        await asyncio.to_thread(program.replace, target)
        return target
    except (aiohttp.ClientError, TimeoutError) as error:
        raise VmmError(
            f"Firecracker {version} cannot be downloaded from {url}: {error or 'it took too long'}.",
            f"Where there is no network, put the program of that release at {target}, or set AENV_FIRECRACKER.",
        ) from error
    finally:
        archive.unlink(missing_ok=True)
        program.unlink(missing_ok=True)


async def _text(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(url) as response:
        response.raise_for_status()
        return (await response.content.read(4096)).decode(errors="replace")


async def _download(session: aiohttp.ClientSession, url: str, target: Path) -> str:
    """Write what is at ``url``; its SHA-256."""
    digest, size = hashlib.sha256(), 0
    async with session.get(url) as response:
        response.raise_for_status()
        with disk_errors(target), target.open("wb") as file:
            async for piece in response.content.iter_chunked(PIECE):
                size += len(piece)
                if size > LARGEST:
                    raise CorruptFileError(f"{url} is larger than any release.")
                digest.update(piece)
                await asyncio.to_thread(file.write, piece)
    return digest.hexdigest()


def _unpack(archive: Path, name: str, target: Path) -> None:
    """Write one regular file of the archive, durable and executable; nothing else of it is looked at."""
    try:
        with tarfile.open(archive, "r:gz") as tar:
            member = tar.getmember(name)
            source = tar.extractfile(member) if member.isreg() and member.size <= LARGEST else None
            if source is None:
                raise CorruptFileError(f"{name} of {archive.name} is no program.")
            with disk_errors(target), target.open("wb") as file:
                while piece := source.read(PIECE):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            target.chmod(0o755)
    except (tarfile.TarError, KeyError, EOFError, OSError) as error:
        raise CorruptFileError(f"The archive of Firecracker cannot be unpacked: {error}.") from error
