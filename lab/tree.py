"""The lab's file system: Debian packages, kernel modules, the project's virtual environment, guest artefacts."""

import asyncio
import os
import re
import shutil
import subprocess
from pathlib import Path

from aenv.guest.apt_sources import Source
from aenv.guest.commands import GuestArtifactError, Progress, run
from aenv.guest.rootfs import proxy_environment
from lab import recipe
from lab.kernel import GUEST, LabKernel
from lab.settings import CHECKOUT, ROOT

_STEPS = {
    "downloading packages": "downloading packages",
    "installing essential": "installing the essential packages",
    "installing remaining": "installing the remaining packages",
}
_TEXT_LIMIT = 1 << 20  # bytes; scripts and path files are far smaller


async def make_tree(tree: Path, codename: str, sources: list[Source], progress: Progress) -> None:
    """Install the packages into ``tree``. Needs root. Raises GuestArtifactError."""
    listed = tree.with_name("host.sources")
    listed.write_text("\n".join(source.deb822() for source in sources))
    preferences = tree.with_name("preferences")
    preferences.write_text(recipe.preferences(codename))

    def report(line: str) -> None:
        for start, text in _STEPS.items():
            if line.startswith(f"I: {start}"):
                progress(f"lab disk: {text}")

    argv = [
        "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
        "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory",
        f"--include={','.join(recipe.PACKAGES)}",
        "--aptopt=Acquire::Languages \"none\"", "--aptopt=Acquire::Retries \"3\"",
        "--aptopt=APT::Install-Recommends \"false\"",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in recipe.EXCLUDED),
        f"--setup-hook=install -D -m 644 '{preferences}' \"$1/etc/apt/preferences.d/lab\"",
        codename, str(tree), str(listed),
    ]  # fmt: skip
    hint = "Check the network and apt's sources (`apt-get update` must work on this machine), then try again."
    await run(argv, hint=hint, env=await proxy_environment(), on_line=report)


def customise(tree: Path, kernel: LabKernel, sources: list[Source], public_key: str) -> None:
    """Turn a bootstrapped tree into the lab's. ``sources`` are those of a guest, without credentials."""
    shutil.rmtree(tree / "etc/apt/sources.list.d", ignore_errors=True)
    (tree / "etc/apt/sources.list").unlink(missing_ok=True)
    files = dict(recipe.FILES)
    # The node in the lab computes the name of its base image from these, and finds the one that is there.
    files["etc/apt/sources.list.d/base.sources"] = "\n".join(source.deb822() for source in sources)
    files["root/.ssh/authorized_keys"] = public_key
    for name, text in files.items():
        path = tree / name
        path.unlink(missing_ok=True)  # a link (resolv.conf) would lead out of the tree
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    (tree / "root/.ssh").chmod(0o700)
    shutil.copyfile(GUEST / "inittab", tree / "etc/inittab")
    programs = tree / "usr/local/lib/lab"
    programs.mkdir(parents=True, exist_ok=True)
    shutil.copy(GUEST / "boot", programs / "boot")
    for name in ("init", "poweroff"):
        link = tree / "usr/sbin" / name
        link.unlink(missing_ok=True)
        link.symlink_to("/bin/busybox")
    shutil.copytree(kernel.modules, tree / "usr/lib/modules", symlinks=True, dirs_exist_ok=True)


async def finish(tree: Path, kernel: LabKernel) -> None:
    """What programs of the tree do with it: indexes of modules, compiled Python."""
    await run(["chroot", tree, "depmod", kernel.release], hint="The kernel's package is damaged.")
    # Compiling takes minutes in the lab. What does not compile (templates, other Pythons' code) is not imported.
    argv = ["chroot", str(tree), "python3", "-m", "compileall", "-q", "-j", "0", f"{CHECKOUT}/.venv/lib"]
    await asyncio.to_thread(subprocess.run, argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def python_minor(interpreter: list[str]) -> str:
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    return subprocess.run([*interpreter, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def copy_environment(tree: Path) -> None:
    """The checkout's ``.venv``, at its place in the lab and for Debian's Python there. Raises GuestArtifactError."""
    source, target = ROOT / ".venv", tree / CHECKOUT.relative_to("/") / ".venv"
    here, there = python_minor([str(source / "bin/python")]), python_minor(["chroot", str(tree), "python3"])
    if here != there:
        raise GuestArtifactError(
            f"The virtual environment is Python {here}'s, and the lab's Debian has Python {there}.",
            hint=f"Make {source} with Debian's own python3 first: remove it, then run scripts/bootstrap.sh --dev.",
        )
    shutil.copytree(source, target, symlinks=True)
    for name in ("python", "python3", f"python{there}"):
        link = target / "bin" / name
        link.unlink(missing_ok=True)
        link.symlink_to("/usr/bin/python3")
    config = target / "pyvenv.cfg"
    config.write_text(re.sub(r"(?m)^(home) = .*$", r"\1 = /usr/bin", config.read_text()))
    packages = target / "lib" / f"python{there}" / "site-packages"
    for path in (*(target / "bin").iterdir(), *packages.glob("*.pth"), *packages.glob("*.dist-info/direct_url.json")):
        if path.is_symlink() or path.stat().st_size > _TEXT_LIMIT:
            continue
        text = path.read_bytes()
        if b"\0" not in text and os.fsencode(ROOT) in text:
            path.write_bytes(text.replace(os.fsencode(ROOT), os.fsencode(CHECKOUT)))
