"""Which hypervisor this node uses: the settings' wish, checked against what really boots."""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from aenv.config import Settings
from aenv.errors import VmmError
from aenv.vmm import qemu_command
from aenv.vmm.jail import Jailer
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
                self.used = candidate
                return await self._make(candidate)
            failed.append(verdict)
            self._progress(f"{candidate} does not work here: {verdict.reason}")
        reasons = " ".join(f"{verdict.candidate}: {verdict.reason}" for verdict in failed)
        raise VmmError(f"No hypervisor works on this host. {reasons}", failed[-1].advice)

    async def _try(self, candidate: Candidate) -> Verdict:
        if candidate.vmm == "firecracker":
            return missing(
                candidate,
                f"Firecracker ({self._settings.firecracker}) is not installed.",
                "Install one of its two newest releases, or set AENV_FIRECRACKER.",
            )
        qemu = await find_qemu(self._settings.qemu)
        digest = await asyncio.to_thread(sha256_of, self._kernel)
        self._progress(f"probing {candidate} by booting the guest kernel")
        return await remembered_probe(
            self._settings.home, qemu, candidate.accelerator, self._kernel, self._initramfs, digest
        )

    async def _make(self, candidate: Candidate) -> Vmm:
        settings = self._settings
        qemu = await find_qemu(settings.qemu)
        digest = await asyncio.to_thread(sha256_of, self._kernel)
        return await asyncio.to_thread(
            make_qemu,
            settings.home,
            settings.runtime,
            qemu,
            candidate.accelerator,
            self._kernel,
            self._initramfs,
            digest,
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
