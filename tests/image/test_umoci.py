"""Our unpacking against umoci's, file by file, on an image with everything a layer can hold."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from aenv.image.budget import Budget
from aenv.image.layers import apply_layer
from tests.image.trees import describe, differences
from tests.image.writer import Image, archive, folder, hard_link, member, symlink, write_layout

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="unpacking needs root"),
    pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed"),
    pytest.mark.timeout(20),
]

# A capability as getcap shows it: cap_net_raw=ep (struct vfs_cap_data, revision 2).
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000").decode("latin-1")
LONG = "/".join(["directory-with-a-long-name"] * 12)

FIRST = [
    folder("./", mode=0o755, mtime=1_600_000_000.25),
    folder("usr"),
    folder("usr/lib"),
    member("usr/lib/libc.so", b"c" * 70_000, mode=0o755),
    symlink("lib", "usr/lib"),
    symlink("absolute", "/usr/lib"),
    symlink("dangling", "nowhere/else"),
    folder("var/spool", mode=0o1777, uid=3, gid=4),
    member("bin/su", b"root", mode=0o6755, uid=0, gid=5),
    member("bin/ping", b"ping", mode=0o755, pax={"SCHILY.xattr.security.capability": CAPABILITY}),
    member("data", b"1", uid=3_000_000_000, gid=70_000, mtime=1_234_567_890.987654321),
    member("old", b"negative", mtime=-5.5),
    hard_link("data-again", "data"),
    member("über/naïve", b"utf-8"),
    member(f"{LONG}/file", b"long"),
    symlink("long-link", LONG),
    folder("opaque"),
    folder("opaque/inner"),
    member("opaque/inner/a", b"a"),
    member("opaque/b", b"b"),
    folder("gone"),
    member("gone/x", b"x"),
    member("becomes-folder", b"file"),
    folder("becomes-file"),
    member("becomes-file/inside", b"inside"),
    folder("becomes-link"),
    member("becomes-link/inside", b"inside"),
    symlink("link-becomes-file", "data"),
    symlink("link-becomes-folder", "usr"),
    folder("attributes", pax={"SCHILY.xattr.user.one": "1", "SCHILY.xattr.user.two": "2"}),
    folder("touched", mtime=1_500_000_000),
]
SECOND = [
    member("lib/through-a-link", b"lands in usr/lib"),
    member("absolute/another", b"lands in usr/lib"),
    folder("opaque", mode=0o700),
    member("opaque/.wh..wh..opq"),
    member("opaque/new", b"new"),
    member(".wh.gone"),
    folder("becomes-folder"),
    member("becomes-folder/inside", b"now"),
    member("becomes-file", b"now a file"),
    symlink("becomes-link", "usr"),
    member("link-becomes-file", b"own content"),
    folder("link-becomes-folder"),
    folder("attributes", mode=0o711, pax={"SCHILY.xattr.user.two": "changed"}),
    member("touched/child", b"the folder keeps its time"),
    member("usr/lib/.wh.libc.so"),
    member("data", b"2"),  # its other name keeps the old content
    member("dev/null", kind=tarfile.CHRTYPE, mode=0o666, device=(1, 3)),
    member("dev/loop", kind=tarfile.BLKTYPE, mode=0o660, gid=6, device=(7, 0)),
    member("dev/pipe", kind=tarfile.FIFOTYPE, mode=0o620),
    hard_link("dev/pipe-again", "dev/pipe"),
    hard_link("link-again", "lib"),
]


class UmociError(Exception):
    pass


def unpack_both(tmp_path: Path, image: Image) -> tuple[Path, Path]:
    layout, theirs, ours = tmp_path / "layout", tmp_path / "theirs", tmp_path / "ours"
    write_layout(image, layout)
    command = ["umoci", "raw", "unpack", "--image", f"{layout}:latest", str(theirs)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UmociError(done.stderr)
    ours.mkdir()
    ours.chmod(0o755)
    budget = Budget(1024, tmp_path, 0)
    for digest in layers_of(image):
        apply_layer(ours, layout / "blobs/sha256" / digest.removeprefix("sha256:"), budget)
    return ours, theirs


def layers_of(image: Image) -> list[str]:
    return [entry["digest"] for entry in json.loads(image.manifest)["layers"]]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_everything_a_layer_can_hold(tmp_path: Path, form: int) -> None:
    layers = [archive(members, form) for members in (FIRST, SECOND)]
    ours, theirs = (describe(path) for path in unpack_both(tmp_path, Image(layers)))
    # Directories that no layer lists, and the root: umoci gives them the time of unpacking, we the time of what is
    # in them, and the root the time it has in the layer.
    listed = {info.name for info, _ in [*FIRST, *SECOND]}
    for tree in (ours, theirs):
        for path, value in tree.items():
            if str(value[0]).startswith("4") and path not in listed:
                tree[path] = (*value[:3], None, *value[4:])
    assert differences(ours, theirs) == []
    assert len(ours) > 45


def test_random_images(tmp_path: Path) -> None:
    generator = random.Random(7)
    names = [f"{a}{b}" for a in ("a", "a/b", "a/b/c", "d", "d/e") for b in ("", "1", "/x")]
    compared = 0
    for number in range(40):
        layers = []
        for level in range(3):
            members, used = [], set[str]()
            for name in sorted(generator.sample(names, 6)):
                above, _, last = name.rpartition("/")
                # Names below one that this layer makes a file are left out: what they mean is not specified.
                if any(name.startswith(f"{other}/") for other in used):
                    continue
                choice = generator.randrange(5)
                if choice == 0:
                    members.append(folder(name, mode=generator.choice([0o700, 0o755, 0o1777])))
                elif choice == 1 and level:
                    members.append(member(f"{above}/.wh.{last}" if above else f".wh.{last}"))
                    used.add(name)
                elif choice == 2:
                    members.append(symlink(name, generator.choice(["a", "/d", "../d", "nowhere"])))
                    used.add(name)
                else:
                    members.append(member(name, generator.randbytes(generator.randrange(3000))))
                    used.add(name)
            layers.append(archive(members))
        directory = tmp_path / str(number)
        directory.mkdir()
        try:
            ours, theirs = unpack_both(directory, Image(layers, compression=("gzip", "none")))
        except UmociError:
            continue  # it refuses names below what a lower layer made a file; we replace the file
        found = (describe(path, directory_times=False) for path in (ours, theirs))
        assert differences(*found) == [], number
        compared += 1
    assert compared >= 12
