"""What a VM's process may use, and how the two versions of control groups are told so. Pure.

Formats: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the kernel.
"""

from dataclasses import dataclass

PERIOD = 100_000  # microseconds, over which processor time is counted; the kernel's default
CONTROLLERS = ("cpu", "memory", "pids", "io")
V1_NAMES = {"cpu": "cpu", "memory": "memory", "pids": "pids", "io": "blkio"}
# Of one virtual CPU, and the most that can be, in the scales of version 2 and version 1.
WEIGHT, MOST_WEIGHT = 100, 10_000
SHARES, MOST_SHARES = 1024, 262_144


@dataclass(frozen=True, slots=True)
class IoLimits:
    """Bytes and operations per second on the disk that holds the node's files; None: as many as there are."""

    read_bps: int | None = None
    write_bps: int | None = None
    read_iops: int | None = None
    write_iops: int | None = None

    @property
    def any(self) -> bool:
        return any(limit is not None for limit in (self.read_bps, self.write_bps, self.read_iops, self.write_iops))


NO_LIMITS = IoLimits()


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one VM. ``cpus``: processors' worth of time; ``memory``: bytes, page cache included; ``pids``: threads.

    ``weight``: its part when processors are short, 1 for each virtual CPU. None: no limit.
    """

    cpus: float | None = None
    weight: float = 1
    memory: int | None = None
    pids: int | None = None
    io: IoLimits = NO_LIMITS

    def needs(self) -> list[str]:
        """Controllers without which these limits do not hold."""
        wanted = {
            "cpu": self.cpus is not None,
            "memory": self.memory is not None,
            "pids": self.pids is not None,
            "io": self.io.any,
        }
        return [name for name in CONTROLLERS if wanted[name]]


def settings(limits: Limits, controller: str, version: int, device: str | None) -> dict[str, str]:
    """Contents of the files of one controller. ``device``: ``major:minor`` of the disk that io limits are for."""
    if controller == "cpu":
        return _cpu(limits, version)
    if controller == "memory" and limits.memory is not None:
        if version == 1:
            return {"memory.limit_in_bytes": str(limits.memory)}
        # The VM is one process: nothing of it is worth keeping without the rest.
        return {"memory.max": str(limits.memory), "memory.oom.group": "1"}
    if controller == "pids" and limits.pids is not None:
        return {"pids.max": str(limits.pids)}
    if controller == "io" and limits.io.any and device is not None:
        return _io(limits.io, version, device)
    return {}


def _cpu(limits: Limits, version: int) -> dict[str, str]:
    quota = None if limits.cpus is None else max(1000, int(limits.cpus * PERIOD))
    if version == 1:
        shares = {"cpu.shares": str(min(MOST_SHARES, max(2, int(limits.weight * SHARES))))}
        return shares if quota is None else {**shares, "cpu.cfs_quota_us": str(quota)}
    weight = {"cpu.weight": str(min(MOST_WEIGHT, max(1, int(limits.weight * WEIGHT))))}
    return weight if quota is None else {**weight, "cpu.max": f"{quota} {PERIOD}"}


def _io(io: IoLimits, version: int, device: str) -> dict[str, str]:
    named = {
        "rbps": ("read_bps", io.read_bps),
        "wbps": ("write_bps", io.write_bps),
        "riops": ("read_iops", io.read_iops),
        "wiops": ("write_iops", io.write_iops),
    }
    given = {short: (name, limit) for short, (name, limit) in named.items() if limit is not None}
    if version == 1:
        return {f"blkio.throttle.{name}_device": f"{device} {limit}" for name, limit in given.values()}
    return {"io.max": " ".join([device, *(f"{short}={limit}" for short, (_, limit) in given.items())])}
