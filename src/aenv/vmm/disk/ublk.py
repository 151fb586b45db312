"""Disks exported by ``aenv-blockd`` as ublk block devices (Linux 6.5 and newer with ``ublk_drv``).

One daemon per disk. When it dies the kernel keeps the device, and the requests that had no answer, until another
daemon takes over: the export starts one as soon as it sees that, or ``adopt`` does. What a guest has written is in
the page cache of the device first, so the device is synced before its file is frozen.
"""

import asyncio
import contextlib
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import structlog

from aenv.errors import CapacityError, VmmError
from aenv.storage import qcow2
from aenv.vmm import process
from aenv.vmm.disk import daemon
from aenv.vmm.disk.block_device import sync_device, tune_device
from aenv.vmm.disk.blockd import CONNECT_TIMEOUT, BlockdClient, BlockdRefusedError

log = structlog.get_logger()

KIND = "ublk"
CONTROL = Path("/dev/ublk-control")
PROBE_TIMEOUT = 20.0  # seconds


class UblkExport:
    """One exported disk. Made by ``UblkExporter`` only."""

    def __init__(
        self, name: str, directory: Path, program: Path, proc: process.Process, client: BlockdClient, path: Path
    ) -> None:
        self.path = path
        self._name = name
        self._directory = directory
        self._program = program
        self._process = proc
        self._client = client
        self._reviving = asyncio.Lock()
        self._closed = False
        self._watch = asyncio.create_task(self._keep())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def disk(self) -> Path:
        return Path((await self._ask({"do": "status"}))["disk"])

    async def rebase(self, overlay: Path) -> None:
        current = Path((await self._sync())["disk"])
        # To its end also if the caller gives up: the new file must not be removed while the daemon opens it.
        await asyncio.shield(asyncio.ensure_future(self._rebase(overlay, current)))

    async def _rebase(self, overlay: Path, current: Path) -> None:
        await asyncio.to_thread(qcow2.create_overlay, overlay, current)
        try:
            await self._ask({"do": "rebase", "overlay": str(overlay)})
        except VmmError:
            # The daemon notes the new file before it writes to it: what it noted is so, whether or not it said so.
            await self._settled()
            if await asyncio.to_thread(noted_disk, self._directory) != overlay:
                await asyncio.to_thread(overlay.unlink, True)
                raise

    async def _settled(self) -> None:
        """Until no daemon is at work on a command that has failed: it answers again, or is gone."""
        with contextlib.suppress(VmmError):
            await self._ask({"do": "status"})

    async def replace_backing(self, backing: Path) -> None:
        await self._ask({"do": "replace-backing", "backing": str(backing)})

    async def grow(self, size: int) -> None:
        await self._sync()  # it may become another device, which must see what this one holds
        await self._ask({"do": "grow", "size": size})
        before, self.path = self.path, Path((await self._ask({"do": "status"}))["path"])
        if self.path != before:
            tune_device(self.path)

    async def close(self) -> None:
        if self._closed:
            return
        try:
            await self._sync()
            await self._ask({"do": "close"})
        except (VmmError, CapacityError) as error:
            log.error("a disk could not be closed in order", disk=self._name, error=str(error))
            self._process.send(signal.SIGKILL)
        self._stop_watching()
        await daemon.end(self._process)
        await asyncio.to_thread(_remove, self._program, self._directory)

    def detach(self) -> None:
        """Let go of the daemon without ending it, as a server does that stops."""
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._closed = True
        self._watch.cancel()
        self._client.close()

    async def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._closed:
            raise VmmError(f"The disk of {self._name} is closed.")
        await self._revive()
        try:
            return await self._client.ask(command)
        except BlockdRefusedError:
            raise
        except VmmError:
            if self._process.alive and command["do"] != "close":
                self._process.send(signal.SIGKILL)  # it hangs; its successor starts from what it noted
            if command["do"] != "status":
                raise
            await self._process.wait()
            await self._revive()
            return await self._client.ask(command)

    async def _sync(self) -> dict[str, Any]:
        """Everything that was written to the devices has reached the daemon when this returns; its state before."""
        status = await self._ask({"do": "status"})
        if status["full"]:
            raise CapacityError("No room left on this host: writes of the guest are waiting.", "Free disk space.")
        for number in status["devices"]:
            await sync_device(Path(f"/dev/ublkb{number}"), self._full)
        return status

    async def _full(self) -> bool:
        return bool((await self._ask({"do": "status"}))["full"])

    async def _keep(self) -> None:
        """Start another daemon when this one dies."""
        while True:
            await self._process.wait()
            log.error("the daemon of a disk died; another takes over", disk=self._name)
            try:
                await self._revive()
            except VmmError as error:
                log.error("the guest's disk stands still: no daemon takes it over", disk=self._name, error=str(error))
                return

    async def _revive(self) -> None:
        """Make sure that a daemon serves the device and that it listens to us."""
        async with self._reviving:
            if not self._process.alive:
                self._process, self._client, _ = await _start(self._program, self._directory, None)
            elif not self._client.connected:
                self._client = await BlockdClient.connect(self._directory / daemon.SOCKET)


class UblkExporter:
    def __init__(self, program: Path) -> None:
        """``program`` is ``aenv-blockd``."""
        self._program = program

    async def export(self, name: str, disk: Path, directory: Path) -> UblkExport:
        try:
            proc, client, path = await _start(self._program, directory, disk)
        except BaseException:
            await asyncio.to_thread(_remove, self._program, directory)
            raise
        tune_device(path)
        return UblkExport(name, directory, self._program, proc, client, path)

    async def adopt(self, name: str, directory: Path) -> UblkExport | None:
        record = await asyncio.to_thread(daemon.Record.read, directory, KIND)
        if record is not None:
            try:
                with contextlib.suppress(ProcessLookupError):
                    proc = process.Process(record.pid, record.start)
                    try:
                        client = await BlockdClient.connect(directory / daemon.SOCKET)
                        status = await client.ask({"do": "status"})
                        return UblkExport(name, directory, self._program, proc, client, Path(status["path"]))
                    except VmmError:
                        proc.send(signal.SIGKILL)
                        await proc.wait()
                return UblkExport(name, directory, self._program, *await _start(self._program, directory, None))
            except VmmError as error:
                log.error("the daemon of a disk is gone and none takes it over", disk=name, error=str(error))
        await asyncio.to_thread(_remove, self._program, directory)
        return None


async def _start(program: Path, directory: Path, disk: Path | None) -> tuple[process.Process, BlockdClient, Path]:
    """Start a daemon for ``disk``, or one that takes over the devices of the last one; it answers already."""
    action = "recover" if disk is None else "serve"

    def argv(fd: int) -> list[str]:
        what = [] if disk is None else ["--disk", str(disk.absolute())]
        return [str(program), action, *what, "--state", str(directory / daemon.STATE), "--socket-fd", str(fd)]

    pid = await asyncio.to_thread(daemon.start, directory, argv)
    proc = process.Process(pid)
    try:
        await asyncio.to_thread(daemon.Record(KIND, pid, proc.start).write, directory)
        client = await BlockdClient.connect(directory / daemon.SOCKET)
        status = await client.ask({"do": "status"}, CONNECT_TIMEOUT)
        return proc, client, Path(status["path"])
    except BaseException as error:
        proc.send(signal.SIGKILL)
        code = await proc.wait()
        why = await asyncio.to_thread(daemon.said, directory)
        if isinstance(error, VmmError):
            message = f"{program.name} did not {action} {disk or directory} (exit status {code}): {why or error}"
            raise VmmError(message) from error
        raise


def noted_disk(directory: Path) -> Path | None:
    """The file that a daemon writes to, as it noted it; None when it noted nothing."""
    try:
        return Path(json.loads((directory / daemon.STATE).read_text())["disk"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def unavailable(program: Path) -> str | None:
    """Why ublk exports do not work here; None when they do. Makes a device and removes it."""
    if not CONTROL.exists():
        return f"this kernel has no {CONTROL} (modprobe ublk_drv)"
    try:
        probe = subprocess.run([program, "probe"], capture_output=True, text=True, timeout=PROBE_TIMEOUT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} cannot be run: {error}"
    return None if probe.returncode == 0 else probe.stderr.strip()


def _remove(program: Path, directory: Path) -> None:
    daemon.sweep(directory)
    if (directory / daemon.STATE).exists() or CONTROL.exists():
        with contextlib.suppress(OSError):
            subprocess.run([program, "sweep", "--state", directory / daemon.STATE], capture_output=True, check=False)
    for name in (daemon.STATE, Path(daemon.STATE).with_suffix(".new").name):
        (directory / name).unlink(missing_ok=True)
