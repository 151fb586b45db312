"""Firecracker by hand: started in a folder, and asked over its socket as one would with curl. No platform code.

Only the requests that make the machine come from the platform: a snapshot loads into the same virtual hardware alone.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aenv.vmm import qemu_command
from aenv.vmm.firecracker import requests
from aenv.vmm.firecracker.options import FirecrackerOptions
from aenv.vmm.firecracker.requests import Request
from aenv.vmm.protocol import MachineShape, NetworkAttachment
from bench.by_hand import RawSnapshot, new_overlay, snapshot_of_disk

TIMEOUT = 300.0  # seconds for one answer


class RawFirecracker:
    """One Firecracker process that waits. ``folder`` is its own."""

    def __init__(self, binary: str, folder: Path, shape: MachineShape, network: NetworkAttachment) -> None:
        (folder / "dev").mkdir(parents=True)
        self.folder = folder
        self.shape = shape
        self.network = network
        self._daemon: int | None = None
        with (folder / "console").open("wb") as console:
            self.process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{network.netns}", binary, "--api-sock", "api.sock", "--level", "Warn"],
                cwd=folder, stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
            )  # fmt: skip
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT)
        while True:
            try:
                self._socket.connect(str(folder / "api.sock"))
                return
            except OSError:
                assert self.process.poll() is None, (folder / "console").read_text()[-1000:]
                time.sleep(0.001)

    def ask(self, method: str, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
        self._socket.sendall(head.encode() + content)
        answer = self._socket.recv(65536)
        assert answer.split()[1] in (b"200", b"204"), (method, path, answer)

    def boot(self, kernel: Path, initramfs: Path, line: str, disk: Path) -> None:
        self._export(disk)
        (self.folder / requests.KERNEL).symlink_to(kernel)
        (self.folder / requests.INITRAMFS).symlink_to(initramfs)
        self._ask_all(requests.boot(line, self.shape, self.network, FirecrackerOptions()))

    def restore(self, snapshot: RawSnapshot) -> None:
        """A new overlay, exported as a file, and the snapshot loaded with it and running."""
        self.disk = self.folder / "disk.qcow2"
        new_overlay(self.disk, snapshot.disk)
        self._export(self.disk)
        body = {
            "snapshot_path": str(snapshot.state),
            "mem_backend": {"backend_type": "File", "backend_path": str(snapshot.memory)},
            "track_dirty_pages": True,
            "resume_vm": True,
            "network_overrides": [{"iface_id": requests.NETWORK_CARD, "host_dev_name": self.network.tap}],
        }
        self.ask("PUT", "/snapshot/load", body)

    def capture(self, state: Path, delta: Path) -> None:
        """Pause, and Firecracker's own ``Diff`` snapshot; it does not run afterwards."""
        self.ask("PATCH", "/vm", {"state": "Paused"})
        body = {"snapshot_type": "Diff", "snapshot_path": str(state), "mem_file_path": str(delta)}
        self.ask("PUT", "/snapshot/create", body)

    def freeze_disk(self) -> Path:
        """Go on with a new overlay; the file that is frozen now."""
        frozen, self.disk = self.disk, self.folder / "next.qcow2"
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(str(self.folder / "disk.sock"))
            lines = link.makefile("rb")
            lines.readline()
            for command, arguments in (
                ("qmp_capabilities", {}),
                ("blockdev-snapshot-sync", snapshot_of_disk(self.disk)),
            ):
                link.sendall(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
                while "return" not in (answer := json.loads(lines.readline())):
                    assert "error" not in answer, answer
        return frozen

    def resume(self) -> None:
        self.ask("PATCH", "/vm", {"state": "Resumed"})

    def kill(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()
        if self._daemon is not None:
            os.kill(self._daemon, signal.SIGTERM)
            while Path(f"/proc/{self._daemon}").exists():
                time.sleep(0.001)

    def _ask_all(self, wanted: Sequence[Request]) -> None:
        for request in wanted:
            self.ask(request.method, request.path, dict(request.body or {}))

    def _export(self, disk: Path) -> None:
        """A qcow2 disk as a raw file, where the snapshot says that it is; ready when the command returns."""
        mounted, pid = self.folder / requests.DISK, self.folder / "daemon.pid"
        mounted.touch()
        subprocess.run(
            [
                "qemu-storage-daemon", "--daemonize", "--pidfile", pid,
                "--chardev", f"socket,id=qmp,path={self.folder / 'disk.sock'},server=on,wait=off",
                "--monitor", "chardev=qmp,mode=control",
                "--blockdev", json.dumps(qemu_command.disk_node(disk, qemu_command.ROOT_NODE, "qcow2")),
                "--export", f"type=fuse,id=disk,node-name={qemu_command.ROOT_NODE},writable=on,mountpoint={mounted}",
            ],
            check=True,
        )  # fmt: skip
        self._daemon = int(pid.read_text())
