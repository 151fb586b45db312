"""Disks exported by ``qemu-storage-daemon`` as a raw file through FUSE: works on every kernel that has FUSE.

One daemon per disk. The block layer and the live operations are QEMU's own, as where QEMU runs the guest; only a
mounted file is between. See ``docs/internals/disk-exports.md`` for figures and for what FUSE costs.
"""

import asyncio
import contextlib
import ctypes
import functools
import json
import os
import shutil
import signal
import socket
from pathlib import Path

import structlog

from aenv.errors import VmmError
from aenv.vmm import process, qemu_command
from aenv.vmm.disk import daemon
from aenv.vmm.disk.qmp_disk import QmpDisk
from aenv.vmm.qmp import QmpClient

log = structlog.get_logger()
_libc = ctypes.CDLL(None, use_errno=True)

KIND = "fuse"
PROGRAM = "qemu-storage-daemon"
MOUNT_POINT = "disk.raw"
AT_FDCWD, AT_STATX_FORCE_SYNC, STATX_SIZE = -100, 0x2000, 0x200  # linux/fcntl.h, linux/stat.h
CONNECT_TIMEOUT = 30.0  # seconds until a daemon answers; 25 ms on an idle host


def command(program: str, disk: Path, directory: Path, qmp_fd: int, control_fd: int) -> list[str]:
    """The daemon's command line. Pure. Why two sockets: ``qemu_command.command``.

    ``allow-other``: the VMM runs as another user. ``iothread``: requests are handled off the monitor's thread; a
    quarter more random writes. ``growable=off``: nobody but ``DiskExport.grow`` makes it larger.
    """
    export = (
        f"type=fuse,id=disk,node-name={qemu_command.ROOT_NODE},iothread=io,writable=on,growable=off,allow-other=on,"
        f"mountpoint={qemu_command.escape(directory / MOUNT_POINT)}"
    )
    return [
        program,
        "--chardev", f"socket,id=qmp,fd={qmp_fd},server=on,wait=off",
        "--monitor", "chardev=qmp,mode=control",
        "--chardev", f"socket,id=control,fd={control_fd}",
        "--monitor", "chardev=control,mode=control",
        "--object", "iothread,id=io",
        "--blockdev", json.dumps(qemu_command.disk_node(disk, qemu_command.ROOT_NODE, "qcow2")),
        "--export", export,
        "--pidfile", str(directory / daemon.PID),
    ]  # fmt: skip


class FuseExport:
    """One exported disk. Made by ``FuseExporter`` only."""

    def __init__(self, name: str, directory: Path, proc: process.Process, qmp: QmpClient) -> None:
        self.path = directory / MOUNT_POINT
        self._directory = directory
        self._process = proc
        self._qmp = qmp
        self._disk = QmpDisk(qmp, self._root, f"The disk of {name}")

    @property
    def pid(self) -> int:
        return self._process.pid

    async def disk(self) -> Path:
        return await self._disk.path()

    async def rebase(self, overlay: Path) -> None:
        # FUSE without a write-back cache: what a VMM has written has reached the daemon.
        await self._disk.rebase(overlay)

    async def replace_backing(self, backing: Path) -> None:
        await self._disk.replace_backing(backing)

    async def grow(self, size: int) -> None:
        await self._disk.grow(size)
        await asyncio.to_thread(_ask_for_size, self.path)

    async def close(self) -> None:
        with contextlib.suppress(VmmError):
            await self._qmp.execute("quit")
        await daemon.end(self._process)
        self._qmp.close()
        await asyncio.to_thread(_remove, self._directory)

    def detach(self) -> None:
        """Let go of the daemon without ending it, as a server does that stops."""
        self._qmp.close()

    async def _root(self) -> tuple[str, Path]:
        exports, nodes = await asyncio.gather(
            self._qmp.execute("query-block-exports"),
            self._qmp.execute("query-named-block-nodes", {"flat": True}),
        )
        for export in exports:
            for node in nodes:
                if export["id"] == "disk" and node["node-name"] == export["node-name"]:
                    return node["node-name"], Path(node["file"])
        raise VmmError(f"{self._directory} has no exported disk.")


class FuseExporter:
    def __init__(self, program: str = PROGRAM) -> None:
        self._program = program

    async def export(self, name: str, disk: Path, directory: Path) -> FuseExport:
        pid, control = await asyncio.to_thread(self._start, disk, directory)
        proc = process.Process(pid)
        try:
            await asyncio.to_thread(daemon.Record(KIND, pid, proc.start).write, directory)
            # It answers when the disk is open and mounted, or ends.
            qmp = await QmpClient.over(control, CONNECT_TIMEOUT)
            return FuseExport(name, directory, proc, qmp)
        except BaseException as error:
            control.close()
            proc.send(signal.SIGKILL)
            status = await proc.wait()
            why = await asyncio.to_thread(daemon.said, directory)
            await asyncio.to_thread(_remove, directory)
            if isinstance(error, VmmError):
                message = f"{self._program} did not export {disk} (exit status {status}): {why or error.message}"
                raise VmmError(message) from error
            raise

    async def adopt(self, name: str, directory: Path) -> FuseExport | None:
        record = await asyncio.to_thread(daemon.Record.read, directory, KIND)
        if record is not None:
            with contextlib.suppress(ProcessLookupError):
                proc = process.Process(record.pid, record.start)
                try:
                    return FuseExport(name, directory, proc, await QmpClient.connect(directory / daemon.SOCKET))
                except VmmError as error:
                    log.error("ending a disk's daemon that cannot be taken over", disk=name, error=str(error))
                    proc.send(signal.SIGKILL)
                    await proc.wait()
        await asyncio.to_thread(_remove, directory)
        return None

    def _start(self, disk: Path, directory: Path) -> tuple[int, socket.socket]:
        (directory / MOUNT_POINT).touch()
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        with theirs:
            try:
                argv = functools.partial(command, self._program, disk, directory, control_fd=theirs.fileno())
                return daemon.start(directory, argv, [theirs.fileno()]), ours
            except BaseException:
                ours.close()
                raise


def unavailable(program: str = PROGRAM) -> str | None:
    """Why FUSE exports do not work here; None when they do."""
    if shutil.which(program) is None:
        return f"{program} is not installed"
    if not Path("/dev/fuse").exists():
        return "this kernel has no /dev/fuse"
    return None


def _ask_for_size(path: Path) -> None:
    """The kernel believes for a second what it knows of a FUSE file; whoever opens it would find the old size."""
    answer = ctypes.create_string_buffer(256)  # struct statx, statx(2)
    if _libc.statx(AT_FDCWD, os.fsencode(path), AT_STATX_FORCE_SYNC, STATX_SIZE, answer):
        raise VmmError(f"{path} does not say how large it is: {os.strerror(ctypes.get_errno())}.")


def _remove(directory: Path) -> None:
    daemon.sweep(directory)
    daemon.detach_mount(directory / MOUNT_POINT)
    (directory / MOUNT_POINT).unlink(missing_ok=True)
