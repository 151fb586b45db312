"""The machine a node runs on, from /proc: what it is and how busy it is."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HostMetrics:
    """Sizes are bytes. ``cpu_percent`` is of all CPUs since the last reading (0 at the first)."""

    cpu_percent: int
    cpu_count: int
    memory_used: int
    memory_total: int
    disk_mount: str
    disk_device: str
    disk_type: str
    disk_used: int
    disk_total: int


@dataclass(frozen=True, slots=True)
class CpuModel:
    family: str
    model: str
    name: str
    architecture: str


def parse_meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo: field to bytes (proc_meminfo(5): values are KiB but for counts)."""
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            found[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return found


def parse_cpuinfo(text: str) -> CpuModel:
    """The first processor of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    return CpuModel(
        fields.get("cpu family", ""), fields.get("model", ""), fields.get("model name", ""), os.uname().machine
    )


def parse_mounts(text: str, path: str) -> tuple[str, str, str]:
    """Mount point, device and type of the file system that ``path`` is on (/proc/mounts)."""
    best = ("/", "", "")
    for line in text.splitlines():
        device, mount, kind = line.split()[:3]
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, device, kind)
    return best


class Host:
    """Reads the host. ``home`` is on the file system that counts."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._ticks = (0, 0)

    def cpu(self) -> CpuModel:
        return parse_cpuinfo(Path("/proc/cpuinfo").read_text())

    def metrics(self) -> HostMetrics:
        memory = parse_meminfo(Path("/proc/meminfo").read_text())
        total = memory.get("MemTotal", 0)
        disk = os.statvfs(self._home)
        mount, device, kind = parse_mounts(Path("/proc/mounts").read_text(), str(self._home.resolve()))
        return HostMetrics(
            cpu_percent=self._cpu_percent(Path("/proc/stat").read_text()),
            cpu_count=os.cpu_count() or 1,
            memory_used=max(0, total - memory.get("MemAvailable", 0)),
            memory_total=total,
            disk_mount=mount,
            disk_device=device,
            disk_type=kind,
            disk_used=(disk.f_blocks - disk.f_bfree) * disk.f_frsize,
            disk_total=disk.f_blocks * disk.f_frsize,
        )

    def _cpu_percent(self, stat: str) -> int:
        # user nice system idle iowait irq softirq steal (proc_stat(5)); guest time is part of user time
        ticks = [int(word) for word in stat.splitlines()[0].split()[1:9]]
        total, idle = sum(ticks), ticks[3] + ticks[4]
        before_total, before_idle = self._ticks
        self._ticks = (total, idle)
        span = total - before_total
        if before_total == 0 or span <= 0:
            return 0
        return round(100 * (span - (idle - before_idle)) / span)
