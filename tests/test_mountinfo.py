"""``/proc/PID/mountinfo``, as the kernel writes it."""

import os
from pathlib import Path

from aenv.mountinfo import Mount, kind_of, parse, read

LINE = "29 23 0:26 / /a\\040b\\134c\\011d rw,nosuid - tmpfs jail rw,size=4096k"


def test_names_are_decoded() -> None:
    (mount,) = parse(LINE)
    assert mount == Mount("0:26", "/a b\\c\td", ("rw", "nosuid"), "tmpfs", "jail", ("rw", "size=4096k"))


def test_names_keep_letters_of_all_languages() -> None:
    (mount,) = parse("29 23 8:1 / /srv/Übung/资料 ro shared:5 master:2 - ext4 /dev/sda1 rw")
    assert (mount.point, mount.options, mount.kind, mount.source) == (
        "/srv/Übung/资料", ("ro",), "ext4", "/dev/sda1"
    )  # fmt: skip


def test_names_that_are_no_text_are_those_of_the_file_system(tmp_path: Path) -> None:
    file = tmp_path / "mountinfo"
    file.write_bytes(b"29 23 8:1 / /a\xffb rw - ext4 /dev/sda1 rw\n")
    (mount,) = parse(read(file))
    assert os.fsencode(mount.point) == b"/a\xffb"


def test_other_lines_are_passed_over() -> None:
    assert list(parse("\nnonsense\n")) == []
    assert [mount.source for mount in parse(f"\n{LINE}\n{LINE}\n")] == ["jail", "jail"]


def test_this_machine_has_file_systems() -> None:
    assert "/" in {mount.point for mount in parse(read())}
    assert kind_of(Path("/proc/self/status")) == "proc"
