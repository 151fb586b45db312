import hashlib
from pathlib import Path
from aenv.vmm.qemu import QemuVmm
from aenv.vmm.qemu_command import Platform
from aenv.vmm.protocol import Fingerprint, Accelerator


async def choose_vmm(settings, kernel: Path, initramfs: Path, progress):
    fp = Fingerprint(
        "qemu", "10.0.2", Accelerator.TCG, "max", "microvm", hashlib.sha256(kernel.read_bytes()).hexdigest()
    )
    return QemuVmm(
        settings.home, settings.runtime, Platform(settings.qemu, Accelerator.TCG, "max"), fp, kernel, initramfs
    )
