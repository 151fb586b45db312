"""Whether Firecracker works here: found out by booting the guest kernel, because nothing less proves it."""

import asyncio
import functools
import json
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from aenv.vmm.firecracker import requests
from aenv.vmm.firecracker.binary import FirecrackerBinary
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.probe import remembered, watch
from aenv.vmm.protocol import Accelerator, MachineShape
from aenv.vmm.verdict import Candidate, Verdict, key_of, missing

# Seconds until a kernel's first words, and of silence after that. An idle host needs 0.5 for the whole boot.
FIRST_WORDS, SILENCE = 8.0, 30.0
SHAPE = MachineShape(vcpus=1, memory_mib=256)


def probe_configuration(kernel: Path, initramfs: Path) -> dict[str, object]:
    """A VM without disk and network as Firecracker's ``--config-file`` has it. Pure.

    The kernel talks from its first instruction on. Keys are the paths of the API's requests.
    """
    line = requests.kernel_parameters({}, FirecrackerOptions())
    line = line.replace("quiet loglevel=4", "earlyprintk=ttyS0 loglevel=7")
    made = {r.path: dict(r.body or {}) for r in requests.boot(line, SHAPE, None, FirecrackerOptions())}
    source = made["/boot-source"] | {"kernel_image_path": str(kernel), "initrd_path": str(initramfs)}
    return {"boot-source": source, "machine-config": made["/machine-config"], "entropy": {}, "drives": []}


def wrong_kernel(head: bytes, machine: str = platform.machine()) -> str | None:
    """Why Firecracker would not load a kernel that begins so, as a sentence; None when it would. Pure.

    An ELF file on x86-64; on arm64 an ``Image`` (Documentation/arch/arm64/booting.rst of Linux), uncompressed.
    """
    if machine == "x86_64":
        return None if head.startswith(b"\x7fELF") else "The guest kernel is no ELF file (vmlinux)."
    return None if head[56:60] == b"ARM\x64" else "The guest kernel is no uncompressed arm64 Image."


async def probe(binary: FirecrackerBinary, accelerator: Accelerator, kernel: Path, initramfs: Path) -> Verdict:
    """Boot the kernel once, without disk or network, and say whether it reached user space."""
    if (why := wrong_kernel(await asyncio.to_thread(_head, kernel))) is not None:
        return missing(Candidate("firecracker", accelerator), why, "Name another one: AENV_KERNEL, AENV_PVM_KERNEL.")
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="aenv-probe-"))
    began = time.monotonic()
    try:
        configuration = directory / "vm.json"
        content = json.dumps(probe_configuration(kernel, initramfs))
        await asyncio.to_thread(configuration.write_text, content)
        argv = [
            binary.path, "--no-api", "--config-file", str(configuration),
            "--log-path", str(directory / "errors"), "--level", "Error",
        ]  # fmt: skip
        works, reason = await watch("Firecracker", argv, directory, SILENCE, first=FIRST_WORDS, prints_console=True)
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, True)
    advice = "" if works else _advice(accelerator)
    return Verdict("firecracker", accelerator, works, reason, advice, time.monotonic() - began)


async def remembered_probe(
    home: Path,
    binary: FirecrackerBinary,
    accelerator: Accelerator,
    kernel: Path,
    initramfs: Path,
    kernel_sha256: str,
    announce: Callable[[], None] = lambda: None,
) -> Verdict:
    """``probe``, as ``remembered`` for the same binary and kernel."""
    key = key_of((binary.identity, binary.version, kernel_sha256, requests.DEVICE_MODEL))
    boot = functools.partial(probe, binary, accelerator, kernel, initramfs)
    return await remembered(home, Candidate("firecracker", accelerator), key, boot, announce)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(64)


def _advice(accelerator: Accelerator) -> str:
    if accelerator is Accelerator.PVM:
        return "Mode pvm needs a host that is a PVM guest's hypervisor and a kernel made for it: see AENV_PVM_KERNEL."
    return (
        "This host's KVM cannot run an ordinary kernel: use a host with hardware virtualization, PVM's own kernel "
        "(AENV_PVM_KERNEL), or QEMU's emulation (AENV_VMM=qemu)."
    )
