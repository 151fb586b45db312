"""The hypervisor boundary implemented with Firecracker: ``FirecrackerVmm`` makes VMs.

How it works, what was measured and which orders matter: ``docs/internals/firecracker.md``.
"""

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import structlog

from aenv.errors import VmmError
from aenv.storage.lsmt import disk_errors
from aenv.vmm import process, qemu_command
from aenv.vmm.disk.protocol import DiskExport, DiskExporter
from aenv.vmm.firecracker import requests
from aenv.vmm.firecracker.api import FirecrackerApi
from aenv.vmm.firecracker.binary import FirecrackerBinary
from aenv.vmm.firecracker.cell import LOG, SOCKET, Cell
from aenv.vmm.firecracker.gate import let_go
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.firecracker.record import Record
from aenv.vmm.firecracker.vm import FirecrackerVm
from aenv.vmm.jail import Jailer
from aenv.vmm.jail_root import prepare_visitor
from aenv.vmm.probe import host_cpu
from aenv.vmm.protocol import Accelerator, Fingerprint, MachineShape, NetworkAttachment
from aenv.vmm.vm_folders import VmFolders
from aenv.vmm.vm_process import beside

log = structlog.get_logger()

T = TypeVar("T")
ADOPT_TIMEOUT = 30.0  # seconds until a process that was found counts as hung
LAUNCH_TIMEOUT = 30.0  # seconds until a new process answers; 10 ms on an idle host
OVERHEAD = 128 << 20  # bytes that Firecracker may need besides the guest's memory; 5 MiB are usual
LONGEST_SOCKET = 107  # bytes of a Unix socket's path, unix(7)


def fingerprint(binary: FirecrackerBinary, accelerator: Accelerator, kernel_sha256: str) -> Fingerprint:
    """What snapshots made with this binary on this host depend on."""
    machine = f"{requests.DEVICE_MODEL}; snapshots {binary.snapshot_version}"
    return Fingerprint("firecracker", binary.version, accelerator, host_cpu(), machine, kernel_sha256)


def command(binary: FirecrackerBinary, vm_id: str, socket: str, log: str) -> list[str]:
    """The command line. Seccomp filters are on unless one says otherwise; the name is what ``_sweep`` looks for."""
    name = qemu_command.process_name(vm_id)
    return [binary.path, "--id", name, "--api-sock", socket, "--log-path", log, "--level", "Warn", "--show-level"]


class FirecrackerVmm:
    """Firecracker as configured and probed on this node."""

    def __init__(
        self,
        home: Path,
        runtime: Path,
        binary: FirecrackerBinary,
        fingerprint: Fingerprint,
        kernel: Path,
        initramfs: Path,
        exporter: DiskExporter,
        options: FirecrackerOptions,
        jailer: Jailer,
    ) -> None:
        self._folders = VmFolders(home, runtime)
        self._binary = binary
        self._fingerprint = fingerprint
        self._kernel = kernel
        self._initramfs = initramfs
        self._exporter = exporter
        self._options = options
        self._jailer = jailer
        # Blocking work is short and mostly in the kernel; a fork of 16 should not queue behind 4 captures.
        self._executor = ThreadPoolExecutor(32, "vmm", prepare_visitor if jailer.isolates else None)

    @property
    def binary(self) -> FirecrackerBinary:
        return self._binary

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    async def spawn(self, vm_id: str, shape: MachineShape, network: NetworkAttachment) -> FirecrackerVm:
        directory = self._folders.runtime(vm_id)
        if len(os.fsencode(directory / SOCKET)) > LONGEST_SOCKET:
            raise VmmError(f"The path {directory} is too long for sockets.", "Set AENV_RUNTIME to a shorter path.")
        pid, cell = await self._blocking(self._launch, vm_id, shape, network)
        proc = process.Process(pid)
        api = FirecrackerApi(directory / SOCKET)
        record = Record(
            pid, proc.start, shape.vcpus, shape.memory_mib, network.netns, network.tap, network.mac, cell.user
        )  # fmt: skip
        vm = self._vm(vm_id, record, proc, api, cell, None)
        try:
            # While it loads its program.
            limited, saved = self._blocking(cell.limit), self._blocking(record.write, directory)
            await beside(self._answering(vm, api), limited, saved)
            await self._blocking(cell.enclose)
            await api.send(requests.serial())
            return vm
        except BaseException:
            await asyncio.shield(vm.kill())
            raise

    async def boot(
        self,
        vm_id: str,
        shape: MachineShape,
        network: NetworkAttachment,
        disk: Path,
        parameters: Mapping[str, str],
    ) -> FirecrackerVm:
        line = requests.kernel_parameters(parameters, self._options)
        vm = await self.spawn(vm_id, shape, network)
        try:
            await vm.boot(line, self._kernel, self._initramfs, disk)
            return vm
        except BaseException:
            await asyncio.shield(vm.kill())
            raise

    async def adopt(self, vm_id: str) -> FirecrackerVm | None:
        directory = self._folders.runtime(vm_id)
        record = await self._blocking(Record.read, directory)
        try:
            proc = process.Process(record.pid, record.start) if record else None
        except ProcessLookupError:
            proc = None
        if record is None or proc is None:
            await self._sweep(vm_id)
            return None
        api = FirecrackerApi(directory / SOCKET)
        try:
            with contextlib.suppress(OSError):
                await self._blocking(let_go, directory / requests.SAVE)
            await api.send(requests.describe(), ADOPT_TIMEOUT)
            jail = await self._blocking(self._jailer.adopt, vm_id, directory, record.pid, record.user)
            if jail is None:
                raise VmmError("the server ended before it was enclosed")
            export = await self._exporter.adopt(vm_id, directory) if record.disk else None
            if record.disk and export is None:
                raise VmmError("its disk is gone")
        except VmmError as error:
            if proc.alive:
                log.error("ending a VM that cannot be taken over", vm=vm_id, pid=proc.pid, error=str(error))
                proc.send(signal.SIGKILL)
            api.close()
            await proc.wait()
            await self._sweep(vm_id)
            return None
        cell = Cell(jail, directory, self._folders.console(vm_id))
        return self._vm(vm_id, record, proc, api, cell, export)

    def known(self) -> list[str]:
        return self._folders.known()

    def close(self) -> None:
        """End the worker threads. VMs are not touched."""
        self._executor.shutdown(wait=False)

    def _vm(
        self,
        vm_id: str,
        record: Record,
        proc: process.Process,
        api: FirecrackerApi,
        cell: Cell,
        export: DiskExport | None,
    ) -> FirecrackerVm:
        return FirecrackerVm(
            vm_id, self._folders.runtime(vm_id), self._folders.console(vm_id), record, proc, api, cell,
            self._exporter, export, self._options, self._executor,
        )  # fmt: skip

    async def _answering(self, vm: FirecrackerVm, api: FirecrackerApi) -> None:
        """Until a new process answers, or VmmError with what it said when it ended before that."""
        ended, ready = asyncio.create_task(vm.wait()), asyncio.create_task(api.ready(LAUNCH_TIMEOUT))
        try:
            await asyncio.wait({ended, ready}, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done() or ready.exception():
                status = f"exit status {ended.result()}" if ended.done() else "it runs"
                why = await self._blocking(vm.errors) or (ready.exception() if ready.done() else "it says nothing")
                raise VmmError(f"Firecracker did not start ({status}): {why}")
        finally:
            ended.cancel()
            ready.cancel()
            await asyncio.gather(ended, ready, return_exceptions=True)

    def _launch(self, vm_id: str, shape: MachineShape, network: NetworkAttachment) -> tuple[int, Cell]:
        directory = self._folders.runtime(vm_id)
        with disk_errors(directory), contextlib.ExitStack() as stack:
            self._folders.make(vm_id)
            stack.callback(shutil.rmtree, directory, True)
            limits = self._jailer.limits(shape.vcpus, (shape.memory_mib << 20) + OVERHEAD)
            cell = Cell(self._jailer.prepare(vm_id, directory, limits), directory, self._folders.console(vm_id))
            stack.callback(cell.close)
            cell.prepare()
            argv = command(self._binary, vm_id, cell.lobby_path(SOCKET), cell.lobby_path(LOG))
            pid = cell.launch(argv, network.netns, network.tap)
            stack.pop_all()
            return pid, cell

    async def _sweep(self, vm_id: str) -> None:
        """Remove what a VM left behind; also a process that started when the server died before noting its pid."""
        directory = self._folders.runtime(vm_id)
        if not await self._blocking(directory.exists):
            return
        await self._blocking(process.end_by_argument, qemu_command.process_name(vm_id))
        if export := await self._exporter.adopt(vm_id, directory):
            await export.close()
        await self._blocking(self._jailer.sweep, vm_id, directory)
        await self._blocking(shutil.rmtree, directory, True)

    def _blocking(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
