"""One Firecracker process and its guest. How it works, and what was measured: ``docs/internals/firecracker.md``."""

import asyncio
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from aenv.errors import CapacityError, VmmError
from aenv.storage.lsmt import disk_errors
from aenv.vmm import hot, process, reclaim
from aenv.vmm import memory as ram
from aenv.vmm.disk.protocol import DiskExport, DiskExporter
from aenv.vmm.firecracker import guest_memory, requests
from aenv.vmm.firecracker.api import FirecrackerApi, FirecrackerApiError
from aenv.vmm.firecracker.cell import ERRORS, LOG, Cell
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.firecracker.record import Record
from aenv.vmm.protocol import CaptureStats, MachineShape, MemoryImage, NetworkAttachment

T = TypeVar("T")
STATE_TIMEOUT = 60.0  # seconds for saving or loading device state; some ms on an idle host
# Firecracker writes device state before it opens the file for memory (``create_snapshot``), so this fault means that
# the state is whole.
STATE_ONLY = "open on the memory backing file"
NO_DATA = (np.zeros(0, np.uint64), np.zeros(0, np.uint64))  # of a booted VM's base, which is nothing


@runtime_checkable
class Detachable(Protocol):
    """An export that holds a connection to its daemon."""

    def detach(self) -> None: ...


class FirecrackerVm:
    """Made by ``FirecrackerVmm`` only."""

    def __init__(
        self,
        vm_id: str,
        directory: Path,
        console: Path,
        record: Record,
        proc: process.Process,
        api: FirecrackerApi,
        cell: Cell,
        exporter: DiskExporter,
        export: DiskExport | None,
        options: FirecrackerOptions,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._id = vm_id
        self._directory = directory
        self._console = console
        self._record = record
        self._process = proc
        self._api = api
        self._cell = cell
        self._exporter = exporter
        self._export = export
        self._options = options
        self._executor = executor
        self._stopped_at: float | None = None

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
        return self._record.shape

    @property
    def network(self) -> NetworkAttachment:
        return self._record.network

    async def boot(self, line: str, kernel: Path, initramfs: Path, disk: Path) -> None:
        """Start the kernel in a freshly spawned process. After an error the process is of no further use."""
        files = {requests.KERNEL: kernel, requests.INITRAMFS: initramfs}
        await asyncio.gather(self._plug_in(disk), self._blocking(self._cell.provide, files))
        made = requests.boot(line, self.shape, self.network, self._options)
        await self._api.send_all(made, STATE_TIMEOUT)
        await self._blocking(self._note_booted, line)
        await self._blocking(self._cell.withdraw, list(files))

    async def restore(self, memory: MemoryImage, state: Path, disk: Path) -> None:
        """See ``Vm``. After an error the process is of no further use: kill it."""
        files = {requests.MEMORY: memory.base, requests.STATE: state}
        await asyncio.gather(self._plug_in(disk), self._blocking(self._cell.provide, files))
        await self._api.send(requests.load(self.network), STATE_TIMEOUT)
        # Nothing of the guest has run, and loading has read nothing of its memory.
        limited = asyncio.create_task(self._api.send_all(requests.limits(self._options)))
        try:
            await self._blocking(self._fill, memory)
        finally:
            await asyncio.gather(limited, return_exceptions=True)
        await limited
        await self._api.send(requests.run(True))
        await self._blocking(self._cell.withdraw, list(files))

    async def stop(self) -> None:
        await self._api.send(requests.run(False))
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    async def cont(self) -> None:
        await self._api.send(requests.run(True))
        self._stopped_at = None

    async def capture(self, state: Path, delta: Path) -> CaptureStats:
        began = self._stopped_at if self._stopped_at is not None else time.monotonic()
        # State first: devices finish what they are at, which may be in guest memory.
        await self._save_state()
        captured, used = await self._blocking(self._capture, delta)
        state_bytes = await self._blocking(self._keep_state, state)
        return CaptureStats(captured.data, captured.zero, state_bytes, time.monotonic() - began, used)

    async def disk(self) -> Path:
        return await self._disk().disk()

    async def rebase_disk(self, overlay: Path) -> None:
        await self._disk().rebase(overlay)

    async def replace_backing(self, backing: Path) -> None:
        await self._disk().replace_backing(backing)

    async def grow_disk(self, size: int) -> None:
        export = self._disk()
        await export.grow(size)
        await self._blocking(self._give_disk, export.path)  # it may be another one now
        await self._api.send(requests.reopen_drive())

    async def reclaim(self) -> bool:
        return await self._blocking(self._reclaim)

    async def wait(self) -> int | None:
        return await self._process.wait()

    async def kill(self) -> None:
        self._api.close()
        self._process.send(signal.SIGKILL)
        await self._process.wait()
        if self._export is not None:
            await self._export.close()
            self._export = None
        await self._blocking(self._cell.close)
        await self._blocking(shutil.rmtree, self._directory, True)

    async def configuration(self) -> Any:
        """What Firecracker says the VM consists of: ``FullVmConfiguration`` of its API."""
        return await self._api.send(requests.configuration())

    def detach(self) -> None:
        """Let go of the process without ending it, as a server does that stops; ``adopt`` finds it again."""
        self._api.close()
        if isinstance(self._export, Detachable):
            self._export.detach()

    def errors(self) -> str:
        """The end of what Firecracker logged, or printed."""
        return _tail(self._directory / LOG) or _tail(self._directory / ERRORS)

    async def _plug_in(self, disk: Path) -> None:
        if self._record.disk:
            raise VmmError(f"VM {self._id} has been restored or booted already.")
        self._record = replace(self._record, disk=True)
        await self._blocking(self._record.write, self._directory)
        self._export = await self._exporter.export(self._id, disk, self._directory)
        await self._blocking(self._give_disk, self._export.path)

    def _give_disk(self, path: Path) -> None:
        self._cell.provide({requests.DISK: path}, writable=True)

    def _disk(self) -> DiskExport:
        if self._export is None:
            raise VmmError(f"VM {self._id} has no root disk.")
        return self._export

    def _note_booted(self, line: str) -> None:
        found = guest_memory.find_anonymous(self.pid, line, self._record.memory_mib << 20)
        self._note(found, None)

    def _fill(self, image: MemoryImage) -> None:
        pieces = guest_memory.find_mapped(self.pid, image.base, self._record.memory_mib << 20)
        if image.delta is not None:
            fresh = guest_memory.fresh(pieces, image.base)
            ram.inject_pieces(pieces, image.delta)
            fresh.write()
        self._note(pieces, image.base)

    def _note(self, pieces: list[ram.Mapping], base: Path | None) -> None:
        places = [(piece.start, piece.size, piece.offset) for piece in pieces]
        self._record = replace(self._record, base=str(base) if base else None, pieces=places)
        self._record.write(self._directory)

    def _pieces(self) -> list[ram.Mapping]:
        if not self._record.pieces:
            raise VmmError(f"VM {self._id} has no memory yet.")
        return self._record.mappings

    async def _save_state(self) -> None:
        save = self._directory / requests.SAVE
        await self._blocking(os.truncate, save, 0)
        try:
            await self._api.send(requests.save(requests.SAVE, requests.NOWHERE), STATE_TIMEOUT)
        except FirecrackerApiError as error:
            written = await self._blocking(lambda: save.stat().st_size)
            if STATE_ONLY in error.fault and written:
                return
            if await self._blocking(_is_full, self._directory):
                raise CapacityError(f"No room left to write {save}.", "Free disk space.") from error
            raise
        raise VmmError("Firecracker wrote memory to a file that cannot exist.", "Use a supported release.")

    def _keep_state(self, state: Path) -> int:
        temporary = state.with_name(f".{state.name}.{uuid.uuid4().hex[:8]}")
        try:
            with disk_errors(state):
                shutil.copyfile(self._directory / requests.SAVE, temporary)
                temporary.replace(state)
        finally:
            temporary.unlink(missing_ok=True)
        return state.stat().st_size

    def _capture(self, delta: Path) -> tuple[ram.Captured, str]:
        pieces = self._pieces()
        size = self._record.memory_mib << 20
        touched = [ram.touched_runs(piece) for piece in pieces]
        first, length = (np.concatenate([runs[i] for runs in touched]) for i in range(2))
        used = hot.of_runs(first, length, ram.PAGE, size)
        if self._record.base is None:
            return ram.capture_pieces(pieces, delta, NO_DATA), hot.encode(used)
        data = ram.data_of(Path(self._record.base))
        return ram.capture_pieces(pieces, delta, data, guest_memory.cleared(pieces)), hot.encode(used)

    def _reclaim(self) -> bool:
        return reclaim.has_swap() and all(reclaim.page_out(piece) for piece in self._pieces())

    def _blocking(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)


def _is_full(directory: Path) -> bool:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize < 1 << 20 or stat.f_favail < 16


def _tail(path: Path) -> str:
    try:
        return path.read_text(errors="replace")[-2000:].strip()
    except OSError:
        return ""
