"""One lab: a QEMU process on an overlay of the prepared disk, in a folder of its own.

    machines/<name>/overlay.qcow2  console.log  qemu.log  pid  port

A machine either ends with the process that started it, or stays in the background until ``stop``. Its disk's changes
go with it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from aenv.guest.commands import GuestArtifactError
from aenv.vmm.probe import tsc_khz
from lab.channel import Channel
from lab.kernel import LabKernel
from lab.settings import LabSettings

CPU = "EPYC,+svm,+npt"
"""AMD's virtualization, the only one that QEMU emulates, on the plainest processor that has it."""

QUIET = "console=ttyS0 reboot=t panic=-1 cryptomgr.notests random.trust_cpu=on mitigations=off nokaslr loglevel=5"
BOOT_TIMEOUT = 300.0  # seconds; an idle host needs 11
POLL = 0.2  # seconds
PANIC = "Kernel panic - not syncing"


class LabError(GuestArtifactError):
    """A lab does not start or is not there."""


class LabPanicError(LabError):
    """The lab's own kernel died. QEMU's emulation of SVM does that to it now and then (docs/internals/lab.md)."""

    def __init__(self, said: str, console: str) -> None:
        super().__init__(f"The lab's own kernel died, not a guest: {said}.", hint="Run it again.")
        self.console = console


@dataclass(frozen=True, slots=True)
class LabMachine:
    settings: LabSettings
    name: str

    @property
    def folder(self) -> Path:
        return self.settings.machines / self.name

    @property
    def overlay(self) -> Path:
        return self.folder / "overlay.qcow2"

    @property
    def console(self) -> Path:
        return self.folder / "console.log"

    @property
    def channel(self) -> Channel:
        """Raises LabError where no machine of this name was started."""
        try:
            port = int((self.folder / "port").read_text())
        except (OSError, ValueError) as error:
            raise LabError(
                f"No lab {self.name!r} runs.", hint=f"Start it: python -m lab start {self.name}"
            ) from error
        return Channel(port, self.settings.key, self.folder)

    def pid(self) -> int | None:
        """Of its QEMU, if that runs."""
        try:
            pid = int((self.folder / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if str(self.overlay).encode() in command else None

    def start(self, disk: Path, kernel: LabKernel, *, background: bool) -> None:
        """Start QEMU on an overlay of ``disk``. Raises LabError where one of this name runs."""
        if self.pid() is not None:
            raise LabError(f"A lab {self.name!r} runs already.", hint=f"Stop it: python -m lab stop {self.name}")
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True)
        form = "qcow2" if disk.suffix == ".qcow2" else "raw"
        create = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", str(disk), "-F", form, str(self.overlay)]
        subprocess.run(create, check=True)
        port = _free_port()
        # A machine that nobody would stop any more ends with its caller, however that ends.
        bound = [] if background else ["setpriv", "--pdeathsig", "KILL"]
        with (self.folder / "qemu.log").open("wb") as log:
            process = subprocess.Popen(
                [*bound, *self._command(kernel, port)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        (self.folder / "pid").write_text(str(process.pid))
        (self.folder / "port").write_text(str(port))

    def _command(self, kernel: LabKernel, port: int) -> list[str]:
        khz = tsc_khz(self.settings.cache)
        parameters = f"{QUIET} no_timer_check tsc=reliable tsc_early_khz={khz}"
        return [
            "qemu-system-x86_64", "-name", f"aenv-lab-{self.name}",
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-M", "microvm,acpi=on,pcie=off,pit=off,pic=off,rtc=on",
            "-accel", "tcg,thread=multi", "-cpu", CPU,
            "-smp", str(self.settings.cpus), "-m", f"{self.settings.memory_mib}M",
            "-kernel", str(kernel.vmlinux), "-initrd", str(kernel.initramfs), "-append", parameters,
            "-drive", f"file={self.overlay},if=none,id=disk,format=qcow2,cache=unsafe,discard=unmap",
            "-device", "virtio-blk-device,drive=disk",
            "-netdev", f"user,id=net,hostfwd=tcp:127.0.0.1:{port}-:22", "-device", "virtio-net-device,netdev=net",
            "-device", "virtio-rng-device",
            "-chardev", f"file,id=console,path={self.console}", "-serial", "chardev:console",
        ]  # fmt: skip

    def wait(self) -> None:
        """Until it runs commands. Raises LabError with the console's end where it does not."""
        deadline = time.monotonic() + BOOT_TIMEOUT
        while not self.channel.answers(30.0):
            if self.pid() is None:
                raise LabError(f"The lab's QEMU ended: {self._last_words('qemu.log')}", hint=f"See {self.folder}.")
            if time.monotonic() > deadline:
                words = self._last_words("console.log")
                raise LabError(f"The lab did not start in {BOOT_TIMEOUT:.0f} s: {words}", hint=f"See {self.console}.")
            time.sleep(POLL)

    def check(self) -> None:
        """Raises LabPanicError where the lab's kernel has died."""
        with contextlib.suppress(OSError):
            console = self.console.read_text(errors="replace")
            for line in console.splitlines():
                if PANIC in line:
                    raise LabPanicError(line[line.index(PANIC) :], console)

    def _last_words(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in (self.folder / name).read_text(errors="replace").splitlines() if line.strip()]
            return lines[-1] if lines else "it printed nothing."
        return "it printed nothing."

    def stop(self) -> None:
        """End it and remove its files. Does nothing where it does not run."""
        pid = self.pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            while self.pid() is not None:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                time.sleep(0.02)
        if self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)

    def shut_down(self) -> None:
        """End it so that its disk holds all that was written; the overlay stays. Raises LabError."""
        pid = self.pid()
        if self.channel.call("sync && { (sleep 0.2; poweroff) >/dev/null 2>&1 </dev/null & }") != 0:
            raise LabError("The lab does not write its disk.", hint=f"See {self.console}.")
        deadline = time.monotonic() + 60.0
        while self.pid() is not None:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid or 0, os.WNOHANG)
            if time.monotonic() > deadline:
                raise LabError("The lab does not shut down.", hint=f"See {self.console}.")
            time.sleep(0.05)


def remove_dead(settings: LabSettings) -> None:
    """Folders of machines that were killed."""
    if settings.machines.exists():
        for folder in settings.machines.iterdir():
            machine = LabMachine(settings, folder.name)
            if machine.pid() is None:
                machine.stop()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
