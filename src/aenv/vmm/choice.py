"""Which hypervisor this node uses: the settings' wish, checked against what really boots."""

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from aenv.config import LimitSettings, Settings
from aenv.errors import VmmError
from aenv.vmm import qemu_command
from aenv.vmm.cgroup_limits import IoLimits
from aenv.vmm.disk.choice import ExportKind, choose_exporter
from aenv.vmm.firecracker.binary import FirecrackerBinary, find_firecracker
from aenv.vmm.firecracker.options import FirecrackerOptions, RateLimit
from aenv.vmm.firecracker.probe import remembered_probe as remembered_firecracker_probe
from aenv.vmm.firecracker.release import PINNED
from aenv.vmm.firecracker.vmm import FirecrackerVmm
from aenv.vmm.firecracker.vmm import fingerprint as firecracker_fingerprint
from aenv.vmm.jail import Jailer
from aenv.vmm.jail_settings import JailSettings
from aenv.vmm.probe import QemuBinary, cpu_option, find_qemu, host_cpu, remembered_probe, tsc_khz
from aenv.vmm.protocol import Accelerator, Fingerprint, Vmm
from aenv.vmm.qemu_vmm import QemuVmm
from aenv.vmm.verdict import CANDIDATES, Candidate, Verdict, allowed, missing

Progress = Callable[[str], None]


class Hypervisors:
    """The candidates of one machine: tried, and made into the one that the node uses.

    Trying one boots the guest kernel, which takes seconds the first time after the host has booted; verdicts are
    remembered then (``aenv.vmm.verdict``).
    """

    def __init__(self, settings: Settings, kernel: Path, initramfs: Path, progress: Progress) -> None:
        self._settings = settings
        self._kernel = kernel
        self._initramfs = initramfs
        self._progress = progress
        self.used: Candidate | None = None  # what ``choose`` gave
        self._jailer: Jailer | None = None
        self._digests: dict[Path, str] = {}  # of kernels: each is read once
        self._trying = asyncio.Lock()  # one boot at a time: two would slow each other into their time limits

    async def verdicts(self) -> list[Verdict]:
        """On every candidate, also on those that the settings rule out, best first."""
        return [await self.verdict(candidate) for candidate in CANDIDATES]

    async def verdict(self, candidate: Candidate) -> Verdict:
        async with self._trying:
            try:
                return await self._try(candidate)
            except VmmError as error:  # its program is missing, too old or broken
                return missing(candidate, error.message, error.hint)

    async def choose(self) -> Vmm:
        """The best that the settings allow and that works. Raises VmmError, with every verdict, when none does."""
        candidates = allowed(self._settings.vmm, self._settings.accelerator)
        if not candidates:
            raise VmmError(
                f"There is no {self._settings.vmm} with {self._settings.accelerator}.",
                f"The combinations are {', '.join(map(str, CANDIDATES))}: correct AENV_VMM or AENV_ACCELERATOR.",
            )
        failed = []
        for candidate in candidates:
            verdict = await self.verdict(candidate)
            if verdict.works:
                try:
                    made = await self._make(candidate)
                    self.used = candidate
                    return made
                except VmmError as error:  # what it needs besides: disks as devices, confinement
                    verdict = missing(candidate, error.message, error.hint)
            failed.append(verdict)
            self._progress(f"{candidate} does not work here: {verdict.reason}")
        reasons = " ".join(f"{verdict.candidate}: {verdict.reason}" for verdict in failed)
        raise VmmError(f"No hypervisor works on this host. {reasons}", failed[-1].advice)

    @property
    def gaps(self) -> list[str]:
        """What of the confinement of the chosen hypervisor's processes does not work here, as sentences."""
        if self._settings.jail == "off":
            return ["confinement is switched off (jail = off)"]
        return self._jailer.gaps if self._jailer is not None else []

    def close(self) -> None:
        if self._jailer is not None:
            self._jailer.close()

    async def _try(self, candidate: Candidate) -> Verdict:
        settings = self._settings

        def announce() -> None:
            self._progress(f"probing {candidate} by booting the guest kernel")

        if candidate.vmm == "qemu":
            qemu = await find_qemu(settings.qemu)
            digest = await self._digest(self._kernel)
            return await remembered_probe(
                settings.home, qemu, candidate.accelerator, self._kernel, self._initramfs, digest, announce
            )
        kernel, firecracker = self._kernel_for(candidate), await self._firecracker()
        digest = await self._digest(kernel)
        return await remembered_firecracker_probe(
            settings.home, firecracker, candidate.accelerator, kernel, self._initramfs, digest, announce
        )

    async def _firecracker(self) -> FirecrackerBinary:
        """What is configured, else what ``aenv-server setup`` loaded. Raises VmmError."""
        name = self._settings.firecracker
        loaded = installed_in(self._settings.home) / f"firecracker-v{PINNED}"
        return await find_firecracker(name if shutil.which(name) or not loaded.exists() else str(loaded))

    async def _digest(self, kernel: Path) -> str:
        if kernel not in self._digests:
            self._digests[kernel] = await asyncio.to_thread(sha256_of, kernel)
        return self._digests[kernel]

    def _kernel_for(self, candidate: Candidate) -> Path:
        if candidate.accelerator is not Accelerator.PVM:
            return self._kernel
        kernel = self._settings.pvm_kernel
        if kernel is None or not kernel.is_file():
            what = "No guest kernel for PVM is configured." if kernel is None else f"{kernel} does not exist."
            raise VmmError(what, "A PVM host needs a guest kernel that was built for it: set AENV_PVM_KERNEL to it.")
        return kernel

    async def _make(self, candidate: Candidate) -> Vmm:
        settings, kernel = self._settings, self._kernel_for(candidate)
        digest = await self._digest(kernel)
        if self._jailer is None:
            self._jailer = await asyncio.to_thread(make_jailer, settings)
        if candidate.vmm == "firecracker":
            binary = await self._firecracker()
            return FirecrackerVmm(
                settings.home,
                settings.runtime,
                binary,
                firecracker_fingerprint(binary, candidate.accelerator, digest),
                kernel,
                self._initramfs,
                await choose_exporter(ExportKind(settings.disk_export), settings.blockd),
                firecracker_options(settings.limits),
                self._jailer,
            )
        qemu = await find_qemu(settings.qemu)
        return await asyncio.to_thread(
            make_qemu,
            settings.home,
            settings.runtime,
            qemu,
            candidate.accelerator,
            kernel,
            self._initramfs,
            digest,
            self._jailer,
        )


def installed_in(home: Path) -> Path:
    """Where hypervisors that a node loaded itself are."""
    return home / "bin"


def make_jailer(settings: Settings) -> Jailer:
    """Blocks for some milliseconds. Raises VmmError when the settings demand more than this host allows."""
    bandwidth, operations = settings.limits.disk_bandwidth << 20 or None, settings.limits.disk_operations or None
    wanted = JailSettings(
        mode=settings.jail,
        node=settings.slot_prefix,
        first_user=settings.jail_first_user,
        users=settings.jail_users,
        cgroup=settings.cgroup,
        io=IoLimits(bandwidth, bandwidth, operations, operations),
    )
    return Jailer(wanted, settings.home, settings.runtime)


def firecracker_options(limits: LimitSettings) -> FirecrackerOptions:
    return FirecrackerOptions(
        disk=RateLimit(limits.disk_bandwidth << 20, limits.disk_operations),
        download=RateLimit(limits.download_bandwidth << 20, limits.download_packets),
        upload=RateLimit(limits.upload_bandwidth << 20, limits.upload_packets),
    )


def make_qemu(
    home: Path,
    runtime: Path,
    qemu: QemuBinary,
    accelerator: Accelerator,
    kernel: Path,
    initramfs: Path,
    kernel_sha256: str,
    jailer: Jailer | None = None,
    layers: Sequence[Path] | None = None,
) -> QemuVmm:
    """QEMU with that accelerator, not probed. Blocks for 0.1 s."""
    khz = tsc_khz(home)
    cpu = cpu_option(accelerator)
    # TCG passes the host's TSC through, so a guest's clock runs right only where the TSC runs as fast.
    where = host_cpu() if accelerator is Accelerator.KVM else f"TSC {khz / 1000:.0f} MHz"
    fingerprint = Fingerprint(
        "qemu", qemu.version, accelerator, f"{cpu} ({where})", qemu_command.DEVICE_MODEL, kernel_sha256
    )
    platform = qemu_command.Platform(qemu.path, accelerator, cpu, khz)
    return QemuVmm(home, runtime, platform, fingerprint, kernel, initramfs, jailer, layers)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
