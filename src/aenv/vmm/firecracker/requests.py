"""Requests of Firecracker's API: what a VM is made of and why. Pure; nothing here looks at the host.

From Firecracker's ``firecracker.yaml`` (Swagger) of 1.15 and 1.16, which agree on all that is used here.

Every file is named relative to the process's working directory: a snapshot remembers the name of its disk, and in
each VM's own directory that name is another disk.
"""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aenv.vmm.firecracker.options import FirecrackerOptions, RateLimit
from aenv.vmm.protocol import MachineShape, NetworkAttachment

DISK = "dev/disk"  # it may be a block device, which a jail has below /dev only
KERNEL, INITRAMFS, MEMORY, STATE = "kernel", "initramfs", "memory", "state"
SAVE = "save"  # a named pipe for device state
CONSOLE = "console"  # what the guest's serial port prints
NOWHERE = "nowhere/memory"  # in a folder that does not exist
ROOT_DRIVE, NETWORK_CARD = "root", "eth0"
DEVICE_MODEL = "virtio-mmio: block, net, rng, balloon"
RUNNING = "Running"  # the state that ``describe`` answers
REFILL = 1000  # milliseconds in which a bucket of tokens fills up
LONGEST_COMMAND_LINE = 2047  # bytes; CMDLINE_MAX_SIZE of both architectures, with the zero at the end
MAX_VCPUS = 32

# reboot=k: Firecracker has a keyboard controller for nothing else than this, and ends when it is told to reset; where
# there is none (arm64) the kernel uses PSCI. i8042.*: it must not be searched for more than that, half a second each.
COMMON = "panic=-1 quiet loglevel=4 cryptomgr.notests random.trust_cpu=on swiotlb=noforce"
X86 = f"console=ttyS0 reboot=k i8042.noaux i8042.nomux i8042.dumbkbd i8042.nopnp {COMMON}"
# The 8250's early console must stay: the driver of the "ns16550a" that the device tree names comes late.
ARM = f"console=ttyS0 keep_bootcon reboot=k {COMMON}"
# Freed pages go to the host as they are freed (``page_reporting``). A guest that clears them itself would not report
# any, as its driver cannot rely on getting them back as zeros (``virtballoon_validate``).
INSTEAD_OF_REPORTING = "init_on_free"


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    body: Mapping[str, Any] | None = None


def kernel_parameters(
    parameters: Mapping[str, str], options: FirecrackerOptions, machine: str = platform.machine()
) -> str:
    """The kernel command line. Raises ValueError for what would not arrive as one parameter, or not at all.

    Firecracker adds ``pci=off`` and, on arm64, ``earlycon``.
    """
    words = [X86 if machine == "x86_64" else ARM]
    for key, value in parameters.items():
        if options.page_reporting and key == INSTEAD_OF_REPORTING:
            continue
        word = f"{key}={value}" if value else key
        if not key or any(c.isspace() or c == '"' or not 32 <= ord(c) < 127 for c in word):
            raise ValueError(f"Kernel parameter {word!r} has characters that Firecracker's guests cannot be given.")
        words.append(word)
    line = " ".join(words)
    if len(line) > LONGEST_COMMAND_LINE - 100:  # what Firecracker adds
        raise ValueError(f"The kernel command line has {len(line)} bytes: leave out some of its parameters.")
    return line


def machine_config(shape: MachineShape) -> Request:
    """No dirty page tracking: what differs is found in the page tables (``docs/internals/firecracker.md``)."""
    body = {"vcpu_count": shape.vcpus, "mem_size_mib": shape.memory_mib, "smt": False, "track_dirty_pages": False}
    return Request("PUT", "/machine-config", body)


def boot_source(line: str) -> Request:
    return Request("PUT", "/boot-source", {"kernel_image_path": KERNEL, "initrd_path": INITRAMFS, "boot_args": line})


def serial() -> Request:
    """Also before a snapshot is loaded, and forgotten by none."""
    return Request("PUT", "/serial", {"serial_out_path": CONSOLE})


def drive(options: FirecrackerOptions) -> Request:
    """Not the "root device", which would put a ``root=`` on the command line: the initramfs mounts it.

    ``Unsafe``: a guest's fsync reaches the host's page cache, not its disk, as with QEMU
    (``qemu_command.disk_node``).
    """
    body = {
        "drive_id": ROOT_DRIVE,
        "path_on_host": DISK,
        "is_root_device": False,
        "is_read_only": False,
        "cache_type": "Unsafe",
        "io_engine": "Sync",
        "rate_limiter": rate_limiter(options.disk),
    }
    return Request("PUT", f"/drives/{ROOT_DRIVE}", body)


def network_interface(network: NetworkAttachment, options: FirecrackerOptions) -> Request:
    body = {
        "iface_id": NETWORK_CARD,
        "host_dev_name": network.tap,
        "guest_mac": network.mac,
        "rx_rate_limiter": rate_limiter(options.download),
        "tx_rate_limiter": rate_limiter(options.upload),
    }
    return Request("PUT", f"/network-interfaces/{NETWORK_CARD}", body)


def entropy() -> Request:
    return Request("PUT", "/entropy", {})


def balloon(options: FirecrackerOptions) -> Request:
    """An empty balloon: it is there for the reporting of free pages.

    With and without reporting it is the same device, so that all snapshots are of the same machine.
    """
    body = {"amount_mib": 0, "deflate_on_oom": True, "free_page_reporting": options.page_reporting}
    return Request("PUT", "/balloon", body)


def boot(
    line: str, shape: MachineShape, network: NetworkAttachment | None, options: FirecrackerOptions
) -> list[Request]:
    """All that makes a VM and starts it, in order. Without a network it also has no disk: enough for a probe."""
    made = [machine_config(shape), boot_source(line), entropy()]
    if network is not None:
        made += [drive(options), network_interface(network, options), balloon(options)]
    return [*made, Request("PUT", "/actions", {"action_type": "InstanceStart"})]


def load(network: NetworkAttachment) -> Request:
    """The snapshot whose memory and state are there by those names; it does not run yet."""
    body = {
        "snapshot_path": STATE,
        "mem_backend": {"backend_type": "File", "backend_path": MEMORY},
        "track_dirty_pages": False,
        "resume_vm": False,
        "network_overrides": [{"iface_id": NETWORK_CARD, "host_dev_name": network.tap}],
    }
    return Request("PUT", "/snapshot/load", body)


def limits(options: FirecrackerOptions) -> list[Request]:
    """For a VM that was restored: its snapshot brought the limits of where it was made."""
    network = {
        "iface_id": NETWORK_CARD,
        "rx_rate_limiter": rate_limiter(options.download),
        "tx_rate_limiter": rate_limiter(options.upload),
    }
    disk = {"drive_id": ROOT_DRIVE, "rate_limiter": rate_limiter(options.disk)}
    return [
        Request("PATCH", f"/drives/{ROOT_DRIVE}", disk),
        Request("PATCH", f"/network-interfaces/{NETWORK_CARD}", network),
    ]


def reopen_drive() -> Request:
    """Open the disk anew and tell the guest of its size."""
    return Request("PATCH", f"/drives/{ROOT_DRIVE}", {"drive_id": ROOT_DRIVE, "path_on_host": DISK})


def save_state() -> Request:
    """Write device state to the pipe. It is refused then, since a pipe cannot be synced, and no memory is written."""
    return save(SAVE, NOWHERE)


def save(state: str, memory: str, kind: str = "Full") -> Request:
    """Write device state, and memory (``kind`` is Full or Diff), to files of these names."""
    body = {"snapshot_type": kind, "snapshot_path": state, "mem_file_path": memory}
    return Request("PUT", "/snapshot/create", body)


def run(running: bool) -> Request:
    return Request("PATCH", "/vm", {"state": "Resumed" if running else "Paused"})


def describe() -> Request:
    """Answers id, state and version."""
    return Request("GET", "/")


def configuration() -> Request:
    """Answers what the VM consists of."""
    return Request("GET", "/vm/config")


def rate_limiter(limit: RateLimit) -> dict[str, Any]:
    """Always both buckets: one of size 0 is no limit, and takes away one that a snapshot brought."""
    return {"bandwidth": _bucket(limit.bandwidth), "ops": _bucket(limit.operations)}


def _bucket(per_second: int) -> dict[str, int]:
    return {"size": per_second * REFILL // 1000, "refill_time": REFILL if per_second else 0}
