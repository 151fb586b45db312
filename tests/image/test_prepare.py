"""What is added to an image, and that nothing else is."""

from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path

import pytest

from aenv.image.errors import ArchiveError
from aenv.image.prepare import prepare_for_sandbox
from tests.image.trees import describe

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="ownership needs root")


def make(tree: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tree


def test_an_empty_image_gets_everything(tmp_path: Path) -> None:
    prepare_for_sandbox(tmp_path)
    assert (tmp_path / "etc/passwd").read_text() == (
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    )
    assert (tmp_path / "etc/group").read_text() == "root:x:0:\nuser:x:1000:\n"
    home = (tmp_path / "home/user").stat()
    assert (home.st_uid, home.st_gid, stat.S_IMODE(home.st_mode)) == (1000, 1000, 0o755)
    assert stat.S_IMODE((tmp_path / "tmp").stat().st_mode) == 0o1777
    assert (tmp_path / "etc/resolv.conf").read_text() == "" and "localhost" in (tmp_path / "etc/hosts").read_text()
    assert not (tmp_path / "etc/sudoers.d").exists()
    before = describe(tmp_path)
    prepare_for_sandbox(tmp_path)
    assert describe(tmp_path) == before


def test_what_exists_stays(tmp_path: Path) -> None:
    files = {
        "etc/passwd": "root:x:0:0::/root:/bin/sh\nuser:x:2000:3000::/srv/user:/bin/zsh",
        "etc/group": "users:x:3000:\n",
        "etc/hosts": "10.0.0.1 mine\n",
        "etc/resolv.conf": "nameserver 10.0.0.2\n",
        "etc/sudoers.d/user": "mine\n",
        "usr/bin/sudo": "",
    }
    make(tmp_path, files)
    prepare_for_sandbox(tmp_path)
    assert {name: (tmp_path / name).read_text() for name in files} == files
    assert ((tmp_path / "srv/user").stat().st_uid, (tmp_path / "srv/user").stat().st_gid) == (2000, 3000)


def test_a_taken_number_is_left_to_its_owner(tmp_path: Path) -> None:
    files = {
        "etc/passwd": "root:x:0:0::/root:/bin/sh\nubuntu:x:1000:1000::/home/ubuntu:/bin/bash",
        "etc/group": "ubuntu:x:1000:\nother:x:1001:\n",
        "etc/shadow": "root:*:::::::\n",
        "etc/gshadow": "root:*::\n",
        "etc/skel/.bashrc": "# skeleton\n",
        "bin/bash": "",
        "usr/bin/sudo": "",
    }
    make(tmp_path, files)
    (tmp_path / "etc/shadow").chmod(0o640)
    prepare_for_sandbox(tmp_path)
    assert (tmp_path / "etc/passwd").read_text().splitlines()[1:] == [
        "ubuntu:x:1000:1000::/home/ubuntu:/bin/bash",
        "user:x:1001:1002::/home/user:/bin/bash",
    ]
    assert (tmp_path / "etc/group").read_text().endswith("user:x:1002:\n")
    assert (tmp_path / "etc/shadow").read_text().endswith("\nuser:!::0:99999:7:::\n")
    assert stat.S_IMODE((tmp_path / "etc/shadow").stat().st_mode) == 0o640
    skeleton = tmp_path / "home/user/.bashrc"
    assert skeleton.read_text() == "# skeleton\n" and skeleton.stat().st_uid == 1001
    sudoers = tmp_path / "etc/sudoers.d/user"
    assert "NOPASSWD" in sudoers.read_text() and stat.S_IMODE(sudoers.stat().st_mode) == 0o440


@pytest.mark.parametrize(
    "name", ["etc", "etc/passwd", "etc/hosts", "etc/resolv.conf", "home", "home/user", "etc/group"]
)
def test_links_of_the_image_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    outside = make(tmp_path / "outside", {"passwd": "", "hosts": "", "group": "", "file": ""})
    tree = tmp_path / "tree"
    link = tree / name
    link.parent.mkdir(parents=True)
    for target in (outside, outside / "file", outside / "new", "/", "../../../../../../tmp"):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        before = describe(outside)
        try:
            prepare_for_sandbox(tree)
        finally:
            assert describe(outside) == before
            assert not (outside / "new").exists()


def test_odd_things_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/passwd")
    os.mkfifo(tmp_path / "etc/hosts")
    (tmp_path / "home").write_text("a file")
    prepare_for_sandbox(tmp_path)
    assert "user:x:1000" in (tmp_path / "etc/passwd").read_text()
    assert (tmp_path / "home/user").is_dir()


def test_users_that_the_configuration_gives_by_number_get_a_name(tmp_path: Path) -> None:
    make(tmp_path, {"etc/passwd": "root:x:0:0::/root:/bin/sh\nweb:x:33:33::/srv:/bin/false\n"})
    assert prepare_for_sandbox(tmp_path, "33:33") == "web"
    assert prepare_for_sandbox(tmp_path, "0") == "root"
    assert prepare_for_sandbox(tmp_path, "app:staff") == "app"
    assert prepare_for_sandbox(tmp_path) == ""
    assert prepare_for_sandbox(tmp_path, "65532:7") == "uid65532"
    assert prepare_for_sandbox(tmp_path, "65532:7") == "uid65532"
    assert (tmp_path / "etc/passwd").read_text().splitlines()[3:] == ["uid65532:x:65532:7::/:/bin/sh"]


@pytest.mark.parametrize(
    ("passwd", "user"),
    [
        ("a:x:" + "9" * 5000 + ":0::/:/bin/sh\n", ""),
        ("user:x:99999999999:0::/home/x:/bin/sh\n", ""),
        ("user:x:1:1::/nul\0inside:/bin/sh\n", ""),
        ("".join(f"a:x:{number}:0::/:\n" for number in range(1000, 60000)), ""),
        ("", "9" * 1000 + ":" + "9" * 5000),
        ("", "u" * 2_000_000),
    ],
)
def test_users_that_no_system_has_are_a_clear_error(tmp_path: Path, passwd: str, user: str) -> None:
    make(tmp_path, {"etc/passwd": passwd})
    with pytest.raises(ArchiveError, match="user"):
        prepare_for_sandbox(tmp_path, user)


def test_an_image_without_bash_gets_a_stand_in(tmp_path: Path) -> None:
    prepare_for_sandbox(make(tmp_path / "none", {"etc/x": ""}))
    assert not (tmp_path / "none/bin").exists()
    merged = make(tmp_path / "merged", {"usr/bin/sh": "#!shell"})
    (merged / "bin").symlink_to("usr/bin")
    prepare_for_sandbox(merged)
    written = merged / "usr/bin/bash"
    assert "exec /bin/sh" in written.read_text() and stat.S_IMODE(written.stat().st_mode) == 0o755
    local = make(tmp_path / "local", {"bin/sh": "#!shell", "usr/local/bin/bash": "#!bash"})
    prepare_for_sandbox(local)
    assert (local / "bin/bash").readlink() == Path("/usr/local/bin/bash")
    own = make(tmp_path / "own", {"bin/sh": "#!shell", "bin/bash": "#!bash"})
    prepare_for_sandbox(own)
    assert (own / "bin/bash").read_text() == "#!bash"


def test_login_shells_keep_the_configurations_path(tmp_path: Path) -> None:
    make(tmp_path, {"etc/profile": "PATH=/bin\n[ -d /etc/profile.d ] && . /etc/profile.d/zz-template-path.sh\n"})
    prepare_for_sandbox(tmp_path, path="/a b:/bin'; id")
    text = (tmp_path / "etc/profile.d/zz-template-path.sh").read_text()
    said = subprocess.run(["sh", "-c", text + 'printf %s "$PATH"'], capture_output=True, text=True, check=True)
    assert said.stdout == "/a b:/bin'; id"
    bare = make(tmp_path / "bare", {"etc/x": ""})
    prepare_for_sandbox(bare, path="/a")
    assert not (bare / "etc/profile.d").exists()
