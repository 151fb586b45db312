"""The root filesystem of the ``base`` template: the host's own Debian or Ubuntu release, small, for agents.

``mmdebstrap`` makes the tree from the machine's apt sources and ``mke2fs -d`` makes the image from the tree, so
nothing is ever mounted on the host. The file's name is a digest of the recipe: another size, release or version of
this module gives another file, and the same recipe is built once.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import uuid
from pathlib import Path

from aenv.guest.apt_sources import Source, read_sources, release_sources, without_credentials
from aenv.guest.commands import GuestArtifactError, Progress, run, workspace, writing

VERSION = 1
"""Raise it when a change here changes what is in the image."""

PACKAGES = (
    "apt", "bash-completion", "ca-certificates", "curl", "git", "iproute2", "iputils-ping", "less", "nano",
    "netbase", "openssh-client", "procps", "python-is-python3", "python3", "python3-pip", "python3-venv", "sudo",
    "unzip", "wget", "xz-utils",
)  # fmt: skip
"""On top of the release's required packages. What E2B's own base offers and agents reach for first."""

# Left out of every package, now and when a guest installs more. EXTERNALLY-MANAGED is what makes `pip install`
# refuse to work outside a virtual environment; in a sandbox the whole machine is the environment.
_EXCLUDED = (
    "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*", "/usr/share/doc/*", "/usr/share/lintian/*",
    "/usr/lib/python3*/EXTERNALLY-MANAGED",
)  # fmt: skip
_INCLUDED = ("/usr/share/doc/*/copyright",)

_FILES = {
    "etc/hostname": "aenv\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 aenv\n::1 localhost ip6-localhost ip6-loopback\n",
    "etc/machine-id": "",
    "etc/resolv.conf": "",  # envd writes the node's resolvers
    "etc/default/locale": "LANG=C.UTF-8\n",
    "etc/environment": ("LANG=C.UTF-8\nPATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin\n"),
    "etc/fstab": "",
    # Durability of one package's files is worth nothing in a sandbox, and each fsync is slow under emulation.
    "etc/dpkg/dpkg.cfg.d/aenv": "force-unsafe-io\n",
    "etc/apt/apt.conf.d/90aenv": (
        'Acquire::Languages "none";\nAPT::Install-Recommends "false";\nDPkg::Use-Pty "false";\n'
    ),
}
_SUDOERS = "user ALL=(ALL:ALL) NOPASSWD: ALL\n"
_USER_ID = 1000
_TEMPORARY = "building-rootfs-"
_INODE_RATIO = 16384  # bytes per inode; package and dependency trees have many small files
_EXPECTED_STEPS = {
    "running apt-get update": "reading package lists",
    "downloading packages": "downloading packages",
    "extracting archives": "unpacking",
    "installing essential": "installing the essential packages",
    "installing remaining": "installing the remaining packages",
}


def os_release(path: Path = Path("/etc/os-release")) -> dict[str, str]:
    """The fields of os-release(5)."""
    text = path.read_text() if path.exists() else ""
    return {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in text.splitlines())}


def recipe_key(codename: str, sources: list[Source], size_mib: int) -> str:
    """16 hexadecimal digits that change with anything that changes the image on purpose."""
    recipe = [VERSION, codename, size_mib, PACKAGES, _EXCLUDED, _INCLUDED, sorted(_FILES.items()), _SUDOERS]
    recipe.append([source.deb822() for source in sources])
    return hashlib.sha256(repr(recipe).encode()).hexdigest()[:16]


async def ensure_rootfs(artifacts: Path, *, size_mib: int, progress: Progress) -> Path:
    """The base image under ``artifacts``, built on the first call. Needs root. Raises GuestArtifactError."""
    codename = os_release().get("VERSION_CODENAME", "")
    sources = release_sources(read_sources(), codename) if codename else []
    if not sources:
        raise GuestArtifactError(
            f"apt on this machine has no source of its release ({codename or 'unknown'}).",
            hint="The base image is made from the machine's own Debian or Ubuntu sources: add them in /etc/apt.",
        )
    key = recipe_key(codename, [without_credentials(source) for source in sources], size_mib)
    target = artifacts / f"base-{codename}-{key}.ext4"
    if target.is_file():
        return target
    if os.geteuid() != 0:
        raise GuestArtifactError("Building the base image needs root.", hint="Run this once as root.")
    work = workspace(artifacts, _TEMPORARY)
    try:
        os.chmod(work, 0o755)  # noqa: PTH101 - apt's unprivileged user has to pass through
        tree = work / "tree"
        await _bootstrap(tree, codename, sources, progress)
        with writing(work):
            await asyncio.to_thread(_customise, tree, sources)
        progress("base image: writing the filesystem")
        image = work / "image"
        await _make_filesystem(tree, image, key, size_mib)
        with writing(artifacts):
            await asyncio.to_thread(_sync, image)
            image.replace(target)
    finally:
        # Safe whatever happened: the bootstrap's mounts are in a mount namespace that ended with it.
        await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
    return target


async def _bootstrap(tree: Path, codename: str, sources: list[Source], progress: Progress) -> None:
    """Install the packages into ``tree``, in a mount and process namespace that ends with the installer."""
    listed = tree.with_name("host.sources")
    with writing(listed):
        listed.write_text("\n".join(source.deb822() for source in sources))

    def report(line: str) -> None:
        for start, text in _EXPECTED_STEPS.items():
            if line.startswith(f"I: {start}"):
                progress(f"base image: {text}")

    hook = 'chroot "$1" useradd --create-home --uid {0} --user-group --groups sudo --shell /bin/bash user'
    argv = [
        "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
        "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory",
        f"--include={','.join(PACKAGES)}",
        "--aptopt=Acquire::Languages \"none\"", "--aptopt=Acquire::Retries \"3\"",
        *(f"--dpkgopt=path-exclude={pattern}" for pattern in _EXCLUDED),
        *(f"--dpkgopt=path-include={pattern}" for pattern in _INCLUDED),
        f"--customize-hook={hook.format(_USER_ID)}",
        codename, str(tree), str(listed),
    ]  # fmt: skip
    hint = "Check the network and apt's sources (`apt-get update` must work on this machine), then try again."
    await run(argv, hint=hint, env=await proxy_environment(), on_line=report)


async def proxy_environment() -> dict[str, str]:
    """apt's proxies as environment variables: mmdebstrap's apt does not read the host's configuration."""
    shell = await run(
        ["apt-config", "shell", "http_proxy", "Acquire::http::Proxy", "https_proxy", "Acquire::https::Proxy"],
        hint="Run scripts/bootstrap.sh as root.",
    )
    pairs = (line.partition("=") for line in shell.splitlines())
    return {name: value.strip("'") for name, _, value in pairs if value.strip("'") not in ("", "DIRECT")}


def _customise(tree: Path, sources: list[Source]) -> None:
    """Turn a bootstrapped tree into the base image's contents."""
    apt = tree / "etc/apt"
    for path in (*apt.glob("sources.list"), *(apt / "sources.list.d").glob("*")):
        path.unlink()
    guest_sources = "\n".join(without_credentials(source).deb822() for source in sources)
    for name, text in {**_FILES, "etc/apt/sources.list.d/base.sources": guest_sources}.items():
        path = tree / name
        path.unlink(missing_ok=True)  # a link (resolv.conf) would lead out of the tree
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o644)
    sudoers = tree / "etc/sudoers.d/user"
    sudoers.write_text(_SUDOERS)
    sudoers.chmod(0o440)
    for path in (*(tree / "var/log").glob("*.log"), *(tree / "var/log/apt").glob("*"), *(tree / "tmp").glob("*")):
        path.unlink()


async def _make_filesystem(tree: Path, image: Path, key: str, size_mib: int) -> None:
    """Write an ext4 image of ``tree``, sparse.

    Everything that a first mount would otherwise do in the guest is done here: inode tables and journal are
    initialised (no ext4lazyinit thread dirties the disk later). The UUID and the directory hash seed come from the
    recipe's key. ``resize_inode`` stays on, so that a larger disk can be grown into while mounted.
    """
    identity = str(uuid.UUID(hashlib.sha256(key.encode()).hexdigest()[:32]))
    with writing(image), image.open("wb") as file:
        file.truncate(size_mib << 20)
    argv = [
        "mke2fs", "-q", "-F", "-t", "ext4", "-L", "base", "-U", identity, "-m", "0", "-i", str(_INODE_RATIO),
        "-O", "^orphan_file,^metadata_csum_seed",
        "-E", f"lazy_itable_init=0,lazy_journal_init=0,hash_seed={identity}", "-d", str(tree), str(image),
    ]  # fmt: skip
    await run(argv, hint="The disk may be full, or the image's size (AENV_DEFAULT_DISK) too small for its contents.")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
