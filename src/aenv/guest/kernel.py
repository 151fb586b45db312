"""The guest's kernel: a distribution's cloud kernel, taken from its package without installing it.

One directory per kernel, made once and then kept, because a snapshot can only be restored under the kernel that
captured it::

    $AENV_HOME/artifacts/kernel-<release>[-<digest>]/
        vmlinux         uncompressed ELF with a PVH entry point
        modules/        the modules a guest loads, uncompressed and without signature
        manifest.json   written last: a directory without it is not a kernel and is built again

The directory is made under another name and renamed, so a crash leaves either all of it or a leftover that the
next run removes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from aenv.guest import bzimage
from aenv.guest.commands import GuestArtifactError, Progress, run, workspace, writing
from aenv.guest.modules import Module, collect, unsigned

MINIMUM = (6, 12)
"""The oldest kernel that is taken from a repository (page scanning, EROFS over files, VMGENID)."""

_TEMPORARY = "building-kernel-"
_FORMAT = 1
_IMAGE_PACKAGE = re.compile(r"\blinux-image-(?:unsigned-)?(\d+\.\d+[^\s,|()]*)")
_MODULES_PACKAGE = re.compile(r"\blinux-modules-\d[^\s,|()]*")
_APT_HINT = "Run `apt-get update` and scripts/bootstrap.sh as root, or name a kernel with AENV_KERNEL."


@dataclass(frozen=True)
class Kernel:
    """A guest kernel on disk. ``release`` is what ``uname -r`` prints in the guest."""

    vmlinux: Path
    release: str
    sha256: str
    modules: tuple[Module, ...]


@dataclass(frozen=True)
class Candidate:
    """A kernel package that apt offers: its name, its version, its kernel's version numbers."""

    package: str
    version: str
    numbers: tuple[int, ...]


def version_numbers(release: str) -> tuple[int, ...]:
    """The leading numbers of a release: ``6.12.95+deb12-cloud-amd64`` gives (6, 12, 95)."""
    match = re.match(r"\d+(?:[.-]\d+)*", release)
    return tuple(int(part) for part in re.split(r"[.-]", match.group())) if match else ()


def newest_candidate(apt_show: str) -> Candidate | None:
    """The newest image that the meta packages in ``apt-cache show``'s output depend on, if it is new enough."""
    found: list[Candidate] = []
    for stanza in apt_show.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in stanza.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        for match in _IMAGE_PACKAGE.finditer(fields.get("Depends", "")):
            numbers = version_numbers(match.group(1))
            if numbers >= MINIMUM:
                found.append(Candidate(match.group(), fields["Version"], numbers))
    return max(found, key=lambda candidate: candidate.numbers, default=None)


def _meta_packages(os_release: Path = Path("/etc/os-release")) -> list[str]:
    """The packages whose dependency is the distribution's newest kernel for virtual machines."""
    text = os_release.read_text() if os_release.exists() else ""
    fields = {key: value.strip('"') for key, _, value in (line.partition("=") for line in text.splitlines())}
    if fields.get("ID") == "ubuntu":
        return [f"linux-image-virtual-hwe-{fields.get('VERSION_ID', '')}", "linux-image-virtual"]
    return ["linux-image-cloud-amd64"]


async def ensure_kernel(artifacts: Path, source: Path | None, *, progress: Progress) -> Kernel:
    """The kernel under ``artifacts``, built there on the first call.

    ``source`` is a kernel package (``.deb``), a bzImage or an ELF vmlinux; without one, a kernel already taken from
    the distribution is used, else its newest is fetched. Raises GuestArtifactError.
    """
    digest, kernel = await asyncio.to_thread(_find, artifacts, source)
    if kernel is not None:
        return kernel
    work = workspace(artifacts, _TEMPORARY)
    try:
        if source is None:
            await _download(work, progress)
            packages = _files(work, "*.deb")
            image, modules = await _unpack(packages, work)
            origin = ", ".join(package.name for package in packages)
        elif source.suffix == ".deb":
            image, modules = await _unpack([source], work)
            origin = str(source)
        else:
            image, modules, origin = source, None, str(source)
        progress(f"extracting the guest kernel from {origin}")
        return await asyncio.to_thread(_build, artifacts, work, image, modules, origin, digest)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _find(artifacts: Path, source: Path | None) -> tuple[str, Kernel | None]:
    """The source's digest (empty without a source) and the kernel already made from it, if there is one."""
    if source is None:
        digest, pattern = "", "kernel-*"
    elif source.is_file():
        digest = _file_sha256(source)
        pattern = f"kernel-*-{digest[:12]}"
    else:
        raise GuestArtifactError(f"There is no kernel at {source}.", hint="Correct AENV_KERNEL, or unset it.")
    directories = [path for path in artifacts.glob(pattern) if source or _from_apt(path / "manifest.json")]
    directories.sort(key=lambda path: version_numbers(path.name.removeprefix("kernel-")), reverse=True)
    loaded = (_load(directory) for directory in directories)
    return digest, next((kernel for kernel in loaded if kernel is not None), None)


def _files(directory: Path, *patterns: str) -> list[Path]:
    """What matches any of ``patterns``, sorted."""
    return sorted(path for pattern in patterns for path in directory.glob(pattern))


async def _download(work: Path, progress: Progress) -> None:
    """Fetch into ``work`` the newest kernel's packages with the machine's apt configuration."""
    shown = ""
    for meta in _meta_packages():
        # A package that this release does not have is not an error: another of the list may exist.
        try:
            shown += "\n\n" + await run(["apt-cache", "show", meta], hint=_APT_HINT)
        except GuestArtifactError as error:
            if "No packages found" not in str(error):
                raise
    candidate = newest_candidate(shown)
    if candidate is None:
        wanted = ".".join(map(str, MINIMUM))
        raise GuestArtifactError(f"apt offers no kernel of {wanted} or newer.", hint=_APT_HINT)
    names = [f"{candidate.package}={candidate.version}"]
    depends = await run(["apt-cache", "depends", "--no-recommends", "--no-suggests", names[0]], hint=_APT_HINT)
    names += sorted(set(_MODULES_PACKAGE.findall(depends)))
    progress(f"fetching {candidate.package} {candidate.version}")
    hint = "Check the network and apt's sources, run `apt-get update`, then try again."
    # Root may write here and apt's own user may not; the file's digest is checked either way.
    await run(["apt-get", "-o", "APT::Sandbox::User=root", "download", *names], cwd=work, hint=hint)


async def _unpack(packages: list[Path], work: Path) -> tuple[Path, Path | None]:
    """Unpack kernel packages without installing them: the image and the modules directory."""
    tree = work / "tree"
    for package in packages:
        await run(["dpkg-deb", "-x", package, tree], hint=f"{package.name} is damaged: fetch it again.")
    images = _files(tree, "boot/vmlinuz-*")
    trees = _files(tree, "lib/modules/*", "usr/lib/modules/*")
    if not images:
        names = ", ".join(package.name for package in packages)
        raise GuestArtifactError(f"There is no kernel image in {names}.", hint="Use a linux-image package.")
    return images[0], trees[0] if trees else None


def _modules_tree(image: Path, release: str) -> Path | None:
    """Where the modules of a kernel given as a file are: beside it, in the tree it is in, or the host's own."""
    roots = (image.parent, image.parent.parent, Path("/"), Path("/usr"))
    return next((tree for root in roots if (tree := root / "lib/modules" / release).is_dir()), None)


def _build(artifacts: Path, work: Path, image: Path, tree: Path | None, origin: str, source_digest: str) -> Kernel:
    elf = bzimage.vmlinux(image.read_bytes())
    release = bzimage.release(elf)
    tree = tree or _modules_tree(image, release)
    # A kernel without any modules is taken to have its drivers built in: only booting it can tell.
    modules = collect(tree) if tree else []
    directory = artifacts / (f"kernel-{release}-{source_digest[:12]}" if source_digest else f"kernel-{release}")
    digest = hashlib.sha256(elf).hexdigest()
    out = work / "out"
    with writing(artifacts):
        (out / "modules").mkdir(parents=True)
        (out / "vmlinux").write_bytes(elf)
        kept = []
        for module in modules:
            # Checking a signature costs about 20 ms per module under emulation, and the initramfs is ours.
            data = unsigned(module.data)
            (out / "modules" / f"{module.name}.ko").write_bytes(data)
            kept.append(Module(module.name, data, module.depends))
        manifest = {
            "format": _FORMAT,
            "release": release,
            "origin": origin,
            "from_apt": not source_digest,
            "vmlinux_sha256": digest,
            "modules": [{"name": module.name, "depends": module.depends} for module in kept],
        }
        (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        shutil.rmtree(directory, ignore_errors=True)
        out.rename(directory)
    return Kernel(directory / "vmlinux", release, digest, tuple(kept))


def _manifest(path: Path) -> dict[str, object]:
    """A manifest's contents; empty where it cannot be read, so that the kernel is built again."""
    try:
        manifest = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and manifest.get("format") == _FORMAT else {}


def _from_apt(path: Path) -> bool:
    return _manifest(path).get("from_apt") is True


def _load(directory: Path) -> Kernel | None:
    """The kernel in ``directory``, or None where a part is missing or damaged."""
    manifest = _manifest(directory / "manifest.json")
    try:
        if _file_sha256(directory / "vmlinux") != manifest["vmlinux_sha256"]:
            return None
        listed = manifest["modules"]
        assert isinstance(listed, list)
        modules = tuple(
            Module(item["name"], (directory / "modules" / f"{item['name']}.ko").read_bytes(), tuple(item["depends"]))
            for item in listed
        )
        return Kernel(directory / "vmlinux", str(manifest["release"]), str(manifest["vmlinux_sha256"]), modules)
    except (KeyError, OSError):
        return None


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
