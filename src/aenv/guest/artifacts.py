"""The guest artefacts of a node: kernel, initramfs and base root filesystem, under ``$AENV_HOME/artifacts``.

Each is built when it is missing and never changed afterwards: its name says what is in it. Snapshots name these
files, so only what no snapshot names may be removed.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from pathlib import Path

from aenv.guest.commands import GuestArtifactError, Progress, run, write_durably, writing
from aenv.guest.initramfs import guest_entries, write_cpio
from aenv.guest.kernel import ensure_kernel
from aenv.guest.rootfs import ensure_rootfs

__all__ = ["GuestArtifactError", "GuestArtifacts", "ensure_base_rootfs", "ensure_kernel_and_initramfs"]


@dataclass(frozen=True)
class GuestArtifacts:
    """What a guest boots from. ``kernel_version`` is the guest's ``uname -r``; digests are hexadecimal."""

    kernel: Path
    kernel_version: str
    kernel_sha256: str
    initramfs: Path
    initramfs_sha256: str
    envd_version: str


def artifacts_directory(home: Path) -> Path:
    """Where a node's guest artefacts are."""
    return home / "artifacts"


async def ensure_kernel_and_initramfs(
    home: Path, envd: Path, *, kernel: Path | None, progress: Progress
) -> GuestArtifacts:
    """The kernel and the initramfs with this ``envd``, built where missing; takes well under a second if not.

    ``kernel`` names a kernel package, a bzImage or a vmlinux to use instead of the distribution's.
    Raises GuestArtifactError.
    """
    try:
        program = await asyncio.to_thread(envd.resolve)
        binary = await asyncio.to_thread(program.read_bytes)
    except OSError as error:
        raise GuestArtifactError(
            f"Cannot read the guest daemon {envd}: {error.strerror}.",
            hint="Build it with scripts/bootstrap.sh, or point AENV_ENVD at the binary.",
        ) from error
    version = await _envd_version(program)
    directory = artifacts_directory(home)
    found = await ensure_kernel(directory, kernel, progress=progress)
    archive = write_cpio(guest_entries(binary, found.modules))
    digest = hashlib.sha256(archive).hexdigest()
    path = directory / f"initramfs-{digest[:16]}.cpio"
    # Made in a few milliseconds, so it is compared with what is on disk and never trusted by name alone.
    if not path.exists() or await asyncio.to_thread(path.read_bytes) != archive:
        progress(f"writing the initramfs with envd {version}")
        with writing(path):
            await asyncio.to_thread(write_durably, path, archive)
    return GuestArtifacts(found.vmlinux, found.release, found.sha256, path, digest, version)


async def _envd_version(envd: Path) -> str:
    """What ``envd --version`` prints last: the E2B version whose behaviour it provides."""
    output = await run([envd, "--version"], hint=f"{envd} is not the guest daemon, or not for this machine.")
    words = output.split()
    if not words:
        raise GuestArtifactError(f"{envd} --version prints nothing.", hint="Build envd again.")
    return words[-1]


async def ensure_base_rootfs(home: Path, *, size_mib: int, progress: Progress) -> Path:
    """The ext4 image of the ``base`` template, ``size_mib`` MiB large and sparse, built where missing (a minute).

    Raises GuestArtifactError.
    """
    return await ensure_rootfs(artifacts_directory(home), size_mib=size_mib, progress=progress)
