"""Control groups: what is written where, for both versions; and real ones, as far as this host has them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.vmm.cgroup import Cgroups, Hierarchy, find_hierarchies, whole_disk
from aenv.vmm.cgroup_limits import NO_LIMITS, IoLimits, Limits, settings

LIMITS = Limits(cpus=1.5, weight=2, memory=1 << 30, pids=100, io=IoLimits(read_bps=1000, write_iops=50))
NODE = f"cgrouptest{os.getpid()}"
GROUP = f"aenv-{NODE}"


def line(point: str, kind: str, options: str) -> str:
    return f"31 23 0:27 / {point} rw,nosuid shared:9 - {kind} {kind} {options}"


def fake_v2(root: Path, controllers: str = "cpuset cpu io memory hugetlb pids") -> Path:
    root.mkdir(parents=True, exist_ok=True)
    (root / "cgroup.controllers").write_text(controllers + "\n")
    (root / "cgroup.subtree_control").write_text("\n")
    return root


def test_version_1_version_2_and_both_together(tmp_path: Path) -> None:
    unified = fake_v2(tmp_path / "unified", "cpu pids memory")
    v2 = line(str(unified), "cgroup2", "rw,nsdelegate")
    assert find_hierarchies(v2) == {name: Hierarchy(2, unified) for name in ("cpu", "memory", "pids")}
    v1 = "\n".join(
        line(f"/sys/fs/cgroup/{name}", "cgroup", f"rw,{name}")
        for name in ("cpu,cpuacct", "memory", "pids", "blkio", "cpuset")
    )
    assert find_hierarchies(v1) == {
        "cpu": Hierarchy(1, Path("/sys/fs/cgroup/cpu,cpuacct")),
        "memory": Hierarchy(1, Path("/sys/fs/cgroup/memory")),
        "pids": Hierarchy(1, Path("/sys/fs/cgroup/pids")),
        "io": Hierarchy(1, Path("/sys/fs/cgroup/blkio")),
    }
    both = "\n".join((line("/old/memory", "cgroup", "rw,memory"), v2, line("/a\\040b", "cgroup", "rw,blkio"), "junk"))
    assert find_hierarchies(both) == {
        "memory": Hierarchy(1, Path("/old/memory")),
        "io": Hierarchy(1, Path("/a b")),
        "cpu": Hierarchy(2, unified),
        "pids": Hierarchy(2, unified),
    }
    assert find_hierarchies(line("/nowhere", "cgroup2", "rw")) == {}
    assert find_hierarchies("") == {}


def test_what_is_written() -> None:
    assert settings(LIMITS, "cpu", 2, None) == {"cpu.weight": "200", "cpu.max": "150000 100000"}
    assert settings(LIMITS, "cpu", 1, None) == {"cpu.shares": "2048", "cpu.cfs_quota_us": "150000"}
    assert settings(LIMITS, "memory", 2, None) == {"memory.max": str(1 << 30), "memory.oom.group": "1"}
    assert settings(LIMITS, "memory", 1, None) == {"memory.limit_in_bytes": str(1 << 30)}
    assert settings(LIMITS, "pids", 1, None) == settings(LIMITS, "pids", 2, None) == {"pids.max": "100"}
    assert settings(LIMITS, "io", 2, "8:0") == {"io.max": "8:0 rbps=1000 wiops=50"}
    assert settings(LIMITS, "io", 1, "8:0") == {
        "blkio.throttle.read_bps_device": "8:0 1000",
        "blkio.throttle.write_iops_device": "8:0 50",
    }
    assert settings(LIMITS, "io", 2, None) == {}
    assert LIMITS.needs() == ["cpu", "memory", "pids", "io"]
    none = Limits()
    assert none.needs() == [] and settings(none, "memory", 2, None) == settings(none, "pids", 2, None) == {}
    assert settings(none, "cpu", 2, None) == {"cpu.weight": "100"}
    assert settings(Limits(weight=1e9), "cpu", 2, None) == {"cpu.weight": "10000"}
    assert settings(Limits(weight=1e9), "cpu", 1, None) == {"cpu.shares": "262144"}


def test_limits_are_of_disks_and_not_of_partitions(tmp_path: Path) -> None:
    number = tmp_path.stat().st_dev
    disk = tmp_path / "devices" / "sda"
    (disk / "sda1").mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (disk / "sda1" / "dev").write_text("8:1\n")
    (disk / "sda1" / "partition").write_text("1\n")
    blocks = tmp_path / "block"
    blocks.mkdir()
    name = f"{os.major(number)}:{os.minor(number)}"
    assert whole_disk(tmp_path, blocks) is None
    (blocks / name).symlink_to(disk / "sda1")
    assert whole_disk(tmp_path, blocks) == "8:0"
    (blocks / name).unlink()
    (blocks / name).symlink_to(disk)
    assert whole_disk(tmp_path, blocks) == "8:0"


def test_version_2_hands_controllers_down(tmp_path: Path) -> None:
    root = fake_v2(tmp_path / "v2")
    fake_v2(root / "slice")
    controllers = {name: Hierarchy(2, root) for name in ("cpu", "memory", "pids")}
    groups = Cgroups(controllers, "/slice/", NODE, tmp_path, NO_LIMITS)
    assert groups.prepare(Limits(cpus=1, memory=1, pids=1)) == []
    for folder in ("", "slice"):
        assert (root / folder / "cgroup.subtree_control").read_text() == "+cpu +memory +pids", folder
    groups.create("vm", Limits(cpus=2, weight=1, memory=5 << 20, pids=7))
    made = root / "slice" / f"{GROUP}.vm"
    assert groups.folders("vm") == [made]
    assert {file.name: file.read_text() for file in made.iterdir()} == {
        "cpu.weight": "100", "cpu.max": "200000 100000", "memory.max": str(5 << 20), "memory.oom.group": "1",
        "pids.max": "7",
    }  # fmt: skip
    groups.enter("vm", 4711)
    assert (made / "cgroup.procs").read_text() == "4711"


def test_what_is_missing_is_said_and_left_out(tmp_path: Path) -> None:
    # A controller that is not there, one whose hierarchy cannot be written, a file that this kernel does not have.
    broken = tmp_path / "broken"
    broken.write_text("a file where a folder should be")
    v1 = tmp_path / "cpu"
    (v1 / f"{GROUP}.rehearsal" / "cpu.cfs_quota_us").mkdir(parents=True)
    groups = Cgroups({"memory": Hierarchy(1, broken), "cpu": Hierarchy(1, v1)}, "", NODE, tmp_path, NO_LIMITS)
    gaps = groups.prepare(Limits(cpus=1, memory=1, pids=1, io=IoLimits(read_bps=1)))
    assert [gap.partition(":")[0] for gap in gaps] == [
        "no io limits", "no pids limit", "no io limit", "no memory limit", "no limit cpu.cfs_quota_us",
    ]  # fmt: skip
    groups.create("vm", Limits(cpus=1, memory=1, pids=1))
    assert {file.name for file in (v1 / f"{GROUP}.vm").iterdir()} == {"cpu.shares"}
    assert groups.folders("vm") == [v1 / f"{GROUP}.vm"]


@pytest.fixture
def real(root_only: None, tmp_path: Path) -> Iterator[Cgroups]:
    groups = Cgroups.find("", NODE, tmp_path, NO_LIMITS)
    if gaps := groups.prepare(Limits(cpus=1, memory=1 << 30, pids=10)):
        pytest.skip("; ".join(gaps))
    yield groups
    assert groups.names() == []


def test_a_group_as_the_kernel_makes_it(real: Cgroups) -> None:
    assert real.names() == [], "the rehearsal is gone"
    real.create("vm", Limits(cpus=1, memory=64 << 20, pids=1))
    try:
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        real.enter("vm", child.pid)
        where = Path(f"/proc/{child.pid}/cgroup").read_text()
        assert where.count(f"/{GROUP}.vm\n") == len(real.folders("vm"))
        for folder in real.folders("vm"):
            assert (folder / "cgroup.procs").read_text() == f"{child.pid}\n"
        assert real.names() == ["vm"]
        real.remove("vm", timeout=0)
        assert real.names() == ["vm"], "it is in use"
        child.communicate()
        real.enter("vm", child.pid)  # it has ended: nothing happens
    finally:
        real.remove("vm")
    real.remove("vm")
    assert real.names() == []


def test_a_read_only_tree(root_only: None, tmp_path: Path) -> None:
    root = tmp_path / "ro"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", root], check=True)
    try:
        groups = Cgroups({"memory": Hierarchy(1, root)}, "", NODE, tmp_path, NO_LIMITS)
        (gap,) = groups.prepare(Limits(memory=1 << 30))
        assert gap == f"no memory limit: the control groups are mounted read-only ({root / GROUP}.rehearsal)"
        groups.create("vm", Limits(memory=1 << 30))
    finally:
        subprocess.run(["umount", root], check=True)


def test_a_group_that_cannot_be_made_is_an_error(real: Cgroups) -> None:
    with pytest.raises(VmmError, match="control group"):
        real.create("no/such/parent", Limits())
