"""Which hypervisor this node uses: the settings' wish, checked against what really boots."""

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path

from aenv.config import Settings
from aenv.errors import VmmError
from aenv.vmm import qemu_command
from aenv.vmm.probe import (
    QemuBinary,
    Verdict,
    cpu_option,
    find_qemu,
    host_cpu,
    remembered_probe,
    tsc_khz,
)
from aenv.vmm.protocol import Accelerator, Fingerprint
from aenv.vmm.qemu import QemuVmm


async def verdicts(
    settings: Settings, kernel: Path, initramfs: Path, *, progress: Callable[[str], None]
) -> list[Verdict]:
    """Verdicts of all candidates that the settings allow, best first, for ``aenv doctor``."""
    qemu = await find_qemu(settings.qemu)
    digest = await asyncio.to_thread(_sha256, kernel)
    return [
        await _probe(settings, qemu, candidate, kernel, initramfs, digest, progress)
        for candidate in _candidates(settings)
    ]


async def choose_vmm(
    settings: Settings, kernel: Path, initramfs: Path, *, progress: Callable[[str], None]
) -> QemuVmm:
    """The best VMM that boots ``kernel`` here. Raises VmmError, with every verdict, when none does."""
    qemu = await find_qemu(settings.qemu)
    digest = await asyncio.to_thread(_sha256, kernel)
    failed = []
    for candidate in _candidates(settings):
        verdict = await _probe(settings, qemu, candidate, kernel, initramfs, digest, progress)
        if verdict.works:
            return await asyncio.to_thread(
                make_vmm, settings.home, settings.runtime, qemu, candidate, kernel, initramfs, digest
            )
        failed.append(verdict)
        progress(f"{candidate} does not work here: {verdict.reason}")
    reasons = " ".join(f"{verdict.accelerator}: {verdict.reason}" for verdict in failed)
    raise VmmError(f"No hypervisor works on this host. {reasons}", failed[-1].advice)


def make_vmm(
    home: Path,
    runtime: Path,
    qemu: QemuBinary,
    accelerator: Accelerator,
    kernel: Path,
    initramfs: Path,
    kernel_sha256: str,
) -> QemuVmm:
    """A VMM with that accelerator, not probed. Blocks for 0.1 s."""
    khz = tsc_khz(home)
    cpu = cpu_option(accelerator)
    # TCG passes the host's TSC through, so a guest's clock runs right only where the TSC runs as fast.
    where = host_cpu() if accelerator is Accelerator.KVM else f"TSC {khz / 1000:.0f} MHz"
    fingerprint = Fingerprint(
        "qemu", qemu.version, accelerator, f"{cpu} ({where})", qemu_command.DEVICE_MODEL, kernel_sha256
    )
    platform = qemu_command.Platform(qemu.path, accelerator, cpu, khz)
    return QemuVmm(home, runtime, platform, fingerprint, kernel, initramfs)


def _candidates(settings: Settings) -> list[Accelerator]:
    if settings.accelerator == "auto":
        return [Accelerator.KVM, Accelerator.TCG]
    return [Accelerator(settings.accelerator)]


async def _probe(
    settings: Settings,
    qemu: QemuBinary,
    candidate: Accelerator,
    kernel: Path,
    initramfs: Path,
    digest: str,
    progress: Callable[[str], None],
) -> Verdict:
    progress(f"probing {candidate} by booting the guest kernel")
    return await remembered_probe(settings.home, qemu, candidate, kernel, initramfs, digest)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
