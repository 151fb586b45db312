"""The lab's kernel: the distribution's ordinary one, taken from its package without installing it.

One directory in the cache, made once and renamed into place::

    kernel-<version>-<digest>/
        vmlinux      uncompressed, which saves the lab seconds of decompression under emulation
        initramfs    busybox, the modules that mount the root disk, lab/guest/init
        modules/     lib/modules of the package
"""

import asyncio
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from aenv.guest import bzimage
from aenv.guest.commands import GuestArtifactError, Progress, run, workspace
from aenv.guest.initramfs import Entry, guest_entries, write_cpio
from aenv.guest.kernel import MINIMUM, newest_candidate
from aenv.guest.modules import Module, collect, unsigned
from lab import recipe

GUEST = Path(__file__).parent / "guest"
_APT_HINT = "Run `apt-get update` and scripts/bootstrap.sh as root; on Debian 12 the backports have it."


@dataclass(frozen=True, slots=True)
class LabKernel:
    vmlinux: Path
    initramfs: Path
    modules: Path
    release: str
    name: str  # names its contents


async def ensure_kernel(cache: Path, progress: Progress) -> LabKernel:
    """The newest kernel that apt offers, taken from its package on the first call. Raises GuestArtifactError."""
    shown = await run(["apt-cache", "show", recipe.KERNEL_PACKAGE], hint=_APT_HINT)
    candidate = newest_candidate(shown)
    if candidate is None:
        raise GuestArtifactError(f"apt offers no kernel of {'.'.join(map(str, MINIMUM))} or newer.", hint=_APT_HINT)
    key = recipe.digest([candidate.version, GUEST / "init", Path(__file__), repr(recipe.BOOT_MODULES)])
    directory = cache / f"kernel-{candidate.version.replace(':', '_')}-{key}"
    if not directory.exists():
        progress(f"fetching {candidate.package} {candidate.version}")
        work = workspace(cache, "building-kernel-")
        try:
            hint = "Check the network and apt's sources, run `apt-get update`, then try again."
            wanted = [f"{candidate.package}={candidate.version}", "busybox-static"]
            await run(["apt-get", "-o", "APT::Sandbox::User=root", "download", *wanted], cwd=work, hint=hint)
            for package in work.glob("*.deb"):
                await run(["dpkg-deb", "-x", package, work / "tree"], hint=f"{package.name} is damaged.")
            await asyncio.to_thread(_build, work / "tree", work / "out")
            (work / "out").rename(directory)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    (tree,) = (directory / "modules").iterdir()
    return LabKernel(directory / "vmlinux", directory / "initramfs", directory / "modules", tree.name, directory.name)


def _build(tree: Path, out: Path) -> None:
    out.mkdir()
    (image,) = (tree / "boot").glob("vmlinuz-*")
    (out / "vmlinux").write_bytes(bzimage.vmlinux(image.read_bytes()))
    (modules,) = (tree / "lib/modules").iterdir()
    found = collect(modules, recipe.BOOT_MODULES, recipe.BOOT_MODULES_OPTIONAL)
    # Checking a signature costs about 20 ms per module under emulation.
    entries = guest_entries((GUEST / "init").read_bytes(), [Module(m.name, unsigned(m.data), ()) for m in found])
    busybox = Entry("busybox", stat.S_IFREG | 0o755, (tree / "bin/busybox").read_bytes())
    (out / "initramfs").write_bytes(write_cpio([busybox, *entries]))
    (tree / "lib/modules").rename(out / "modules")
