"""Whether QEMU works here, and with what: found out by booting the guest kernel, because nothing less proves it.

On a host that is itself a paravirtual guest (PVM), ``/dev/kvm`` exists, ``KVM_CREATE_VM`` succeeds, and an ordinary
kernel still does not run. Verdicts are remembered (``aenv.vmm.verdict``).
"""

import asyncio
import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import re
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from aenv.errors import VmmError
from aenv.vmm import qemu_command
from aenv.vmm.protocol import Accelerator
from aenv.vmm.verdict import Candidate, Memory, Verdict, key_of, missing

# Printed by the kernel when it starts /init: processor, memory, interrupts and timer all work by then.
MARKER = "Run /init as init process"
# Seconds that a kernel may be silent; an idle host needs 0.5 and 3 for the whole boot.
TIMEOUT = {Accelerator.KVM: 10.0, Accelerator.TCG: 120.0}
LONGEST = 240.0  # seconds, however much it says
POLL = 0.05  # seconds
TSC_FILE = "tsc-khz"
MINIMUM_VERSION = (10, 0)
KVM_DEVICE = Path("/dev/kvm")


@dataclass(frozen=True, slots=True)
class QemuBinary:
    """``identity`` changes when the binary is replaced."""

    path: str
    version: str
    identity: str


async def find_qemu(name: str) -> QemuBinary:
    """The binary and its version. Raises VmmError when it is missing, broken or too old."""
    advice = "Install qemu-system-x86 (10 or newer), or set AENV_QEMU."
    path = shutil.which(name)
    if path is None:
        raise VmmError(f"QEMU ({name}) is not installed.", advice)
    try:
        child = await asyncio.create_subprocess_exec(path, "--version", stdout=asyncio.subprocess.PIPE)
        output, _ = await child.communicate()
    except OSError as error:
        raise VmmError(f"{path} cannot be run: {error}.", advice) from error
    found = re.search(r"version (\d+)\.(\d+)\.(\d+)", output.decode(errors="replace"))
    if not found:
        raise VmmError(f"{path} --version does not name a version.", advice)
    if (int(found[1]), int(found[2])) < MINIMUM_VERSION:
        raise VmmError(f"{path} is version {found[0].split()[1]}.", advice)
    stat = await asyncio.to_thread(os.stat, path)
    return QemuBinary(path, ".".join(found.groups()), f"{path}:{stat.st_size}:{stat.st_mtime_ns}")


def tsc_khz(home: Path) -> int:
    """Frequency of the host's time stamp counter in kHz; blocks for 0.1 s.

    It is part of fingerprints, so it must not flicker: the kernel's own figure when a measurement confirms it
    (in virtual machines /proc/cpuinfo shows the TSC's, on bare metal the core's clock of the moment), else what this
    node measured first, kept in ``home``.
    """
    measured = _measure_tsc()
    found = re.search(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    file = home / TSC_FILE
    candidates = [round(float(found[1]) * 1000)] if found else []
    with contextlib.suppress(OSError, ValueError):
        candidates.insert(0, int(file.read_text()))
    khz = next((c for c in candidates if abs(c - measured) < measured * 1e-3), measured)
    if not candidates or khz != candidates[0] or not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_text(f"{khz}\n")
        temporary.replace(file)
    return khz


def _measure_tsc() -> int:
    code = bytes.fromhex("0f3148c1e2204809d0c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(code)
        anchor = ctypes.c_char.from_buffer(page)
        rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))

        def sample() -> tuple[int, int, int]:
            before, ticks, after = time.monotonic_ns(), rdtsc(), time.monotonic_ns()
            return after - before, (before + after) // 2, ticks

        # The narrowest of several: the scheduler may come between the two clocks.
        _, began, first = min(sample() for _ in range(20))
        time.sleep(0.1)
        _, ended, last = min(sample() for _ in range(20))
        del anchor
    return round((last - first) * 1e6 / (ended - began))


def host_cpu() -> str:
    """Name of the host's CPU and a digest of its features: what a KVM snapshot of ``-cpu host`` depends on."""
    text = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    fields = dict(re.findall(r"^([^\t:]+)\s*:\s*(.*)$", text, re.MULTILINE))
    flags = " ".join(sorted(fields.get("flags", "").split()))
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    return f"{fields.get('model name', 'unknown').strip()}, features {digest}"


async def probe(home: Path, qemu: QemuBinary, accelerator: Accelerator, kernel: Path, initramfs: Path) -> Verdict:
    """Boot the kernel once, without disk or network, and say whether it reached user space."""
    directory = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="aenv-probe-"))
    began = time.monotonic()
    try:
        khz = await asyncio.to_thread(tsc_khz, home)
        platform = qemu_command.Platform(qemu.path, accelerator, cpu_option(accelerator), khz)
        argv = qemu_command.probe_command(platform, kernel, initramfs, directory / "console")
        works, reason = await watch("QEMU", argv, directory, TIMEOUT[accelerator])
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, True)
    advice = "" if works else _advice(accelerator)
    if accelerator is Accelerator.KVM and not works:
        reason = f"KVM is here and cannot run this kernel. {reason}"
    return Verdict("qemu", accelerator, works, reason, advice, time.monotonic() - began)


def without_kvm(candidate: Candidate) -> Verdict | None:
    """The verdict on a candidate that needs KVM where this process cannot open its device."""
    if os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        return None
    state = "may not be opened" if KVM_DEVICE.exists() else "does not exist"
    advice = "Enable virtualization in the firmware or nested virtualization in the cloud, and load kvm."
    return missing(candidate, f"{KVM_DEVICE} {state}.", advice)


def cpu_option(accelerator: Accelerator) -> str:
    """Value of ``-cpu``: everything TCG emulates, or everything the host has.

    TCG runs ``rep movsb`` and ``rep stosb`` byte by byte. Without ERMS and FSRM, kernel and libc copy and clear in
    words (docs/internals/vmm.md).
    """
    return "host" if accelerator is Accelerator.KVM else "max,erms=off,fsrm=off"


async def remembered_probe(
    home: Path,
    qemu: QemuBinary,
    accelerator: Accelerator,
    kernel: Path,
    initramfs: Path,
    kernel_sha256: str,
    announce: Callable[[], None] = lambda: None,
) -> Verdict:
    """``probe``, as ``remembered`` for the same binary and kernel."""
    key = key_of((qemu.identity, qemu.version, kernel_sha256, qemu_command.MACHINE))
    boot = functools.partial(probe, home, qemu, accelerator, kernel, initramfs)
    return await remembered(home, Candidate("qemu", accelerator), key, boot, announce)


async def remembered(
    home: Path, candidate: Candidate, key: str, boot: Callable[[], Awaitable[Verdict]], announce: Callable[[], None]
) -> Verdict:
    """What ``boot`` finds out, or its verdict of earlier in this boot of the host for the same ``key``.

    ``announce`` is called before anything is booted. That KVM's device is missing is not remembered: loading a module
    changes it.
    """
    if candidate.accelerator is not Accelerator.TCG and (verdict := without_kvm(candidate)):
        return verdict
    memory = Memory(home)
    known = await asyncio.to_thread(memory.recall, candidate, key)
    if known is None:
        announce()
        known = await boot()
        await asyncio.to_thread(memory.remember, known, key)
    return known


async def watch(
    name: str,
    argv: list[str],
    directory: Path,
    timeout: float,
    *,
    first: float | None = None,
    prints_console: bool = False,
) -> tuple[bool, str]:
    """Run a hypervisor until ``directory/console`` shows the marker, it ends, or ``timeout`` seconds brought nothing.

    A kernel that talks is on its way, however slow the host is: where KVM is nested or emulated a boot takes long.
    One that talked and died is started once more: the verdict holds until the host is booted again.
    ``first`` is a limit of its own for its first words. Whether its guest came up, and a sentence about it in which
    the hypervisor is called ``name``. With ``prints_console`` the console is what it prints.
    """
    works, reason, died = await _watch(name, argv, directory, timeout, first, prints_console)
    if died:
        (directory / "console").unlink(missing_ok=True)
        works, reason, _ = await _watch(name, argv, directory, timeout, first, prints_console)
        reason = reason if works else f"Tried twice. {reason}"
    return works, reason


async def _watch(
    name: str, argv: list[str], directory: Path, timeout: float, first: float | None, prints_console: bool
) -> tuple[bool, str, bool]:
    """``watch`` once, and whether the kernel talked and died."""
    console, errors = directory / "console", directory / "errors"
    with errors.open("wb") as log, (console if prints_console else errors).open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=log, start_new_session=True
        )
    began = heard = time.monotonic()
    length = 0
    try:
        while True:
            ended = child.returncode is not None  # before a last look at what it said
            seen = await asyncio.to_thread(_read, console)
            now = time.monotonic()
            elapsed = now - began
            if len(seen) > length:
                length, heard = len(seen), now
            if MARKER in seen:
                return True, f"The guest kernel reached user space in {elapsed:.1f} s.", False
            if ended:
                said = (await asyncio.to_thread(_read, errors)).strip().splitlines()
                reason = f"{name} ended after {elapsed:.1f} s: {said[-1] if said else _last(seen)}"
                return False, reason, bool(seen)
            patience = first if first is not None and not length else timeout
            if now - heard > patience or elapsed > LONGEST:
                said = (await asyncio.to_thread(_read, errors)).strip().splitlines()
                words = f"; {name} said: {said[0]}" if said else ""
                return False, f"The guest kernel did not start within {elapsed:.0f} s: {_last(seen)}{words}", False
            await asyncio.sleep(POLL)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        return ""


def _last(console: str) -> str:
    lines = [line.strip() for line in console.splitlines() if line.strip()]
    return f"its last words were {lines[-1]!r}." if lines else "it printed nothing."


def _advice(accelerator: Accelerator) -> str:
    if accelerator is Accelerator.KVM:
        return "Use a host with hardware virtualization; without it sandboxes run emulated, or in PVM's own kernel."
    return "Check the QEMU installation and the kernel file (AENV_QEMU, AENV_KERNEL)."
