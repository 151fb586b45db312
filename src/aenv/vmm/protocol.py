"""The hypervisor boundary: what the orchestrator asks of a virtual machine monitor. No I/O here."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Accelerator(StrEnum):
    KVM = "kvm"
    PVM = "pvm"  # KVM of a host without virtualization hardware; needs a guest kernel made for it
    TCG = "tcg"


@dataclass(frozen=True, slots=True)
class MachineShape:
    """Virtual hardware that a process is spawned with and a snapshot is tied to."""

    vcpus: int
    memory_mib: int


@dataclass(frozen=True, slots=True)
class NetworkAttachment:
    """Where the VM's network card is plugged: a tap inside a network namespace."""

    netns: str  # name under /run/netns
    tap: str
    mac: str


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a snapshot's device state depends on; all of it must match where it is restored."""

    vmm: str  # "qemu" or "firecracker"
    vmm_version: str
    accelerator: Accelerator
    cpu_model: str
    machine: str  # machine type and the options that change the device model
    kernel_sha256: str

    def mismatches(self, other: "Fingerprint") -> list[str]:
        """Human-readable differences; empty when a snapshot of one restores on the other."""
        return [
            f"{name.replace('_', ' ')} is {getattr(other, name)!s} here and was {getattr(self, name)!s}"
            for name in self.__slots__
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True, slots=True)
class MemoryImage:
    """Guest RAM of a snapshot: an immutable full-size file and, over it, an optional sparse delta.

    The base is mapped privately by every VM that restores it, so all share its pages in the page cache. The
    delta (an LSMT layer, ``aenv.storage.lsmt``) is written into each VM's private memory before it runs.
    """

    base: Path
    delta: Path | None


@dataclass(frozen=True, slots=True)
class CaptureStats:
    """What one capture wrote. ``stall`` is how long the guest did not run, in seconds.

    ``hot`` is which parts of its memory it used since it was started (``aenv.vmm.hot``).
    """

    memory_bytes: int
    zero_bytes: int
    state_bytes: int
    stall: float
    hot: str | None = None


class Vm(Protocol):
    """One VM process. Its process outlives the node's server; ``adopt`` finds it again by ``directory``.

    Methods raise ``VmmError`` when the process refuses or is gone.
    """

    @property
    def id(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    @property
    def console(self) -> Path:
        """The guest's serial console log."""

    def errors(self) -> str:
        """The end of what the process itself printed or logged, which is nothing as long as all is well."""

    async def restore(self, memory: MemoryImage, state: Path, disk: Path) -> None:
        """Load a snapshot into a freshly spawned process and let it run; ``disk`` becomes its writable root."""

    async def stop(self) -> None:
        """Stop the virtual CPUs; idempotent."""

    async def cont(self) -> None:
        """Let the virtual CPUs run; idempotent."""

    async def capture(self, state: Path, delta: Path) -> CaptureStats:
        """Write device state and every page that differs from the memory base; the VM must be stopped.

        Raises CapacityError when the disk is full; the VM is unchanged then.
        """

    async def disk(self) -> Path:
        """The file that the root disk writes to now, asked from the process itself."""

    async def rebase_disk(self, overlay: Path) -> None:
        """Freeze the present root disk file and continue on a new, empty overlay created at ``overlay``."""

    async def replace_backing(self, backing: Path) -> None:
        """Read what the root disk does not hold itself from the qcow2 ``backing`` instead of what is below it now.

        The guest may run: both must have the same contents. The disk's header names ``backing`` when this returns;
        if it fails, it may name either.
        """

    async def grow_disk(self, size: int) -> None:
        """Make the root disk ``size`` bytes large, which its guest is told; never smaller."""

    async def reclaim(self) -> bool:
        """Let the host have memory that the guest does not use now; whether it could. The guest runs on."""

    async def wait(self) -> int | None:
        """Wait until the process has ended; its exit status, or None when it was not our child."""

    async def kill(self) -> None:
        """End the process at once and remove its runtime files; idempotent."""


class Vmm(Protocol):
    """A hypervisor as configured and probed on this node."""

    @property
    def fingerprint(self) -> Fingerprint: ...

    async def spawn(self, vm_id: str, shape: MachineShape, network: NetworkAttachment) -> Vm:
        """Start a process that waits for ``Vm.restore``; nothing in it depends on a snapshot yet."""

    async def boot(
        self,
        vm_id: str,
        shape: MachineShape,
        network: NetworkAttachment,
        disk: Path,
        parameters: Mapping[str, str],
    ) -> Vm:
        """Cold-boot the node's kernel and initramfs on ``disk``; ``parameters`` go on the kernel command line."""

    async def adopt(self, vm_id: str) -> Vm | None:
        """The VM of that id if its process still runs, else None (and its leftovers are removed).

        A process that runs and does not answer is ended: one that hangs must not keep the node from starting.
        """

    def known(self) -> list[str]:
        """Ids of all VMs that have runtime files, running or not."""
