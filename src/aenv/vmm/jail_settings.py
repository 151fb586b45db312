"""What an operator says about confinement, and what of it this host and this server's rights allow."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from aenv.vmm import jail_calls as calls
from aenv.vmm import jail_filter, jail_root, process
from aenv.vmm.cgroup_limits import NO_LIMITS, IoLimits

ADVICE = "Run the server as root with all capabilities, or set jail = auto to go on with less."
# capability.h: what each part needs
ISOLATING = {"CAP_MKNOD": 27, "CAP_SYS_ADMIN": 21, "CAP_SYS_CHROOT": 18}
BECOMING = {
    "CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_KILL": 5, "CAP_SETGID": 6, "CAP_SETUID": 7,
    "CAP_SYS_PTRACE": 19,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class JailSettings:
    """How VM processes of a node are confined.

    ``mode``: ``on`` refuses to start when something of it does not work here, ``auto`` says so and goes on with the
    rest. ``node`` tells nodes of one host apart. Users are numbered from ``first_user`` on; why from there is in
    ``docs/internals/confinement.md``. ``cgroup``: the group below which those of VMs are made, from each root.
    """

    mode: Literal["auto", "on", "off"] = "auto"
    node: str = "aenv"
    first_user: int = 1_880_000_000
    users: int = 65_536
    cgroup: str = ""
    io: IoLimits = NO_LIMITS


def rehearse(home: Path) -> str | None:
    """Why processes cannot have namespaces and a root of their own here, as a sentence; None when they can.

    Everything is really done, to a thread that ends with it. ``home`` is any folder.
    """
    if platform.machine() not in calls.ARCHITECTURES:
        return f"no isolation: this program does not know the system calls of {platform.machine()}"
    if missing := _missing(ISOLATING):
        return f"no isolation: the server lacks {missing}"

    def try_it() -> None:
        file = os.open("/proc/self/exe", os.O_PATH | os.O_CLOEXEC)
        try:
            tree = calls.clone_mount(file, writable=False)
        finally:
            os.close(file)
        try:
            calls.leave_namespaces()
            jail_root.empty_root(str(home))
            Path("/file").touch()
            calls.attach(tree, "/file")
            calls.become(None)
            calls.restrict(jail_filter.program())
        finally:
            os.close(tree)

    try:
        process.apart(try_it)
    except OSError as error:
        return f"no isolation: {error}"
    return None


def rehearse_user(user: int) -> str | None:
    """Why a process cannot run as ``user``; None when it can."""
    if missing := _missing(BECOMING):
        return f"no users of their own: the server lacks {missing}"
    try:
        process.apart(lambda: calls.become(user))
    except OSError as error:
        return f"no users of their own: {error} (a container's user namespace may end before it: jail_first_user)"
    return None


def _missing(wanted: dict[str, int]) -> str:
    status = Path("/proc/thread-self/status").read_text()
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return ", ".join(name for name, number in wanted.items() if not effective >> number & 1)
