"""A layer server of a test's own, ended with the test whatever happens."""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from aenv.storage import lsmt
from aenv.storage.layerd import mount
from aenv.storage.layerd.client import LayerServer
from aenv.storage.layerd.config import Config
from aenv.storage.layerd.exports import Layer
from tests.layerd.server import MODULE

Result = TypeVar("Result")
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Volume:
    virtual_size: int
    layers: tuple[Layer, ...]


class Far:
    """Layers of a ``tests.layerd.server``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.faults()

    def faults(self, **faults: dict[str, Any]) -> None:
        """Set what happens to reads from now on; ``all`` is for all layers."""
        value = {("*" if key == "all" else key): fault for key, fault in faults.items()}
        temporary = self.folder / ".faults"
        temporary.write_text(json.dumps(value))
        temporary.replace(self.folder / "faults.json")

    def reads(self) -> list[tuple[str, int, int]]:
        """Digest, offset and length of each read that reached a layer."""
        path = self.folder / "reads"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(d, int(o), int(n)) for d, o, n in (line.split() for line in lines)]

    def add(self, virtual_size: int, pieces: Sequence[tuple[int, bytes]]) -> Layer:
        """A plain layer with data at these offsets."""
        path = self.folder / "new"
        with lsmt.LayerWriter(path, virtual_size) as writer:
            for offset, data in pieces:
                at, size = (np.array([n], dtype=np.uint64) for n in (offset, len(data)))
                writer.add(at, size, data)
            writer.commit()
        return self.adopt(path)

    def adopt(self, path: Path) -> Layer:
        """Take over a file as a layer."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        size = path.stat().st_size
        path.replace(self.folder / digest)
        return Layer(f"sha256:{digest}", size)


class Server(LayerServer):
    """A layer server that a test ends by ``destroy``."""

    def __init__(self, root: Path, *, cache: int = 256 << 20, memory: int = 8 << 20, reserve: int = 0) -> None:
        self.far = Far(root / "far")
        config = Config(root / "run", root / "cache", cache, memory, reserve)
        super().__init__(config, {"backend": "test", "path": str(self.far.folder)}, MODULE)

    def processes(self) -> dict[str, list[int]]:
        """Pids by role: keeper, server."""
        found: dict[str, list[int]] = {"keeper": [], "server": []}
        wanted = str(self.config.runtime).encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    ours = wanted in (entry / "cmdline").read_bytes()  # of a zombie: empty
                    role = (entry / "comm").read_text().strip().removeprefix("layerd-")
                except OSError:
                    continue
                if ours and role in found:
                    found[role].append(int(entry.name))
        return found

    @property
    def server_pid(self) -> int:
        (pid,) = self.processes()["server"]
        return pid

    @property
    def keeper_pid(self) -> int:
        (pid,) = self.processes()["keeper"]
        return pid

    def kill9(self) -> None:
        os.kill(self.server_pid, signal.SIGKILL)

    def destroy(self) -> None:
        """End it by force. Nothing is left mounted, whatever state it is in."""
        for role in ("keeper", "server"):  # the keeper first: it would start another server
            for pid in self.processes()[role]:
                os.kill(pid, signal.SIGKILL)
        for pid in [p for pids in self.processes().values() for p in pids]:
            os.kill(pid, signal.SIGKILL)
        mount.remove(self.config.mount, force=True)


async def until(condition: Callable[[], Awaitable[Result]], what: str, timeout: float = 30.0) -> Result:
    """The first true value of ``condition``."""
    deadline = asyncio.get_running_loop().time() + timeout
    while True:
        if value := await condition():
            return value
        assert asyncio.get_running_loop().time() < deadline, f"waited {timeout:.0f} s for {what}"
        await asyncio.sleep(0.02)


def drop_page_cache(path: Path) -> None:
    """Of one file: the next reads reach the server."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run(code: str, *arguments: str) -> "subprocess.Popen[bytes]":
    """Python in another process, so that what it does with a mount cannot block a test."""
    import sys

    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE)
