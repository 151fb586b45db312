"""The lab's prepared disks, in the cache by the digest of what they are made from.

    system-<digest>.ext4     Debian, the virtual environment, guest kernel and base image; raw and sparse
    home-<digest>.qcow2      over it: what a node's first start leaves, its ``base`` template (``lab.prepare``)

Each is written under another name and renamed, and never changed afterwards: a lab that runs has an overlay of its
own. What another digest has replaced goes with the next preparation, unless a machine still runs on it.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aenv.guest.apt_sources import Source, read_sources, release_sources, without_credentials
from aenv.guest.artifacts import artifacts_directory, ensure_base_rootfs, ensure_kernel_and_initramfs
from aenv.guest.commands import GuestArtifactError, Progress, run, workspace
from aenv.guest.rootfs import os_release
from lab import recipe, tree
from lab.kernel import GUEST, LabKernel, ensure_kernel
from lab.settings import ENVD, GUEST_CACHE, ROOT, LabSettings

NEEDED_MIB = 8 * 1024  # free space while a system disk is made; 3.5 GiB of it stay
BASE_DISK_MIB = 4096  # of the base image: the default of the server's settings, or it makes another
PROGRAMS = {
    "qemu-system-x86_64": "qemu-system-x86",
    "qemu-img": "qemu-utils",
    "mmdebstrap": "mmdebstrap",
    "mke2fs": "e2fsprogs",
    "ssh": "openssh-client",
    "setpriv": "util-linux",
}


@dataclass(frozen=True, slots=True)
class SystemDisk:
    image: Path
    kernel: LabKernel
    key: str


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """One preparation at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def check_host(settings: LabSettings) -> None:
    """Raises GuestArtifactError for what would fail later and less clearly."""
    missing = sorted({package for name, package in PROGRAMS.items() if shutil.which(name) is None})
    if missing:
        raise GuestArtifactError(
            f"The lab needs programs of {', '.join(missing)}.", hint=f"Run: apt-get install {' '.join(missing)}"
        )
    if not (ROOT / ENVD).exists():
        raise GuestArtifactError(f"The guest daemon {ROOT / ENVD} is missing.", hint="Run scripts/bootstrap.sh.")
    if settings.firecracker is not None and not os.access(settings.firecracker, os.X_OK):
        raise GuestArtifactError(
            f"AENV_FIRECRACKER_BIN names {settings.firecracker}, which is not a program.", hint="Correct or unset it."
        )
    meminfo = Path("/proc/meminfo").read_text()
    available = int(meminfo.split("MemAvailable:")[1].split()[0]) >> 10
    if available < settings.memory_mib // 2:
        raise GuestArtifactError(
            f"{available} MiB of memory are available and the lab has {settings.memory_mib}.",
            hint="Free some, or give the lab less with AENV_LAB_MEMORY (MiB).",
        )


def _codename() -> str:
    fields = os_release()
    codename = fields.get("VERSION_CODENAME", "")
    if codename not in ("bookworm", "trixie"):
        raise GuestArtifactError(
            f"The lab is made of Debian 12 or 13 packages, and this is {fields.get('PRETTY_NAME', 'another')}.",
            hint="Run it on a Debian 12 or 13 machine or container; it needs no virtualization there.",
        )
    return codename


def backports(sources: list[Source], codename: str) -> list[Source]:
    wanted = f"{codename}-backports"
    return [Source(s.uris, (wanted,), s.components, s.signed_by) for s in sources if wanted in s.suites]


async def ensure_system(settings: LabSettings, progress: Progress) -> SystemDisk:
    """The system disk, made on the first call (four minutes). Needs root. Raises GuestArtifactError."""
    check_host(settings)
    codename = _codename()
    own = release_sources(read_sources(), codename)
    if not own:
        raise GuestArtifactError(
            f"apt has no source of {codename}.", hint="The lab is made from the machine's own sources: see /etc/apt."
        )
    everything = own + (backports(read_sources(), codename) if codename == "bookworm" else [])
    clean = [without_credentials(source) for source in own]
    cache = settings.cache
    with locked(cache):
        if not settings.key.exists():
            await run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", settings.key], hint="")
        kernel = await ensure_kernel(cache, progress)
        base = await ensure_base_rootfs(cache, size_mib=BASE_DISK_MIB, progress=progress)
        guest = await ensure_kernel_and_initramfs(cache, ROOT / ENVD, kernel=None, progress=progress)
        public_key = settings.key.with_suffix(".pub").read_text()
        here = Path(__file__)
        key = recipe.digest(
            [
                ROOT / "uv.lock", ROOT / "pyproject.toml", here.with_name("recipe.py"), here.with_name("tree.py"),
                *sorted(GUEST.iterdir()), kernel.name, base.name, guest.kernel.parent.name, public_key,
                repr(clean), await run(["apt-cache", "policy", "qemu-system-x86"], hint=""),
            ]
        )  # fmt: skip
        image = cache / f"system-{key}.ext4"
        if not image.exists():
            await _build(cache, image, codename, everything, clean, kernel, [base, guest.kernel.parent], progress)
    return SystemDisk(image, kernel, key)


async def _build(
    cache: Path,
    image: Path,
    codename: str,
    sources: list[Source],
    guest_sources: list[Source],
    kernel: LabKernel,
    artifacts: list[Path],
    progress: Progress,
) -> None:
    if os.geteuid() != 0:
        raise GuestArtifactError("Making the lab's disk needs root.", hint="Run this once as root.")
    free = shutil.disk_usage(cache).free >> 20
    if free < NEEDED_MIB:
        raise GuestArtifactError(
            f"{cache} has {free} MiB free, and the lab's disk needs {NEEDED_MIB}.",
            hint="Free space, or name another folder with AENV_LAB_CACHE.",
        )
    work = workspace(cache, "building-system-")
    try:
        work.chmod(0o755)  # apt's unprivileged user has to pass through
        root = work / "tree"
        await tree.make_tree(root, codename, sources, progress)
        progress("lab disk: virtual environment, kernel modules, guest artefacts")
        public_key = (cache / "key.pub").read_text()
        await asyncio.to_thread(tree.customise, root, kernel, guest_sources, public_key)
        await asyncio.to_thread(tree.copy_environment, root)
        await tree.finish(root, kernel)
        target = artifacts_directory(root / GUEST_CACHE.relative_to("/"))
        target.mkdir(parents=True)
        await run(["cp", "-a", "--sparse=always", "--reflink=auto", *artifacts, target], hint="The disk may be full.")
        progress("lab disk: writing the filesystem")
        made = work / "image"
        with made.open("wb") as file:
            file.truncate(recipe.DISK_MIB << 20)
        argv = [
            "mke2fs", "-q", "-F", "-t", "ext4", "-L", "lab", "-m", "0",
            "-E", "lazy_itable_init=0,lazy_journal_init=0", "-d", str(root), str(made),
        ]  # fmt: skip
        await run(argv, hint="The disk may be full.")
        made.replace(image)
    finally:
        # Safe whatever happened: the bootstrap's mounts are in a mount namespace that ended with it.
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)


def remove_replaced(settings: LabSettings, keep: set[Path]) -> None:
    """Remove disks and kernels that are neither in ``keep`` nor below a machine that exists."""
    if settings.machines.exists() and any(settings.machines.iterdir()):
        return
    for pattern in ("system-*.ext4", "home-*.qcow2", "kernel-*"):
        for path in settings.cache.glob(pattern):
            if path not in keep:
                with contextlib.suppress(FileNotFoundError):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
