"""Control groups of VM processes, one for each VM. Version 2, version 1, and both side by side on one host.

``<hierarchy>/<parent>/aenv-<node>.<vm>``. Which hierarchy has which controller is read from the mounts, so a host
where some controllers are version 1's and others version 2's is nothing special. What is missing is reported once, as
a sentence for the operator, and left out from then on. All functions block for some tenths of a millisecond.

The groups of a node are side by side and not below one of its own: each VM then weighs as much as a task of the host,
as without groups, while the weight of one group for all would be too much for one busy VM and too little for many.
"""

import contextlib
import errno
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aenv import mountinfo
from aenv.errors import VmmError
from aenv.vmm.cgroup_limits import CONTROLLERS, V1_NAMES, IoLimits, Limits, settings

REHEARSAL = "rehearsal"
HOST = "aenv-host"  # where processes go that stand in the way of version 2's controllers
REMOVE_TIMEOUT = 2.0  # seconds until the last process of a group is off it; it has ended already
BLOCK_DEVICES = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted tree of control groups."""

    version: int
    root: Path


def find_hierarchies(mounts: str) -> dict[str, Hierarchy]:
    """Which hierarchy has each of ``CONTROLLERS``, from the text of proc_pid_mountinfo(5).

    One that version 1 has mounted is not in version 2, whatever that says. Reads ``cgroup.controllers`` of version 2.
    """
    found: dict[str, Hierarchy] = {}
    unified: Path | None = None
    for mount in mountinfo.parse(mounts):
        point = Path(mount.point)
        if mount.kind == "cgroup2":
            unified = unified or point
        elif mount.kind == "cgroup":
            for name in CONTROLLERS:
                if V1_NAMES[name] in mount.super_options:
                    found.setdefault(name, Hierarchy(1, point))
    if unified is not None:
        with contextlib.suppress(OSError):
            for name in (unified / "cgroup.controllers").read_text().split():
                if name in CONTROLLERS:
                    found.setdefault(name, Hierarchy(2, unified))
    return found


def whole_disk(path: Path, devices: Path = BLOCK_DEVICES) -> str | None:
    """``major:minor`` of the disk that holds ``path`` (limits are of disks, not of partitions); None if none does."""
    number = path.stat().st_dev
    device = devices / f"{os.major(number)}:{os.minor(number)}"
    if not device.exists():
        return None
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    return (device / "dev").read_text().strip()


class Cgroups:
    """Groups of one node's VMs. ``find`` makes it; ``prepare`` it before the first ``create``."""

    def __init__(self, controllers: dict[str, Hierarchy], parent: str, node: str, files: Path, io: IoLimits) -> None:
        """``parent``: path of a group, from each root. ``files``: a folder on the disk that ``io`` is about."""
        self._controllers = controllers
        self._parent = parent.strip("/")
        self._prefix = f"aenv-{node}."
        self._files = files
        self._device = whole_disk(files) if io.any else None
        self._refused: set[str] = set()  # files that this kernel does not have, or not for us

    @classmethod
    def find(cls, parent: str, node: str, files: Path, io: IoLimits) -> "Cgroups":
        return cls(find_hierarchies(mountinfo.read()), parent, node, files, io)

    def prepare(self, example: Limits) -> list[str]:
        """Make room for groups, and try ``example`` on one; what of it does not hold here, as sentences."""
        gaps = []
        if example.io.any and self._device is None:
            gaps.append(f"no io limits: the file system of {self._files} is not on one disk")
        gaps += [
            f"no {name} limit: this kernel has no control group for it, or none is mounted"
            for name in example.needs()
            if name not in self._controllers
        ]
        for hierarchy in self._hierarchies():
            names = [name for name in CONTROLLERS if self._controllers.get(name) == hierarchy]
            try:
                self._open(hierarchy, names)
                self._folder(hierarchy, REHEARSAL).mkdir(exist_ok=True)
            except OSError as error:
                for name in names:
                    del self._controllers[name]
                gaps += [f"no {name} limit: {_reason(error)}" for name in names if name in example.needs()]
        for name, hierarchy in self._controllers.items():
            for file, text in settings(example, name, hierarchy.version, self._device).items():
                try:
                    (self._folder(hierarchy, REHEARSAL) / file).write_text(text)
                except OSError as error:
                    self._refused.add(file)
                    gaps.append(f"no limit {file}: {_reason(error)}")
        self.remove(REHEARSAL)
        return gaps

    def _open(self, hierarchy: Hierarchy, names: list[str]) -> None:
        folder = hierarchy.root
        for part in ("", *Path(self._parent).parts):
            folder /= part
            folder.mkdir(exist_ok=True)
            if hierarchy.version == 2:
                _enable(folder, names)

    def create(self, name: str, limits: Limits) -> None:
        """Make the group of a VM. Raises VmmError."""
        try:
            for hierarchy in self._hierarchies():
                self._folder(hierarchy, name).mkdir(exist_ok=True)
            for controller, hierarchy in self._controllers.items():
                folder = self._folder(hierarchy, name)
                for file, text in settings(limits, controller, hierarchy.version, self._device).items():
                    if file not in self._refused:
                        (folder / file).write_text(text)
        except OSError as error:
            self.remove(name)
            raise VmmError(f"The control group of VM {name} cannot be made: {_reason(error)}.") from error

    def enter(self, name: str, pid: int) -> None:
        """Put a process with all its threads into the group of a VM. Raises VmmError."""
        for hierarchy in self._hierarchies():
            try:
                (self._folder(hierarchy, name) / "cgroup.procs").write_text(str(pid))
            except ProcessLookupError:
                return  # it has ended, and whoever waits for it will say why
            except OSError as error:
                raise VmmError(f"VM {name} cannot be put into its control group: {_reason(error)}.") from error

    def remove(self, name: str, timeout: float = REMOVE_TIMEOUT) -> None:
        """Remove the group of a VM whose process has ended; nothing happens when there is none."""
        deadline = time.monotonic() + timeout
        for hierarchy in self._hierarchies():
            folder = self._folder(hierarchy, name)
            while True:
                try:
                    folder.rmdir()
                except OSError as error:
                    # A process counts until it has let go of its memory, which is after its end is reported.
                    if error.errno == errno.EBUSY and time.monotonic() < deadline:
                        time.sleep(0.002)
                        continue
                break

    def names(self) -> list[str]:
        """VMs that have a group."""
        found: set[str] = set()
        for hierarchy in self._hierarchies():
            with contextlib.suppress(OSError):
                folders = (hierarchy.root / self._parent).glob(f"{self._prefix}*")
                found.update(folder.name.removeprefix(self._prefix) for folder in folders)
        return sorted(found)

    def folders(self, name: str) -> list[Path]:
        """Where the group of a VM is, in each hierarchy."""
        return [self._folder(hierarchy, name) for hierarchy in self._hierarchies()]

    def _hierarchies(self) -> list[Hierarchy]:
        return list(dict.fromkeys(self._controllers.values()))

    def _folder(self, hierarchy: Hierarchy, name: str) -> Path:
        return hierarchy.root / self._parent / f"{self._prefix}{name}"


def _enable(folder: Path, names: Iterable[str]) -> None:
    """Let the children of a version 2 group have these controllers."""
    control = folder / "cgroup.subtree_control"
    missing = set(names) - set(control.read_text().split())
    if not missing:
        return
    text = " ".join(f"+{name}" for name in sorted(missing))
    try:
        control.write_text(text)
    except OSError as error:
        # Only a host's very root may have both processes and controllers for its children. In a container what looks
        # like the root is not, and the server and what else runs there moves aside, as engines in containers do it.
        if error.errno != errno.EBUSY:
            raise
        _clear(folder)
        control.write_text(text)


def _clear(folder: Path) -> None:
    aside = folder / HOST
    aside.mkdir(exist_ok=True)
    for _ in range(10):  # while it is done, what is still there starts others
        pids = (folder / "cgroup.procs").read_text().split()
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (aside / "cgroup.procs").write_text(pid)


def _reason(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno == errno.EROFS:
        return f"the control groups are mounted read-only{where}"
    return f"{error.strerror or error}{where}"
