"""From a reference to an ext4 file system: through a real registry and from local files."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from aenv.errors import CapacityError
from aenv.image.errors import (
    ImageNotFoundError,
    ImageTooLargeError,
    RegistryForbiddenError,
    RegistryUnreachableError,
    UnsupportedImageError,
)
from aenv.image.rootfs import ConvertedImage
from aenv.image.store import BlobStore
from tests.image import faulty
from tests.image.conftest import MakeSettings
from tests.image.disks import flat, paths, pull
from tests.image.registries import Registry
from tests.image.writer import Image, archive, digest_of, folder, hard_link, member, push, symlink, write_layout

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="unpacking needs root"),
    pytest.mark.timeout(20),
]

BASE = archive(
    [
        folder("etc"),
        member("etc/passwd", b"root:x:0:0:root:/root:/bin/bash\nnode:x:1000:1000::/home/node:/bin/sh\n"),
        member("etc/group", b"root:x:0:\nnode:x:1000:\n"),
        member("etc/shadow", b"root:*:1::::::\n", mode=0o640, gid=42),
        symlink("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"),
        folder("usr"),
        folder("usr/bin"),
        member("usr/bin/bash", b"#!", mode=0o755),
        member("usr/bin/sudo", b"#!", mode=0o4755),
        symlink("bin", "usr/bin"),
        member("old", b"gone soon"),
    ]
)
TOP = archive(
    [
        member(".wh.old"),
        member("bin/tool", b"x" * 100_000, mode=0o2755, uid=7, gid=8, pax={"SCHILY.xattr.user.note": "kept"}),
        hard_link("usr/tool", "usr/bin/tool"),
        member("dev/null", kind=tarfile.CHRTYPE, mode=0o666, device=(1, 3)),
        member("pipe", kind=tarfile.FIFOTYPE, mode=0o600),
    ]
)
CONFIG = {
    "Env": ["PATH=/usr/bin", "EMPTY=", "A=b=c"],
    "WorkingDir": "/srv",
    "User": "node",
    "Entrypoint": ["/usr/bin/tool"],
    "Cmd": ["--help"],
    "ExposedPorts": {"80/tcp": {}, "53/udp": {}},
    "Volumes": {"/data": {}},
    "Labels": {"a": "b"},
}


def debugfs(image: Path, command: str) -> str:
    done = subprocess.run(["debugfs", "-R", command, image], capture_output=True, text=True, check=True)
    return done.stdout


def check_filesystem(home: Path, converted: ConvertedImage) -> None:
    """A clean ext4 with what BASE and TOP make of each other, and what the platform adds."""
    image = flat(home, converted, home / "flat.img")
    done = subprocess.run(["e2fsck", "-fn", image], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert debugfs(image, "cat /etc/passwd").splitlines()[2:] == ["user:x:1001:1001::/home/user:/bin/bash"]
    assert debugfs(image, "cat /etc/shadow").splitlines()[-1] == "user:!::0:99999:7:::"
    assert "Mode:  0640" in debugfs(image, "stat /etc/shadow") and "Group:    42" in debugfs(
        image, "stat /etc/shadow"
    )
    assert "NOPASSWD" in debugfs(image, "cat /etc/sudoers.d/user")
    assert "Type: regular" in debugfs(image, "stat /etc/resolv.conf")
    assert "User:  1001" in debugfs(image, "stat /home/user")
    tool = debugfs(image, "stat /usr/bin/tool")
    assert "Mode:  02755" in tool and "User:     7" in tool and "Group:     8" in tool and "Links: 2" in tool
    assert "user.note" in tool
    assert "Mode:  04755" in debugfs(image, "stat /usr/bin/sudo")
    assert "character special" in debugfs(image, "stat /dev/null")
    assert "Mode:  0755" in debugfs(image, "stat /")
    assert "FIFO" in debugfs(image, "stat /pipe")
    assert "old" not in debugfs(image, "ls /")


async def test_registry_image_becomes_a_file_system(registry: Registry, make_settings: MakeSettings) -> None:
    image = Image([BASE, TOP], CONFIG, compression=("gzip", "zstd"))
    push(registry.base, "team/app", "1", [Image([TOP], architecture="arm64"), image], index=True)
    settings = make_settings(registry.host)
    lines: list[str] = []
    found = await pull(f"{registry.host}/team/app:1", settings, 64, progress=lines.append)
    assert found.size == 64 << 20
    assert sum(layer.size for layer in found.layers) < 1 << 20
    check_filesystem(settings.home, found)
    config = found.config
    assert config.digest == image.digest
    assert config.env == {"PATH": "/usr/bin", "EMPTY": "", "A": "b=c"}
    assert (config.working_dir, config.user, config.labels) == ("/srv", "node", {"a": "b"})
    assert (config.entrypoint, config.cmd) == (("/usr/bin/tool",), ("--help",))
    assert (config.exposed_ports, config.volumes) == (("53/udp", "80/tcp"), ("/data",))
    assert any("pulling" in line for line in lines)
    assert not list((settings.home / "images/work").iterdir())
    # Set-user-id files of images are unpacked where only root comes.
    assert (settings.home / "images/work").stat().st_mode & 0o777 == 0o700

    inodes = [path.stat().st_ino for path in paths(settings.home, found.layers)]
    lines.clear()
    again = await pull(f"{registry.host}/team/app@{image.digest}", settings, 64, progress=lines.append)
    assert again == found and not lines
    assert [path.stat().st_ino for path in paths(settings.home, found.layers)] == inodes


async def test_two_pulls_of_one_image_make_it_once(registry: Registry, make_settings: MakeSettings) -> None:
    push(registry.base, "team/twice", "latest", [Image([BASE])])
    settings = make_settings(registry.host, registry_search=[registry.host])
    lines: list[str] = []
    both = await asyncio.gather(*(pull("team/twice", settings, 32, progress=lines.append) for _ in range(2)))
    assert both[0] == both[1]
    assert sum("writing" in line for line in lines) == 1


async def test_short_names_are_searched(make_settings: MakeSettings) -> None:
    image = Image([BASE])
    first, second = faulty.FaultyRegistry(image), faulty.FaultyRegistry(image)
    async with first.running(), second.running():
        hosts = [first.host, second.host]
        settings = make_settings(*hosts, registry_search=hosts)
        first.faults = [faulty.status(404)]
        assert (await pull("app", settings, 32)).config.digest == image.digest and len(first.requests) == 1
        first.faults, second.faults = [faulty.status(404)], [faulty.status(404)]
        with pytest.raises(ImageNotFoundError, match="in none of"):
            await pull("app", settings, 32)
        first.faults, asked = [faulty.status(400)], len(second.requests)
        with pytest.raises(RegistryUnreachableError):
            await pull("app", settings, 32)
        assert len(second.requests) == asked  # it could be somebody else's image


async def test_docker_formats(registry: Registry, make_settings: MakeSettings) -> None:
    image = Image([BASE, TOP], docker=True)
    push(registry.base, "docker/list", "x", [image], index=True, docker_list=True)
    settings = make_settings(registry.host)
    found = await pull(f"{registry.host}/docker/list:x", settings, 32)
    check_filesystem(settings.home, found)
    assert found.config.digest == image.digest


async def test_errors_of_a_registry_image(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)

    async def attempt(name: str, size: int = 32) -> None:
        await pull(f"{registry.host}/{name}", settings, size)

    with pytest.raises(ImageNotFoundError, match="not found"):
        await attempt("no/such:image")
    push(registry.base, "team/arm", "latest", [Image([BASE], architecture="arm64")])
    with pytest.raises(UnsupportedImageError, match="arm64"):
        await attempt("team/arm")
    big = os.urandom(40 << 20)
    push(registry.base, "team/bomb", "latest", [Image([archive([member("noise", big)])], compression=("none",))])
    with pytest.raises(ImageTooLargeError):
        await attempt("team/bomb", 8)
    with pytest.raises(ImageTooLargeError):
        await attempt("team/bomb", 32)  # within the budget for layers, not within the file system
    assert not list((settings.home / "images/work").iterdir())
    assert not list((settings.home / "images/rootfs").glob("*"))


async def test_a_node_without_room_for_names_says_so(
    registry: Registry, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(registry.host)
    push(registry.base, "team/room", "latest", [Image([BASE])])

    def full(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("aenv.image.layerstore.write_record", full)
        with pytest.raises(CapacityError):
            await pull(f"{registry.host}/team/room", settings, 32)
    await pull(f"{registry.host}/team/room", settings, 32)


async def test_damaged_cache_is_discarded(registry: Registry, make_settings: MakeSettings) -> None:
    image = Image([BASE], compression=("none",))
    push(registry.base, "team/damaged", "latest", [image])
    settings = make_settings(registry.host)
    blob = BlobStore(settings.home).path(digest_of(BASE))
    blob.parent.mkdir(parents=True)
    blob.write_bytes(BASE.replace(b"gone soon", b"GONE SOON"))
    name = f"{registry.host}/team/damaged"
    with pytest.raises(Exception, match="damaged"):
        await pull(name, settings, 32)
    path = flat(settings.home, await pull(name, settings, 32), settings.home / "flat.img")
    assert debugfs(path, "cat /old") == "gone soon"


async def test_cancelling_leaves_nothing(registry: Registry, make_settings: MakeSettings) -> None:
    push(registry.base, "team/big", "latest", [Image([archive([member("a", os.urandom(20 << 20))])])])
    settings = make_settings(registry.host)
    unpacking = asyncio.Event()
    task = asyncio.ensure_future(
        pull(
            f"{registry.host}/team/big",
            settings,
            64,
            progress=lambda line: unpacking.set() if "unpacking" in line else None,
        )
    )
    await unpacking.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not list((settings.home / "images/work").iterdir())


async def test_local_sources(tmp_path: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    image = Image([BASE, TOP], CONFIG)
    write_layout(image, tmp_path / "layout", "1.0")
    with tarfile.open(tmp_path / "layout.tar", "w") as tar:
        tar.add(tmp_path / "layout", ".")
    saved = {"config.json": next(data for data in image.blobs.values() if data.startswith(b'{"os"')), "a.tar": BASE}
    saved["b/layer.tar"] = TOP
    listed = [{"Config": "config.json", "RepoTags": ["app:1"], "Layers": ["a.tar", "link/layer.tar"]}]
    saved["manifest.json"] = json.dumps(listed).encode()
    with tarfile.open(tmp_path / "saved.tar.gz", "w:gz") as tar:
        for name, data in saved.items():
            info, _ = member(name, data)
            tar.addfile(info, io.BytesIO(data))
        tar.addfile(symlink("link", "b")[0])
    (tmp_path / "tree.tar").write_bytes(archive([member(".wh.name", b"plain"), member("etc/hosts", b"mine")]))

    for source in ("oci:layout", "oci:layout:1.0", "oci:layout.tar", "docker-archive:saved.tar.gz"):
        kind, _, rest = source.partition(":")
        found = await pull(f"{kind}:{tmp_path}/{rest}", settings, 32, allow_local=True)
        check_filesystem(settings.home, found)
        assert found.config.cmd == ("--help",)
    found = await pull(f"tar:{tmp_path}/tree.tar", settings, 32, allow_local=True)
    path, config = flat(settings.home, found, tmp_path / "flat.img"), found.config
    assert debugfs(path, "cat /.wh.name") == "plain" and debugfs(path, "cat /etc/hosts") == "mine"
    assert config.cmd == () and config.working_dir == "/"
    assert debugfs(path, "cat /etc/passwd").splitlines()[1] == "user:x:1000:1000::/home/user:/bin/sh"

    with pytest.raises(RegistryForbiddenError):
        await pull(f"oci:{tmp_path}/layout", settings, 32)
    with pytest.raises(RegistryForbiddenError):
        await pull(f"oci:{tmp_path}/nothing", settings, 32)
    with pytest.raises(ImageNotFoundError, match="no image called"):
        await pull(f"oci:{tmp_path}/layout:2", settings, 32, allow_local=True)


async def test_layer_paths_of_an_archive_cannot_leave_it(tmp_path: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    secret = tmp_path / "secret.tar"
    secret.write_bytes(archive([member("secret", b"x")]))
    config = json.dumps({"rootfs": {"diff_ids": [digest_of(secret.read_bytes())]}}).encode()
    listed = json.dumps([{"Config": "c", "Layers": ["link"]}]).encode()
    members = [member("c", config), member("manifest.json", listed), symlink("link", str(secret))]
    (tmp_path / "saved.tar").write_bytes(archive(members))
    with pytest.raises(ImageNotFoundError, match="missing"):
        await pull(f"docker-archive:{tmp_path}/saved.tar", settings, 32, allow_local=True)
