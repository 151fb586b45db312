"""The hypervisor boundary implemented with QEMU: ``QemuVmm`` makes VMs, ``QemuVm`` is one of them.

How it works, what was measured and which orders matter: ``docs/internals/vmm.md`` and ``memory-capture.md``.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from aenv.errors import CapacityError, VmmError
from aenv.storage import qcow2
from aenv.storage.lsmt import disk_errors
from aenv.vmm import hot, process, qemu_command, reclaim
from aenv.vmm import memory as ram
from aenv.vmm.protocol import (
    CaptureStats,
    Fingerprint,
    MachineShape,
    MemoryImage,
    NetworkAttachment,
)
from aenv.vmm.qmp import QmpClient, QmpCommandError

log = structlog.get_logger()

T = TypeVar("T")
ADOPT_TIMEOUT = 30.0  # seconds until a process that was found counts as hung
LAUNCH_TIMEOUT = 30.0  # seconds until a new process answers QMP; 25 ms on an idle host
FULL_RETRY = 1.0  # seconds until a VM that met a full disk tries its write again
STATE_TIMEOUT = 60.0  # seconds for saving or loading device state; 1 ms on an idle host
RECORD = "process.json"
QMP_SOCKET = "qmp.sock"
ERRORS = "qemu.log"


@dataclass(frozen=True, slots=True)
class Record:
    """What ``adopt`` needs; written to ``process.json`` by rename. ``start`` guards against a reused pid."""

    pid: int
    start: int
    vcpus: int
    memory_mib: int
    netns: str
    tap: str
    mac: str
    memory: str | None  # the file that guest RAM maps; None until something was restored

    def write(self, directory: Path) -> None:
        temporary = directory / f".{RECORD}.{uuid.uuid4().hex[:8]}"
        temporary.write_text(json.dumps(asdict(self)))
        temporary.replace(directory / RECORD)

    @classmethod
    def read(cls, directory: Path) -> "Record | None":
        """None when there is none, or it is not one of ours."""
        try:
            found = json.loads((directory / RECORD).read_text())
            return cls(**{field.name: found[field.name] for field in fields(cls)})
        except (OSError, ValueError, TypeError, KeyError):
            return None


class QemuVm:
    """One QEMU process. Made by ``QemuVmm`` only."""

    def __init__(
        self,
        vm_id: str,
        directory: Path,
        console: Path,
        record: Record,
        proc: process.Process,
        qmp: QmpClient,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._id = vm_id
        self._directory = directory
        self._console = console
        self._record = record
        self._process = proc
        self._qmp = qmp
        self._executor = executor
        self._stopped_at: float | None = None
        self._held = False  # stopped by us, so that nothing but ``cont`` may let it run
        self._met_full_disk = False
        self._retry: asyncio.TimerHandle | None = None
        qmp.subscribe(self._on_event)
        self._mapping: ram.Mapping | None = None

    @property
    def id(self) -> str:
        return self._id

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    @property
    def console(self) -> Path:
        return self._console

    @property
    def directory(self) -> Path:
        """Its runtime files."""
        return self._directory

    @property
    def shape(self) -> MachineShape:
        return MachineShape(self._record.vcpus, self._record.memory_mib)

    @property
    def network(self) -> NetworkAttachment:
        return NetworkAttachment(self._record.netns, self._record.tap, self._record.mac)

    async def restore(self, memory: MemoryImage, state: Path, disk: Path) -> None:
        """See ``Vm``. After an error the process is of no further use: kill it."""
        qmp, size = self._qmp, self._record.memory_mib << 20
        if self._record.memory is not None:
            raise VmmError(f"VM {self._id} has been restored or booted already.")
        self._record = replace(self._record, memory=str(memory.base))
        # All of this is on the wire before the first answer; QEMU runs it in order. The second half fails if the
        # first did, and the error that is raised is the first one.
        backend = qemu_command.memory_backend(memory.base, self._record.memory_mib)
        node = qmp.send("blockdev-add", qemu_command.disk_node(disk, qemu_command.ROOT_NODE, "qcow2"))
        added = qmp.send("object-add", backend)
        chosen = qmp.send(
            "qom-set",
            {"path": "/machine", "property": "memory-backend", "value": qemu_command.MEMORY_ID},
        )
        made = qmp.send("x-exit-preconfig")
        saved = self._blocking(self._record.write, self._directory)
        await qmp.result(node, "blockdev-add")
        await qmp.result(added, "object-add")
        # Guest RAM is mapped from here on: the delta goes in while QEMU builds the machine.
        injected = self._blocking(self._inject, memory, size)
        try:
            await qmp.result(chosen, "qom-set")
            await qmp.result(made, "x-exit-preconfig")
        finally:
            await asyncio.gather(injected, saved)
        # Loading checks virtio rings against guest RAM, so RAM must be complete before it.
        done = qmp.expect("MIGRATION", lambda data: data.get("status") in ("completed", "failed"))
        incoming = {"uri": f"file:{state}", "exit-on-error": False}
        await qmp.execute("migrate-incoming", incoming, STATE_TIMEOUT)
        event = await qmp.result(done, "loading the device state", STATE_TIMEOUT)
        if event["status"] == "failed":
            why = (await qmp.execute("query-migrate")).get("error-desc", "no reason given")
            raise VmmError(f"QEMU cannot load the device state {state}: {why}.")
        qmp.send("cont")  # its answer can wait for the emulator's first translation

    async def stop(self) -> None:
        self._held = True
        await self._qmp.execute("stop")
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    async def cont(self) -> None:
        # Sent, not awaited: under TCG the answer comes after the vCPU's first turn.
        future = self._qmp.send("cont")
        if future.done():
            await future
        self._held, self._stopped_at = False, None

    def _on_event(self, name: str, data: Mapping[str, Any]) -> None:
        """When the host's disk is full QEMU stops the VM and keeps the write. It runs on as soon as there is room."""
        if name == "BLOCK_IO_ERROR" and data.get("nospace") and data.get("action") == "stop" and self._retry is None:
            if not self._met_full_disk:
                log.error("the host's disk is full; the VM stands still until there is room", vm=self._id)
            self._met_full_disk = True
            self._retry = asyncio.get_running_loop().call_later(FULL_RETRY, self._try_again)

    def _try_again(self) -> None:
        self._retry = None
        if not self._held:
            self._qmp.send("cont")

    async def capture(self, state: Path, delta: Path) -> CaptureStats:
        began = self._stopped_at if self._stopped_at is not None else time.monotonic()
        temporary = state.with_name(f".{state.name}.{uuid.uuid4().hex[:8]}")
        try:
            try:
                # live=False: else QEMU inactivates the disks, as Xen wants it for a migration.
                arguments = {"filename": str(temporary), "live": False}
                await self._qmp.execute("xen-save-devices-state", arguments, STATE_TIMEOUT)
            except QmpCommandError as error:
                if await self._blocking(_is_full, state.parent):
                    raise CapacityError(f"No room left to write {state}.", "Free disk space.") from error
                raise
            captured, used = await self._blocking(self._capture, delta)
            state_bytes = temporary.stat().st_size
            temporary.replace(state)
        finally:
            temporary.unlink(missing_ok=True)
        return CaptureStats(captured.data, captured.zero, state_bytes, time.monotonic() - began, used)

    async def disk(self) -> Path:
        _, path = await self._root()
        return path

    async def rebase_disk(self, overlay: Path) -> None:
        node, current = await self._root()
        number = node.rpartition("-")[2]
        fresh = f"{qemu_command.ROOT_NODE}-{int(number) + 1 if number.isdigit() else 1}"
        await self._blocking(qcow2.create_overlay, overlay, current)
        try:
            # backing null: the running node becomes the backing, not a second open of the same file.
            add = self._qmp.send("blockdev-add", qemu_command.disk_node(overlay, fresh, "qcow2", backing=None))
            swap = self._qmp.send("blockdev-snapshot", {"node": node, "overlay": fresh})
            await self._qmp.result(add, "blockdev-add")
            await self._qmp.result(swap, "blockdev-snapshot")
        except VmmError:
            with contextlib.suppress(VmmError):
                await self._qmp.execute("blockdev-del", {"node-name": fresh})
            await self._blocking(overlay.unlink, True)
            raise

    async def replace_backing(self, backing: Path) -> None:
        node, current = await self._root()
        nodes = await self._qmp.execute("query-named-block-nodes", {"flat": True})
        names = [n["node-name"] for n in nodes if n["drv"] == "file" and n["file"] == str(current)]
        if len(names) != 1:
            raise VmmError(f"VM {self._id} has {len(names)} nodes for its root disk {current}.")
        fresh = f"{qemu_command.BACKING_NODE}-{uuid.uuid4().hex[:8]}"
        await self._qmp.execute("blockdev-add", qemu_command.backing_node(backing, fresh))
        try:
            options = qemu_command.disk_node(current, node, "qcow2", file=names[0], backing=fresh)
            await self._qmp.execute("blockdev-reopen", {"options": [options]})
        except VmmError:
            with contextlib.suppress(VmmError):
                await self._qmp.execute("blockdev-del", {"node-name": fresh})
            raise
        await self._drop_nodes({n["node-name"] for n in nodes if qemu_command.is_ours(n["node-name"])} - {node})
        arguments = {"device": node, "image-node-name": node, "backing-file": str(backing)}
        await self._qmp.execute("change-backing-file", arguments)

    async def grow_disk(self, size: int) -> None:
        node, _ = await self._root()
        await self._qmp.execute("block_resize", {"node-name": node, "size": size})

    async def reclaim(self) -> bool:
        return await self._blocking(lambda: reclaim.has_swap() and reclaim.page_out(self._mapped()))

    async def _drop_nodes(self, names: set[str]) -> None:
        """Close what is no longer in use. A node that was added by name stays open until told, with all below."""
        dropped = True
        while names and dropped:
            dropped = False
            for name in sorted(names):
                with contextlib.suppress(QmpCommandError):
                    await self._qmp.execute("blockdev-del", {"node-name": name})
                    names.discard(name)
                    dropped = True

    async def wait(self) -> int | None:
        return await self._process.wait()

    async def kill(self) -> None:
        self._qmp.close()
        self._process.send(signal.SIGKILL)
        await self._process.wait()
        await self._blocking(shutil.rmtree, self._directory, True)

    def detach(self) -> None:
        """Let go of the process without ending it, as a server does that stops; ``adopt`` finds it again."""
        self._qmp.close()

    def errors(self) -> str:
        """The end of what QEMU printed."""
        return _tail(self._directory / ERRORS)

    async def root_disk(self) -> Path:
        """The file that the guest's writes go to now."""
        return (await self._root())[1]

    async def _root(self) -> tuple[str, Path]:
        """Node name and file of the present root disk, as QEMU knows them."""
        for device in await self._qmp.execute("query-block"):
            inserted = device.get("inserted")
            if inserted and str(inserted.get("node-name", "")).startswith(qemu_command.ROOT_NODE):
                return inserted["node-name"], Path(inserted["file"])
        raise VmmError(f"VM {self._id} has no root disk.")

    def _mapped(self) -> ram.Mapping:
        if self._mapping is None:
            if self._record.memory is None:
                raise VmmError(f"VM {self._id} has no memory yet.")
            size = self._record.memory_mib << 20
            self._mapping = ram.find_mapping(self.pid, Path(self._record.memory), size)
        return self._mapping

    def _inject(self, image: MemoryImage, size: int) -> None:
        if image.delta is not None:
            self._mapping = ram.find_mapping(self.pid, image.base, size)
            ram.inject(self._mapping, image.delta)

    def _capture(self, delta: Path) -> tuple[ram.Captured, str]:
        mapping = self._mapped()
        used = hot.of_runs(*ram.touched_runs(mapping), ram.PAGE, mapping.size)
        assert self._record.memory is not None  # or there was no mapping
        return ram.capture(mapping, delta, ram.data_of(Path(self._record.memory))), hot.encode(used)

    def _blocking(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _is_full(directory: Path) -> bool:
    """QEMU's own words for a full disk depend on where it noticed; the filesystem knows."""
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize < 1 << 20 or stat.f_favail < 16


class QemuVmm:
    """QEMU as configured and probed on this node; ``aenv.vmm.probe.choose`` makes one."""

    def __init__(
        self,
        home: Path,
        runtime: Path,
        platform: qemu_command.Platform,
        fingerprint: Fingerprint,
        kernel: Path,
        initramfs: Path,
    ) -> None:
        self._home = home
        self._runtime = runtime
        self._platform = platform
        self._fingerprint = fingerprint
        self._kernel = kernel
        self._initramfs = initramfs
        # Blocking work is short and mostly in the kernel; a fork of 16 should not queue behind 4 captures.
        self._executor = ThreadPoolExecutor(max_workers=8, thread_name_prefix="vmm")

    @property
    def platform(self) -> qemu_command.Platform:
        return self._platform

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    async def spawn(self, vm_id: str, shape: MachineShape, network: NetworkAttachment) -> QemuVm:
        return await self._start(vm_id, shape, network, None)

    async def boot(
        self,
        vm_id: str,
        shape: MachineShape,
        network: NetworkAttachment,
        disk: Path,
        parameters: Mapping[str, str],
    ) -> QemuVm:
        memory = self._home / "vms" / vm_id / "memory"
        line = qemu_command.kernel_parameters(self._platform, parameters)
        source = qemu_command.BootSource(self._kernel, self._initramfs, line, memory, disk)
        return await self._start(vm_id, shape, network, source)

    async def adopt(self, vm_id: str) -> QemuVm | None:
        directory = self._directory(vm_id)
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
            qmp = await QmpClient.connect(directory / QMP_SOCKET, ADOPT_TIMEOUT)
        except VmmError as error:
            if proc.alive:
                log.error("ending a VM that cannot be taken over", vm=vm_id, pid=proc.pid, error=str(error))
                proc.send(signal.SIGKILL)
            await proc.wait()
            await self._blocking(self._sweep, vm_id)
            return None
        return QemuVm(vm_id, directory, self._console(vm_id), record, proc, qmp, self._executor)

    def known(self) -> list[str]:
        try:
            return sorted(entry.name for entry in (self._runtime / "vms").iterdir())
        except FileNotFoundError:
            return []

    def close(self) -> None:
        """End the worker threads. VMs are not touched."""
        self._executor.shutdown(wait=False)

    async def _start(
        self,
        vm_id: str,
        shape: MachineShape,
        network: NetworkAttachment,
        source: qemu_command.BootSource | None,
    ) -> QemuVm:
        directory = self._directory(vm_id)
        pid, console = await self._blocking(self._launch, vm_id, shape, network, source)
        proc = process.Process(pid)
        record = Record(
            pid, proc.start, shape.vcpus, shape.memory_mib, network.netns, network.tap, network.mac,
            str(source.memory) if source else None,
        )  # fmt: skip
        try:
            saved = self._blocking(record.write, directory)
            try:
                qmp = await QmpClient.connect(directory / QMP_SOCKET, LAUNCH_TIMEOUT)
            finally:
                await saved
            return QemuVm(vm_id, directory, console, record, proc, qmp, self._executor)
        except BaseException as error:
            proc.send(signal.SIGKILL)
            status = await proc.wait()
            said = await self._blocking(_tail, directory / ERRORS)
            await self._blocking(shutil.rmtree, directory, True)
            if isinstance(error, VmmError):
                raise VmmError(f"QEMU did not start (exit status {status}): {said or error.message}") from error
            raise

    def _launch(
        self,
        vm_id: str,
        shape: MachineShape,
        network: NetworkAttachment,
        source: qemu_command.BootSource | None,
    ) -> tuple[int, Path]:
        directory, console = self._directory(vm_id), self._console(vm_id)
        with disk_errors(directory), contextlib.ExitStack() as stack:
            try:
                directory.mkdir(parents=True)
            except FileExistsError as error:
                raise VmmError(f"VM {vm_id} exists already.") from error
            stack.callback(shutil.rmtree, directory, True)
            console.parent.mkdir(parents=True, exist_ok=True)
            if source is not None:
                with source.memory.open("xb") as file:
                    file.truncate(shape.memory_mib << 20)
            # QEMU inherits a listening socket: connecting needs no retries, and works again after a restart.
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(directory / QMP_SOCKET))
            listener.listen(1)
            # QEMU can be told twice of one connection; the second accept() must not wait for another.
            listener.setblocking(False)
            argv = qemu_command.command(self._platform, vm_id, shape, network, console, listener.fileno(), source)
            pid = process.launch(argv, network.netns, directory / ERRORS, [listener.fileno()])
            stack.pop_all()
            listener.close()
            return pid, console

    def _sweep(self, vm_id: str) -> None:
        """Remove what a VM left behind; also a process that started when the server died before noting its pid."""
        directory = self._directory(vm_id)
        if directory.exists():
            for pid in process.find_by_argument(qemu_command.process_name(vm_id)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)

    def _directory(self, vm_id: str) -> Path:
        return self._runtime / "vms" / vm_id

    def _console(self, vm_id: str) -> Path:
        return self._home / "vms" / vm_id / "console.log"

    def _blocking(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")[-2000:].strip()
    return ""
