"""The hypervisor boundary implemented with QEMU: starts, finds again and sweeps up processes.

``aenv.vmm.qemu`` is what one of them can do. How it works, what was measured and which orders matter:
``docs/internals/vmm.md``; how processes are confined: ``confinement.md``.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog

from aenv.errors import VmmError
from aenv.storage.lsmt import disk_errors
from aenv.vmm import process, qemu_command, qemu_files
from aenv.vmm.jail import Jail, Jailer
from aenv.vmm.jail_root import Share, prepare_visitor
from aenv.vmm.jail_settings import JailSettings
from aenv.vmm.probe import KVM_DEVICE
from aenv.vmm.protocol import Accelerator, Fingerprint, MachineShape, NetworkAttachment
from aenv.vmm.qemu import ERRORS, STATE, QemuVm
from aenv.vmm.qemu_record import Record
from aenv.vmm.qmp import QmpClient
from aenv.vmm.vm_folders import VmFolders
from aenv.vmm.vm_process import beside

log = structlog.get_logger()

T = TypeVar("T")
ADOPT_TIMEOUT = 30.0  # seconds until a process that was found counts as hung
LAUNCH_TIMEOUT = 30.0  # seconds until a new process answers QMP; 25 ms on an idle host
QMP_SOCKET = "qmp.sock"
# Bytes that a process may have besides its guest's memory: QEMU itself, and page cache that is charged to it. Under
# TCG also translated code, of which QEMU keeps up to 1 GiB.
OVERHEAD = {Accelerator.KVM: 256 << 20, Accelerator.TCG: (256 + 1024) << 20}
TABLES = 64  # page tables of the host, and under KVM of the guest, take a 512th of its memory each at least


def memory_limit(shape: MachineShape, accelerator: Accelerator) -> int:
    """Bytes that a process for such a machine may have."""
    guest = shape.memory_mib << 20
    return guest + guest // TABLES + OVERHEAD[accelerator]


class QemuVmm:
    """QEMU as configured and probed on this node; ``aenv.vmm.choice`` makes one."""

    def __init__(
        self,
        home: Path,
        runtime: Path,
        platform: qemu_command.Platform,
        fingerprint: Fingerprint,
        kernel: Path,
        initramfs: Path,
        jailer: Jailer | None = None,
        layers: Sequence[Path] | None = None,
    ) -> None:
        """``layers``: the folders that hold layers of disks, by default the node's. Without ``jailer``: no jails."""
        self._folders = VmFolders(home, runtime)
        self._platform = platform
        self._fingerprint = fingerprint
        self._kernel = kernel
        self._initramfs = initramfs
        self._jailer = jailer or Jailer(JailSettings(mode="off"), home, runtime)
        self._layers = layers if layers is not None else (home / "layers", runtime / "layers")
        # Blocking work is short and mostly in the kernel; a fork of 16 should not queue behind 4 captures.
        self._executor = ThreadPoolExecutor(32, "vmm", prepare_visitor if self._jailer.isolates else None)

    @property
    def platform(self) -> qemu_command.Platform:
        return self._platform

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def jailer(self) -> Jailer:
        return self._jailer

    async def spawn(self, vm_id: str, shape: MachineShape, network: NetworkAttachment) -> QemuVm:
        return await self._start(vm_id, shape, network, None, None)

    async def boot(
        self,
        vm_id: str,
        shape: MachineShape,
        network: NetworkAttachment,
        disk: Path,
        parameters: Mapping[str, str],
    ) -> QemuVm:
        memory = self._folders.memory(vm_id)
        line = qemu_command.kernel_parameters(self._platform, parameters)
        source = qemu_command.BootSource(self._kernel, self._initramfs, line)
        vm = await self._start(vm_id, shape, network, source, memory)
        try:
            await vm.boot(disk, [self._kernel, self._initramfs])
        except BaseException:
            await asyncio.shield(vm.kill())
            raise
        return vm

    async def adopt(self, vm_id: str) -> QemuVm | None:
        directory = self._folders.runtime(vm_id)
        record = await self._blocking(Record.read, directory)
        if record is None:
            await self._blocking(self._sweep, vm_id)
            return None
        try:
            proc = process.Process(record.pid, record.start)
        except ProcessLookupError:
            await self._blocking(self._sweep, vm_id)
            return None
        try:
            jail = await self._blocking(self._jailer.adopt, vm_id, directory, record.pid, record.user)
            if jail is None:
                raise VmmError("The last server died before this process was confined.")
            qmp = await QmpClient.connect(directory / QMP_SOCKET, ADOPT_TIMEOUT)
        except VmmError as error:
            if proc.alive:
                log.error("ending a VM that cannot be taken over", vm=vm_id, pid=proc.pid, error=str(error))
                proc.send(signal.SIGKILL)
            await proc.wait()
            await self._blocking(self._sweep, vm_id)
            return None
        return self._vm(vm_id, record, proc, qmp, jail)

    def known(self) -> list[str]:
        return self._folders.known()

    def close(self) -> None:
        """End the worker threads. VMs are not touched."""
        self._executor.shutdown(wait=False)
        self._jailer.close()

    async def _start(
        self,
        vm_id: str,
        shape: MachineShape,
        network: NetworkAttachment,
        source: qemu_command.BootSource | None,
        memory: Path | None,
    ) -> QemuVm:
        """A process that waits for its machine, confined. ``memory``: an empty file to be made, for a boot."""
        directory = self._folders.runtime(vm_id)
        pid, jail, control = await self._blocking(self._launch, vm_id, shape, network, source, memory)
        proc = process.Process(pid)
        record = Record(
            pid, proc.start, shape.vcpus, shape.memory_mib, network.netns, network.tap, network.mac,
            jail.user, str(memory) if memory else None,
        )  # fmt: skip
        try:
            # While it loads its program.
            limited, saved = self._blocking(jail.limit), self._blocking(record.write, directory)
            qmp = await beside(QmpClient.over(control, LAUNCH_TIMEOUT), limited, saved)
            # It has loaded its program, and nothing of a guest.
            await self._blocking(self._enclose, jail, directory)
            return self._vm(vm_id, record, proc, qmp, jail)
        except BaseException as error:
            proc.send(signal.SIGKILL)
            status = await proc.wait()
            said = await self._blocking(process.tail, directory / ERRORS)
            await self._blocking(self._remove, jail, directory)
            if isinstance(error, VmmError):
                raise VmmError(f"QEMU did not start (exit status {status}): {said or error.message}") from error
            raise

    def _vm(self, vm_id: str, record: Record, proc: process.Process, qmp: QmpClient, jail: Jail) -> QemuVm:
        directory, console = self._folders.runtime(vm_id), self._folders.console(vm_id)
        return QemuVm(vm_id, directory, console, record, proc, qmp, jail, self._layers, self._executor)

    def _launch(
        self,
        vm_id: str,
        shape: MachineShape,
        network: NetworkAttachment,
        source: qemu_command.BootSource | None,
        memory: Path | None,
    ) -> tuple[int, Jail, socket.socket]:
        directory, console = self._folders.runtime(vm_id), self._folders.console(vm_id)
        with disk_errors(directory), contextlib.ExitStack() as undo, contextlib.ExitStack() as opened:
            self._folders.make(vm_id)
            undo.callback(shutil.rmtree, directory, True)
            console.parent.mkdir(parents=True, exist_ok=True)
            if memory is not None:
                with memory.open("xb") as file:
                    file.truncate(shape.memory_mib << 20)
            limits = self._jailer.limits(shape.vcpus, memory_limit(shape, self._platform.accelerator))
            jail = self._jailer.prepare(vm_id, directory, limits)
            undo.callback(jail.close)
            # QEMU inherits a listening socket for servers that are started later, and a connection to this one.
            listener = opened.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(directory / QMP_SOCKET))
            listener.listen(1)
            # QEMU can be told twice of one connection; the second accept() must not wait for another.
            listener.setblocking(False)
            control, theirs = socket.socketpair(socket.AF_UNIX)
            undo.callback(control.close)
            opened.enter_context(theirs)
            given = self._open(network, console)
            for fd in (given.console, given.tap, given.kvm):
                if fd is not None:
                    opened.callback(os.close, fd)
            argv = qemu_command.command(
                self._platform, vm_id, shape, network, console, listener.fileno(), source, given, theirs.fileno()
            )
            fds = [fd for fd in (given.console, given.tap, given.kvm) if fd is not None]
            pid = jail.launch(argv, network.netns, directory / ERRORS, [listener.fileno(), theirs.fileno(), *fds])
            undo.pop_all()
            return pid, jail, control

    def _open(self, network: NetworkAttachment, console: Path) -> qemu_command.Given:
        """What QEMU could not open as another user."""
        tap = process.open_tap(network.netns, network.tap)
        try:
            output = os.open(console, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except BaseException:
            os.close(tap)
            raise
        kvm: int | None = None
        if self._platform.accelerator is Accelerator.KVM:
            try:
                kvm = os.open(KVM_DEVICE, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                os.close(tap)
                os.close(output)
                raise VmmError(f"{KVM_DEVICE} cannot be opened: {error.strerror}.") from error
        return qemu_command.Given(output, tap, kvm)

    def _enclose(self, jail: Jail, directory: Path) -> None:
        state = directory / STATE
        state.touch(0o600)
        if self._jailer.isolates:
            jail.enclose([*qemu_files.firmware(self._platform.qemu), Share(state, writable=True)])

    def _sweep(self, vm_id: str) -> None:
        """Remove what a VM left behind; also a process that started when the server died before noting its pid."""
        directory = self._folders.runtime(vm_id)
        if directory.exists():
            process.end_by_argument(qemu_command.process_name(vm_id))
        self._jailer.sweep(vm_id, directory)
        shutil.rmtree(directory, ignore_errors=True)

    def _remove(self, jail: Jail, directory: Path) -> None:
        jail.close()
        shutil.rmtree(directory, ignore_errors=True)

    def _blocking(self, function: Callable[..., T], *arguments: object) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
