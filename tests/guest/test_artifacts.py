"""Kernel and initramfs from start to end on synthetic packages; apt's sources; typed errors."""

import gzip
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from aenv.guest import kernel as kernels
from aenv.guest.apt_sources import (
    parse_deb822,
    parse_one_line,
    release_sources,
    without_credentials,
)
from aenv.guest.artifacts import GuestArtifactError, ensure_kernel_and_initramfs
from aenv.guest.commands import run, writing
from aenv.guest.initramfs import read_cpio
from aenv.guest.rootfs import recipe_key
from tests.guest import elf
from tests.guest.test_bzimage import image
from tests.guest.test_modules import make_tree

RELEASE = "6.12.9-test"
KERNEL = elf.with_note(b"Xen", 18, banner=f"Linux version {RELEASE} (builder)\n".encode())


def quiet(_: str) -> None:
    """No progress wanted."""


def write_envd(path: Path, version: str) -> Path:
    path.write_text(f"#!/bin/sh\necho envd {version}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def envd(tmp_path: Path) -> Path:
    return write_envd(tmp_path / "envd", "0.6.4")


@pytest.fixture
def vmlinuz(tmp_path: Path) -> Path:
    """A kernel file with its modules in the tree it is in, as in an unpacked package."""
    root = tmp_path / "unpacked"
    (root / "boot").mkdir(parents=True)
    make_tree(root / "lib/modules" / RELEASE, {"virtio_mmio": {}, "virtio_blk": {}, "virtio_net": {}})
    path = root / "boot" / f"vmlinuz-{RELEASE}"
    path.write_bytes(image(gzip.compress(KERNEL)))
    return path


async def test_kernel_file_and_second_run(tmp_path: Path, envd: Path, vmlinuz: Path) -> None:
    home = tmp_path / "home"
    steps: list[str] = []
    made = await ensure_kernel_and_initramfs(home, envd, kernel=vmlinuz, progress=steps.append)
    assert made.kernel.read_bytes() == KERNEL
    assert (made.kernel_version, made.envd_version) == (RELEASE, "0.6.4")
    order = next(e for e in read_cpio(made.initramfs.read_bytes()) if e.path == "modules/order")
    assert order.data == b"virtio_mmio.ko\nvirtio_blk.ko\nvirtio_net.ko\n"
    steps.clear()
    assert await ensure_kernel_and_initramfs(home, envd, kernel=vmlinuz, progress=steps.append) == made
    assert steps == []


async def test_a_damaged_kernel_is_built_again(tmp_path: Path, envd: Path, vmlinuz: Path) -> None:
    home = tmp_path / "home"
    made = await ensure_kernel_and_initramfs(home, envd, kernel=vmlinuz, progress=quiet)
    made.kernel.write_bytes(b"torn")
    (home / "artifacts" / "building-kernel-leftover").mkdir()
    again = await ensure_kernel_and_initramfs(home, envd, kernel=vmlinuz, progress=quiet)
    assert again == made
    assert again.kernel.read_bytes() == KERNEL
    assert not list((home / "artifacts").glob("building-*"))


async def test_another_envd_is_another_initramfs(tmp_path: Path, envd: Path, vmlinuz: Path) -> None:
    first = await ensure_kernel_and_initramfs(tmp_path / "home", envd, kernel=vmlinuz, progress=quiet)
    write_envd(envd, "0.6.5")
    second = await ensure_kernel_and_initramfs(tmp_path / "home", envd, kernel=vmlinuz, progress=quiet)
    assert second.initramfs != first.initramfs
    assert first.initramfs.exists()
    assert second.kernel == first.kernel


def build_package(tree: Path, package: Path) -> Path:
    (tree / "DEBIAN").mkdir()
    fields = {"Package": "linux-image-test", "Version": "1", "Architecture": "amd64", "Description": "test"}
    fields["Maintainer"] = "test <test@localhost>"
    (tree / "DEBIAN/control").write_text("".join(f"{key}: {value}\n" for key, value in fields.items()))
    subprocess.run(["dpkg-deb", "--root-owner-group", "-b", tree, package], check=True, capture_output=True)
    return package


@pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="dpkg-deb is not installed")
async def test_kernel_package(tmp_path: Path, envd: Path, vmlinuz: Path) -> None:
    package = build_package(vmlinuz.parent.parent, tmp_path / "linux-image-test.deb")
    made = await ensure_kernel_and_initramfs(tmp_path / "home", envd, kernel=package, progress=quiet)
    assert made.kernel_version == RELEASE
    package.write_bytes(package.read_bytes()[:200])
    with pytest.raises(GuestArtifactError, match="dpkg-deb failed"):
        await ensure_kernel_and_initramfs(tmp_path / "home", envd, kernel=package, progress=quiet)


async def test_missing_inputs_are_typed_errors(tmp_path: Path, envd: Path) -> None:
    with pytest.raises(GuestArtifactError, match="guest daemon") as caught:
        await ensure_kernel_and_initramfs(tmp_path, tmp_path / "none", kernel=None, progress=quiet)
    assert "bootstrap" in caught.value.hint
    with pytest.raises(GuestArtifactError, match="no kernel at"):
        await ensure_kernel_and_initramfs(tmp_path, envd, kernel=tmp_path / "none", progress=quiet)
    with pytest.raises(GuestArtifactError, match="not installed") as caught:
        await run(["aenv-no-such-program"], hint="unused")
    assert "bootstrap" in caught.value.hint
    with pytest.raises(GuestArtifactError, match="status 3") as caught:
        await run(["sh", "-c", "echo 'No space left on device'; exit 3"], hint="unused")
    assert "disk is full" in caught.value.hint


def test_full_disk_has_a_hint(tmp_path: Path) -> None:
    with pytest.raises(GuestArtifactError, match="No space left") as caught, writing(tmp_path):
        raise OSError(28, os.strerror(28))
    assert "AENV_HOME" in caught.value.hint


def test_newest_kernel_of_apt() -> None:
    shown = """\
Package: linux-image-cloud-amd64
Version: 6.12.95-1~bpo12+1
Depends: linux-image-6.12.95+deb12-cloud-amd64 (= 6.12.95-1~bpo12+1)

Package: linux-image-cloud-amd64
Version: 6.12.100-1~bpo12+1
Depends: linux-image-6.12.100+deb12-cloud-amd64 (= 6.12.100-1~bpo12+1)

Package: linux-image-cloud-amd64
Version: 6.1.192-3
Depends: linux-image-6.1.0-57-cloud-amd64 (= 6.1.192-3)
"""
    found = kernels.newest_candidate(shown)
    assert found is not None
    assert found.package == "linux-image-6.12.100+deb12-cloud-amd64"
    assert found.version == "6.12.100-1~bpo12+1"
    assert kernels.newest_candidate(shown[shown.rindex("Package") :]) is None


DEB822 = """\
Types: deb deb-src
# a comment
URIs: https://name:secret@mirror.example/debian
Suites: trixie trixie-updates trixie-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Enabled: no
Types: deb
URIs: https://off.example/debian
Suites: trixie
Components: main

Types: deb
URIs: https://third-party.example
Suites: stable
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
"""


def test_sources_of_the_release_only() -> None:
    [source] = release_sources(parse_deb822(DEB822), "trixie")
    assert source.suites == ("trixie", "trixie-updates")
    assert source.signed_by == "/usr/share/keyrings/debian-archive-keyring.gpg"
    assert without_credentials(source).uris == ("https://mirror.example/debian",)


def test_one_line_sources() -> None:
    text = "# deb http://off.example x\ndeb [arch=amd64 signed-by=/k.gpg] http://a.example/d trixie main contrib\n"
    [source] = parse_one_line(text)
    assert (source.uris, source.suites) == (("http://a.example/d",), ("trixie",))
    assert (source.components, source.signed_by) == (("main", "contrib"), "/k.gpg")
    assert parse_deb822(source.deb822()) == [source]


def test_recipe_key_changes_with_the_recipe() -> None:
    sources = parse_one_line("deb http://a.example/debian trixie main")
    key = recipe_key("trixie", sources, 4096)
    assert key == recipe_key("trixie", list(sources), 4096)
    assert len({key, recipe_key("trixie", sources, 8192), recipe_key("sid", sources, 4096)}) == 3
