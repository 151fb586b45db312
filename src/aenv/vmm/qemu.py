"""One VM in QEMU, driven over QMP. ``aenv.vmm.qemu_vmm`` makes them.

How it works, what was measured and which orders matter: ``docs/internals/vmm.md`` and ``memory-capture.md``.
"""

import asyncio
import shutil
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from aenv.errors import CapacityError, VmmError
from aenv.vmm import hot, process, qemu_command, qemu_files, reclaim
from aenv.vmm import memory as ram
from aenv.vmm.disk.qmp_disk import QmpDisk
from aenv.vmm.jail import Jail
from aenv.vmm.jail_root import Share
from aenv.vmm.protocol import CaptureStats, MemoryImage
from aenv.vmm.qemu_record import Record
from aenv.vmm.qmp import QmpClient, QmpCommandError
from aenv.vmm.vm_process import VmProcess

log = structlog.get_logger()

Sent = list[tuple["asyncio.Future[Any]", str]]  # commands that are under way, and their names
FULL_RETRY = 1.0  # seconds until a VM that met a full disk tries its write again
STATE_TIMEOUT = 60.0  # seconds for saving or loading device state; 1 ms on an idle host
MACHINE_TIMEOUT = 30.0  # seconds for making the machine; 5 ms on an idle host
ERRORS = "qemu.log"
STATE = "state"  # where QEMU writes device state, before it gets its name


class QemuVm(VmProcess[Record]):
    """One QEMU process. Made by ``QemuVmm`` only."""

    def __init__(
        self,
        vm_id: str,
        directory: Path,
        console: Path,
        record: Record,
        proc: process.Process,
        qmp: QmpClient,
        jail: Jail,
        layers: Sequence[Path],
        executor: ThreadPoolExecutor,
    ) -> None:
        """``layers``: the folders that hold layers of disks."""
        super().__init__(vm_id, directory, console, record, proc, executor)
        self._qmp = qmp
        self._jail = jail
        self._layers = layers
        self._disk = QmpDisk(qmp, self._root, f"VM {vm_id}", self._show)
        self._stopped_at: float | None = None
        self._held = False  # stopped by us, so that nothing but ``cont`` may let it run
        self._met_full_disk = False
        self._retry: asyncio.TimerHandle | None = None
        qmp.subscribe(self._on_event)
        self._mapping: ram.Mapping | None = None

    async def restore(self, memory: MemoryImage, state: Path, disk: Path) -> None:
        """See ``Vm``. After an error the process is of no further use: kill it."""
        qmp, size = self._qmp, self._record.memory_mib << 20
        if self._record.memory is not None:
            raise VmmError(f"VM {self._id} has been restored or booted already.")
        self._record = replace(self._record, memory=str(memory.base))
        loaded = await self._blocking(self._provide, memory.base, disk, [Share(state, copy=True)])
        mapped, made = self._make_machine(memory.base, disk)
        saved = self._blocking(self._record.write, self._directory)
        await self._answered(mapped)
        # Guest RAM is mapped from here on: the delta goes in while QEMU builds the machine.
        injected = self._blocking(self._inject, memory, size)
        try:
            await self._answered(made)
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
        self._run(loaded)

    async def boot(self, disk: Path, needed: Sequence[Path]) -> None:
        """Boot what the command line says, once, with the memory of the record. ``needed``: files that this reads."""
        assert self._record.memory is not None
        memory = Path(self._record.memory)
        loaded = await self._blocking(self._provide, memory, disk, [Share(path) for path in needed])
        mapped, made = self._make_machine(memory, disk)
        await self._answered(mapped + made)
        self._run(loaded)

    def _make_machine(self, memory: Path, disk: Path) -> tuple[Sent, Sent]:
        """What is answered when guest RAM is mapped, and what when the machine is there.

        All of it is on the wire before the first answer; QEMU runs it in order. The second half fails if the first
        did, and the error to be raised is the first one.
        """
        qmp = self._qmp
        node = qmp.send("blockdev-add", qemu_command.disk_node(disk, qemu_command.ROOT_NODE, "qcow2"))
        added = qmp.send("object-add", qemu_command.memory_backend(memory, self._record.memory_mib))
        chosen = qmp.send(
            "qom-set",
            {"path": "/machine", "property": "memory-backend", "value": qemu_command.MEMORY_ID},
        )
        built = qmp.send("x-exit-preconfig")
        return [(node, "blockdev-add"), (added, "object-add")], [(chosen, "qom-set"), (built, "x-exit-preconfig")]

    async def _answered(self, sent: Sent) -> None:
        for future, command in sent:
            await self._qmp.result(future, command, MACHINE_TIMEOUT)

    def _run(self, loaded: set[str]) -> None:
        """Let the guest run, and take from QEMU what it has read and needs no more, for which nobody waits."""
        self._qmp.send("cont")  # its answer can wait for the emulator's first translation
        self._tidy(self._jail.withdraw, loaded)

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
        written = self._directory / STATE
        temporary = state.with_name(f".{state.name}.{uuid.uuid4().hex[:8]}")
        try:
            try:
                # live=False: else QEMU inactivates the disks, as Xen wants it for a migration.
                arguments = {"filename": str(written), "live": False}
                await self._qmp.execute("xen-save-devices-state", arguments, STATE_TIMEOUT)
            except QmpCommandError as error:
                if await self._blocking(qemu_files.is_full, written.parent):
                    raise CapacityError(f"No room left to write {written}.", "Free disk space.") from error
                raise
            captured, used = await self._blocking(self._capture, delta)
            state_bytes = await self._blocking(qemu_files.keep_state, written, temporary)
            temporary.replace(state)
        finally:
            temporary.unlink(missing_ok=True)
        return CaptureStats(captured.data, captured.zero, state_bytes, time.monotonic() - began, used)

    async def disk(self) -> Path:
        return await self._disk.path()

    async def rebase_disk(self, overlay: Path) -> None:
        frozen = await self.disk()
        await self._disk.rebase(overlay)
        # QEMU reads it only, from here on. Whoever takes QEMU over must not change what others build on.
        await self._blocking(self._jail.provide, [Share(frozen)])

    async def replace_backing(self, backing: Path) -> None:
        await self._disk.replace_backing(backing)
        await self._blocking(self._withdraw_merged, await self.disk())

    async def grow_disk(self, size: int) -> None:
        await self._disk.grow(size)

    async def reclaim(self) -> bool:
        return await self._blocking(lambda: reclaim.has_swap() and reclaim.page_out(self._mapped()))

    async def kill(self) -> None:
        self._qmp.close()
        self._process.send(signal.SIGKILL)
        await self._process.wait()
        await self._tidied()
        await self._blocking(self._remove)

    def detach(self) -> None:
        """Let go of the process without ending it, as a server does that stops; ``adopt`` finds it again."""
        self._qmp.close()

    def errors(self) -> str:
        """The end of what QEMU printed."""
        return process.tail(self._directory / ERRORS)

    async def _root(self) -> tuple[str, Path]:
        """Node name and file of the present root disk, as QEMU knows them."""
        for device in await self._qmp.execute("query-block"):
            inserted = device.get("inserted")
            if inserted and str(inserted.get("node-name", "")).startswith(qemu_command.ROOT_NODE):
                if not self._jail.may_write(str(inserted["file"])):
                    raise VmmError(f"VM {self._id} names {inserted['file']} as its disk, which it was not given.")
                return inserted["node-name"], Path(inserted["file"])
        raise VmmError(f"VM {self._id} has no root disk.")

    def _mapped(self) -> ram.Mapping:
        if self._mapping is None:
            if self._record.memory is None:
                raise VmmError(f"VM {self._id} has no memory yet.")
            size = self._record.memory_mib << 20
            self._mapping = ram.find_mapping(self.pid, Path(self._record.memory), size)
        return self._mapping

    def _provide(self, memory: Path, disk: Path, needed: Sequence[Share]) -> set[str]:
        """Give QEMU the files of a machine; paths of those that it needs only to make it, firmware included."""
        firmware = self._jail.provided - {str(self._directory / STATE)}
        self._jail.provide([*qemu_files.disk_shares(disk, self._layers), Share(memory), *needed])
        return firmware | {share.path for share in needed}

    async def _show(self, path: Path, writable: bool) -> None:
        """Before QEMU opens a layer that is to be its disk, or below it."""
        if writable:
            await self._blocking(self._jail.provide, [Share(path, writable=True)])
        else:
            shares = await self._blocking(qemu_files.disk_shares, path, self._layers)
            await self._blocking(self._jail.provide, [Share(share.source) for share in shares])

    def _withdraw_merged(self, disk: Path) -> None:
        """Take away the layers that are below the disk no more."""
        keep = {share.path for share in qemu_files.disk_shares(disk, self._layers)}
        self._jail.withdraw(self._jail.provided - keep - {str(self._directory / STATE), str(self._record.memory)})

    def _remove(self) -> None:
        self._jail.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _inject(self, image: MemoryImage, size: int) -> None:
        if image.delta is not None:
            self._mapping = ram.find_mapping(self.pid, image.base, size)
            ram.inject(self._mapping, image.delta)

    def _capture(self, delta: Path) -> tuple[ram.Captured, str]:
        mapping = self._mapped()
        used = hot.of_runs(*ram.touched_runs(mapping), ram.PAGE, mapping.size)
        assert self._record.memory is not None  # or there was no mapping
        return ram.capture(mapping, delta, ram.data_of(Path(self._record.memory))), hot.encode(used)
