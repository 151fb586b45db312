"""The raw operations, by hand: QEMU started and driven over QMP with plain blocking sockets, no platform code.

Only the command line comes from the platform (a snapshot loads into the same virtual hardware alone), and the network
namespaces, whose making is not timed, and where a sparse file has data.
"""

import itertools
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aenv.vmm import qemu_command
from aenv.vmm.memory import data_of
from aenv.vmm.protocol import MachineShape, NetworkAttachment

PAGE = 4096
# A pagemap entry (Documentation/admin-guide/mm/pagemap.rst): bit 61 says file page or shared, 62 swapped, 63 present.
_PRESENT, _SWAPPED, _FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


@dataclass(frozen=True)
class RawSnapshot:
    """Files of a snapshot: whole memory, device state, and the disk to put an overlay on."""

    memory: Path
    state: Path
    disk: Path


class RawVm:
    """One QEMU process that waits, for a snapshot or to boot a kernel."""

    def __init__(
        self,
        platform: qemu_command.Platform,
        folder: Path,
        name: str,
        shape: MachineShape,
        network: NetworkAttachment,
        boot: qemu_command.BootSource | None = None,
    ) -> None:
        self.folder = folder
        self.shape = shape
        self._name = name
        listener = socket.socket(socket.AF_UNIX)
        path = folder / f"{name}.sock"
        listener.bind(str(path))
        listener.listen(1)
        listener.setblocking(False)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX)
        self._socket.settimeout(30)
        with listener, theirs:
            argv = qemu_command.command(
                platform, name, shape, network, folder / f"{name}.console", listener.fileno(), boot,
                control_fd=theirs.fileno(),
            )  # fmt: skip
            self.process = subprocess.Popen(
                ["nsenter", f"--net=/run/netns/{network.netns}", *argv],
                pass_fds=[listener.fileno(), theirs.fileno()],
                start_new_session=True,
            )
        self._lines = self._socket.makefile("rb")
        self._number = 0
        self._next()
        self.ask("qmp_capabilities")

    def _next(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, "QEMU closed its QMP socket"
        message: dict[str, Any] = json.loads(line)
        return message

    def ask(self, command: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        number = self.tell(command, arguments)
        while (message := self._next()).get("id") != number:
            pass
        assert "error" not in message, message
        return message

    def tell(self, command: str, arguments: dict[str, Any] | None = None) -> int:
        self._number += 1
        request = {"execute": command, "arguments": arguments or {}, "id": self._number}
        self._socket.sendall(json.dumps(request).encode() + b"\n")
        return self._number

    def restore(self, snapshot: RawSnapshot) -> None:
        """The sequence of docs/internals/vmm.md, until the virtual CPU has been told to run."""
        self.disk = self.folder / f"{self._name}.qcow2"
        new_overlay(self.disk, snapshot.disk)
        self._make_machine(self.disk, snapshot.memory)
        self.tell("migrate-incoming", {"uri": f"file:{snapshot.state}"})
        while (status := self._next().get("data", {}).get("status")) != "completed":
            assert status != "failed", f"{snapshot.state} does not load"
        self.tell("cont")

    def boot(self, disk: Path, memory: Path) -> None:
        """Let it boot on ``disk``, with ``memory`` as its memory, which is made as an empty file."""
        with memory.open("wb") as file:
            file.truncate(self.shape.memory_mib << 20)
        self._make_machine(disk, memory)
        self.tell("cont")

    def _make_machine(self, disk: Path, memory: Path) -> None:
        self.ask("blockdev-add", qemu_command.disk_node(disk, qemu_command.ROOT_NODE, "qcow2"))
        self.ask("object-add", qemu_command.memory_backend(memory, self.shape.memory_mib))
        self.ask("qom-set", {"path": "/machine", "property": "memory-backend", "value": qemu_command.MEMORY_ID})
        self.ask("x-exit-preconfig")
        self.memory = memory

    def capture(self, state: Path, delta: Path) -> int:
        """Stop, save devices, write the private pages; how many bytes that were."""
        self.ask("stop")
        self.ask("xen-save-devices-state", {"filename": str(state), "live": False})
        pid = self.process.pid
        start, end = next(
            (int(a, 16), int(b, 16))
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
            if line.endswith(str(self.memory))
            for a, b in [line.split()[0].split("-")]
        )
        with Path(f"/proc/{pid}/pagemap").open("rb") as file:
            file.seek(start // PAGE * 8)
            entries = np.frombuffer(file.read((end - start) // PAGE * 8), np.uint64)
        private = ((entries & (_PRESENT | _SWAPPED)) != 0) & ((entries & _FILE) == 0)
        pages = np.flatnonzero(private)
        edges = np.flatnonzero(np.diff(pages, prepend=-2, append=1 << 60) > 1)
        source = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
        target = os.open(delta, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for first, after in itertools.pairwise(edges):
            offset, size = int(pages[first]) * PAGE, int(after - first) * PAGE
            os.pwrite(target, os.pread(source, size, start + offset), offset)
        os.close(source)
        os.close(target)
        return int(pages.size) * PAGE

    def freeze_disk(self) -> Path:
        """Go on with a new overlay; the file that is frozen now."""
        frozen, self.disk = self.disk, self.folder / f"{self._name}-next.qcow2"
        self.ask("blockdev-snapshot-sync", snapshot_of_disk(self.disk))
        return frozen

    def resume(self) -> None:
        self.tell("cont")

    def kill(self) -> None:
        self._lines.close()
        self._socket.close()
        self.process.kill()
        self.process.wait()


def new_overlay(overlay: Path, below: Path) -> None:
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", below, "-F", "qcow2", overlay], check=True)


def snapshot_of_disk(overlay: Path) -> dict[str, Any]:
    """Arguments of ``blockdev-snapshot-sync`` for the root disk."""
    return {
        "node-name": qemu_command.ROOT_NODE, "snapshot-file": str(overlay), "snapshot-node-name": "next",
        "format": "qcow2",
    }  # fmt: skip


def merge_memory(delta: Path, memory: Path) -> None:
    """Write what the sparse file ``delta`` holds into ``memory``, at the same places."""
    with delta.open("rb") as source, memory.open("r+b") as target:
        for first, after in zip(*data_of(delta), strict=True):
            at, size = int(first) * PAGE, int(after - first) * PAGE
            os.pwrite(target.fileno(), os.pread(source.fileno(), size, at), at)


def first_answer(host: str, port: int, request: bytes, timeout: float = 30.0) -> bytes:
    """Connect, send, and return the first bytes that come back."""
    with socket.create_connection((host, port), timeout) as connection:
        connection.sendall(request)
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 2"), answer
    return answer


def command_request(command: str, token: str | None) -> bytes:
    """The HTTP request that the SDK sends for ``commands.run(command)``."""
    body = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command], "envs": {}}}).encode()
    frame = b"\0" + len(body).to_bytes(4, "big") + body
    head = [
        "POST /process.Process/Start HTTP/1.1",
        "Host: guest",
        "Content-Type: application/connect+json",
        "Connect-Protocol-Version: 1",
        "Authorization: Basic dXNlcjo=",
        f"Content-Length: {len(frame)}",
        "Connection: close",
        *([f"X-Access-Token: {token}"] if token else []),
    ]
    return "\r\n".join([*head, "", ""]).encode() + frame


def run_command(host: str, port: int, command: str, token: str | None = None) -> None:
    """``commands.run`` over a fresh socket straight to the guest, until the stream has ended."""
    request = command_request(command, token)
    with socket.create_connection((host, port), 30) as connection:
        connection.sendall(request)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    assert b'"exitCode"' in answer or b'"exited"' in answer, answer


def private_bytes(pid: int) -> int:
    """Memory that the process alone holds (smaps_rollup, proc(5)), in bytes."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean", "Private_Dirty")):
            total += int(line.split()[1]) * 1024
    return total


def milliseconds(started: float) -> float:
    return (time.perf_counter() - started) * 1000
