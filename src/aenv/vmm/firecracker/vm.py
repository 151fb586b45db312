"""One Firecracker process and its guest. How it works, and what was measured: ``docs/internals/firecracker.md``."""

import asyncio
import shutil
import signal
import time
import uuid
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from aenv.errors import VmmError
from aenv.storage.lsmt import disk_errors
from aenv.vmm import hot, process, reclaim
from aenv.vmm import memory as ram
from aenv.vmm.disk.protocol import DiskExport, DiskExporter
from aenv.vmm.firecracker import guest_memory, requests
from aenv.vmm.firecracker.api import FirecrackerApi, FirecrackerApiError
from aenv.vmm.firecracker.cell import ERRORS, LOG, Cell
from aenv.vmm.firecracker.gate import OpenGate, StatePipe
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.firecracker.record import Record
from aenv.vmm.protocol import CaptureStats, MemoryImage
from aenv.vmm.vm_process import VmProcess

STATE_TIMEOUT = 60.0  # seconds for saving or loading device state; some ms on an idle host
HELD_TIMEOUT = 3600.0  # seconds for a request that is held while memory is read or written
# The fault when device state was written whole, to a pipe, which cannot be synced (``snapshot_state_to_file``).
STATE_WRITTEN = "sync_all on the snapshot backing file"
NO_DATA = (np.zeros(0, np.uint64), np.zeros(0, np.uint64))  # of a booted VM's base, which is nothing


@runtime_checkable
class Detachable(Protocol):
    """An export that holds a connection to its daemon."""

    def detach(self) -> None: ...


class FirecrackerVm(VmProcess[Record]):
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
        super().__init__(vm_id, directory, console, record, proc, executor)
        self._api = api
        self._cell = cell
        self._exporter = exporter
        self._export = export
        self._options = options
        self._stopped_at: float | None = None

    async def boot(self, line: str, kernel: Path, initramfs: Path, disk: Path) -> None:
        """Start the kernel in a freshly spawned process. After an error the process is of no further use."""
        files = {requests.KERNEL: kernel, requests.INITRAMFS: initramfs}
        await self._furnish(disk, files)
        made = requests.boot(line, self.shape, self.network, self._options)
        await self._api.send_all(made, STATE_TIMEOUT)
        await self._blocking(self._note_booted, line)
        self._tidy(self._cell.withdraw, list(files))  # read, and needed no more

    async def restore(self, memory: MemoryImage, state: Path, disk: Path) -> None:
        """See ``Vm``. After an error the process is of no further use: kill it."""
        files = {requests.MEMORY: memory.base, requests.STATE: state}
        await self._furnish(disk, files)
        if memory.delta is None:
            await self._api.send(requests.load(self.network), STATE_TIMEOUT)
            await self._blocking(self._fill, memory)
        else:
            await self._load_held(memory)
        last = [*requests.limits(self._options), requests.run(True)]
        await self._api.send_all(last)
        self._tidy(self._cell.withdraw, list(files))  # read, and needed no more

    async def stop(self) -> None:
        await self._api.send(requests.run(False))
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()

    async def cont(self) -> None:
        await self._api.send(requests.run(True))
        self._stopped_at = None

    async def capture(self, state: Path, delta: Path) -> CaptureStats:
        taking = asyncio.create_task(self._take(state, delta))
        try:
            return await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.gather(taking, return_exceptions=True)  # Firecracker is held until its state is read
            raise

    async def _take(self, state: Path, delta: Path) -> CaptureStats:
        began = self._stopped_at if self._stopped_at is not None else time.monotonic()
        pipe = await self._blocking(StatePipe, self._directory / requests.SAVE)
        saving = asyncio.create_task(self._api.send(requests.save_state(), HELD_TIMEOUT))
        try:
            await _first(pipe.started(), saving)
            # Firecracker has taken the state, and waits until it is read: memory is of the same moment.
            try:
                captured, used = await self._blocking(self._capture, delta)
            finally:
                content = await self._blocking(pipe.read)
            await self._saved(saving)
            await self._blocking(_write, state, content)
        finally:
            pipe.close()
            saving.cancel()
            await asyncio.gather(saving, return_exceptions=True)
        return CaptureStats(captured.data, captured.zero, len(content), time.monotonic() - began, used)

    async def disk(self) -> Path:
        return await self._disk().disk()

    async def rebase_disk(self, overlay: Path) -> None:
        await self._disk().rebase(overlay)

    async def replace_backing(self, backing: Path) -> None:
        await self._disk().replace_backing(backing)

    async def grow_disk(self, size: int) -> None:
        export = self._disk()
        # It may be another device afterwards, and nothing is to be written to the old one meanwhile.
        running = (await self._api.send(requests.describe()))["state"] == requests.RUNNING
        if running:
            await self._api.send(requests.run(False))
        try:
            await export.grow(size)
            await self._blocking(self._give_disk, export.path)
            await self._api.send(requests.reopen_drive())
        finally:
            if running:
                await self._api.send(requests.run(True))

    async def reclaim(self) -> bool:
        return await self._blocking(self._reclaim)

    async def kill(self) -> None:
        self._api.close()
        self._process.send(signal.SIGKILL)
        await self._process.wait()
        await self._tidied()
        try:
            if self._export is not None:
                await self._export.close()
                self._export = None
        finally:
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
        return process.tail(self._directory / LOG) or process.tail(self._directory / ERRORS)

    async def _furnish(self, disk: Path, files: Mapping[str, Path]) -> None:
        """Disk and files side by side; an error of one is raised when the other has come to its end too."""
        given = asyncio.gather(
            self._plug_in(disk), self._blocking(self._cell.provide, files), return_exceptions=True
        )  # fmt: skip
        for error in await given:
            if error is not None:
                raise error

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
            ram.inject_pieces(pieces, image.delta)
        self._note(pieces, image.base)

    def _note(self, pieces: list[ram.Mapping], base: Path | None) -> None:
        places = [(piece.start, piece.size, piece.offset) for piece in pieces]
        self._record = replace(self._record, base=str(base) if base else None, pieces=places)
        self._record.write(self._directory)

    def _pieces(self) -> list[ram.Mapping]:
        if not self._record.pieces:
            raise VmmError(f"VM {self._id} has no memory yet.")
        return self._record.mappings

    async def _load_held(self, memory: MemoryImage) -> None:
        """Load, and put the delta into memory before there is a device that uses it."""
        gate = OpenGate(self._cell.outside(requests.CONSOLE, self.pid), self.pid)
        loading = asyncio.create_task(self._api.send(requests.load(self.network), HELD_TIMEOUT))
        try:
            await _first(gate.reached(), loading)
            filled = self._blocking(self._fill, memory)
            try:
                await asyncio.shield(filled)
            finally:
                await asyncio.gather(filled, return_exceptions=True)  # also when the caller gives up
            gate.close()
            await loading
        finally:
            gate.close()
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)

    async def _saved(self, saving: asyncio.Task[Any]) -> None:
        try:
            await saving
        except FirecrackerApiError as error:
            if STATE_WRITTEN in error.fault:
                return
            raise
        raise VmmError("Firecracker synced a pipe.", "Use a supported release.")

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


async def _first(event: Coroutine[Any, Any, None], request: asyncio.Task[Any]) -> None:
    """Wait for ``event`` while ``request`` is on its way. Raises what the request raises, should it end before."""
    waiting = asyncio.create_task(event)
    try:
        await asyncio.wait({waiting, request}, timeout=STATE_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            if not request.done():
                raise VmmError(f"Firecracker did not take or load device state within {STATE_TIMEOUT:g} s.")
            request.result()
            raise VmmError("Firecracker did not do what its release does.", "Use a supported release.")
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


def _write(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        with disk_errors(path):
            temporary.write_bytes(content)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
