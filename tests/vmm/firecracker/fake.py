"""A program that stands in for Firecracker: its API, its files and its memory, without KVM.

Guest memory is mapped as Firecracker maps it. One thread does everything, so a request that waits in a system call
stops all, as there. After each snapshot it does what a device may do: it writes ``LATER`` into guest memory. It notes
each request, and what was in memory when it made its devices, in ``journal`` of its working directory.
"""

import argparse
import ctypes
import json
import mmap
import os
import selectors
import socket
import sys
from pathlib import Path
from typing import BinaryIO

COMMAND_LINE, LATER_AT, LATER = 0x20000, 0x30000, b"a packet that came later"
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # mmap(2)
STATE = b"device state " * 1000
WATCHED = 0x40000, 16  # what it notes of memory when it makes its devices


class RefusedError(Exception):
    """What is said to be the fault."""


class Fake:
    def __init__(self) -> None:
        self.memory: mmap.mmap | None = None
        self.config: dict[str, dict[str, object]] = {}
        self.state = "Not started"

    def handle(self, method: str, path: str, body: dict[str, object]) -> object:
        if path == "/" or path == "/vm/config":
            return {"id": "fake", "state": self.state, "vmm_version": "1.16.1", "config": self.config}
        if path == "/actions":
            self.start()
        elif path == "/snapshot/load":
            self.load(body)
        elif path == "/snapshot/create":
            self.save(body)
        elif path == "/balloon/take":
            self.take(*json.loads(Path("balloon").read_text()))
        elif path == "/vm":
            if self.memory is None:
                raise RefusedError("The requested operation is not supported before starting the microVM.")
            self.state = "Paused" if body["state"] == "Paused" else "Running"
        else:
            self.config[path] = body
        return None

    def start(self) -> None:
        source = self.config["/boot-source"]
        for key in ("kernel_image_path", "initrd_path"):
            Path(str(source[key])).read_bytes()
        self.open_console()
        size = int(str(self.config["/machine-config"]["mem_size_mib"])) << 20
        self.memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        line = str(source["boot_args"]).encode()
        self.memory[COMMAND_LINE : COMMAND_LINE + len(line)] = line
        self.state = "Running"

    def load(self, body: dict[str, object]) -> None:
        state = Path(str(body["snapshot_path"])).read_bytes()
        if state != STATE:
            raise RefusedError("Failed to get snapshot state from file: CRC64 validation failed")
        backend = body["mem_backend"]
        assert isinstance(backend, dict)
        with open(str(backend["backend_path"]), "rb") as file:
            self.memory = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        self.open_console()
        self.state = "Paused"

    def open_console(self) -> None:
        with open(str(self.config["/serial"]["serial_out_path"]), "r+b") as console:
            console.write(b"serial console\n")
        with open("dev/disk", "r+b"):
            pass
        if self.memory is not None:
            at, size = WATCHED
            note({"opened": bytes(self.memory[at : at + size]).hex()})

    def save(self, body: dict[str, object]) -> None:
        if self.state != "Paused":
            raise RefusedError("Cannot create snapshot: the VM is not paused")
        with open(str(body["snapshot_path"]), "wb", buffering=0) as file:
            left = memoryview(STATE)
            while left:
                left = left[file.write(left) :]
            try:
                os.fsync(file.fileno())
            except OSError as error:
                raise RefusedError(
                    f"Cannot create snapshot: Cannot perform sync_all on the snapshot backing file: {error.strerror}"
                ) from error
        raise RefusedError("Cannot perform open on the memory backing file")

    def take(self, address: int, size: int) -> None:
        """As its balloon does with memory that is mapped from a file (``discard_range``)."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
        assert libc.mmap(address, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == address

    def work_on(self) -> None:
        if self.memory is not None:
            self.memory[LATER_AT : LATER_AT + len(LATER)] = LATER


def note(entry: object) -> None:
    with open("journal", "a") as file:
        file.write(json.dumps(entry) + "\n")


def main() -> None:
    if sys.argv[1:] == ["--version"]:
        return print("Firecracker v1.16.1\n")
    if sys.argv[1:] == ["--snapshot-version"]:
        return print("v10.0.0")
    parser = argparse.ArgumentParser()
    for name in ("id", "api-sock", "log-path", "level"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--show-level", action="store_true")
    arguments = parser.parse_args()
    Path(arguments.log_path).write_text("fake log\n")
    if Path("../../ends").exists():
        Path(arguments.log_path).write_text("it ends at once\n")
        sys.exit(3)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(arguments.api_sock)
    listener.listen(4)
    fake = Fake()
    links = selectors.DefaultSelector()
    links.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in links.select():
            if key.fileobj is listener:
                link, _ = listener.accept()
                links.register(link, selectors.EVENT_READ, link.makefile("rb"))
            elif not answered(key.fileobj, key.data, fake):  # type: ignore[arg-type]
                links.unregister(key.fileobj)


def answered(link: socket.socket, stream: BinaryIO, fake: Fake) -> bool:
    """Read a request and answer it; False when the connection has ended."""
    try:
        line = stream.readline()
    except ConnectionResetError:  # it was closed with an answer unread
        line = b""
    if not line:
        return False
    method, path, _ = line.decode().split()
    length = 0
    while (header := stream.readline().decode().strip()) != "":
        name, _, value = header.partition(":")
        length = int(value) if name.lower() == "content-length" else length
    body = json.loads(stream.read(length)) if length else {}
    note({"method": method, "path": path, "body": body})
    if Path("hangs").exists():
        return True
    try:
        answer, status = fake.handle(method, path, body), 200
    except RefusedError as error:
        answer, status = {"fault_message": str(error)}, 400
    except OSError as error:
        answer, status = {"fault_message": repr(error)}, 400
    content = b"" if answer is None else json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} Word\r\nContent-Length: {len(content)}\r\n\r\n"
    try:
        link.sendall(head.encode() + content)
    except OSError:
        return False
    if path == "/snapshot/create":
        fake.work_on()
    return True


if __name__ == "__main__":
    main()
