"""The node's side of the layer server: starting it, and asking it for files. For asyncio."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import structlog

from aenv.config import RepositorySettings
from aenv.errors import ConflictError, SourceError
from aenv.storage.layerd import control
from aenv.storage.layerd.config import VERSION, Config
from aenv.storage.layerd.handoff import MODULE
from aenv.storage.layerd.mount import alive

log = structlog.get_logger()

START_TIMEOUT = 15.0  # seconds
# Opening an export reads the indexes of its layers; a source may be retried for a minute (aenv.storage.fetching).
CALL_TIMEOUT = 120.0
LONGEST = 16 << 20  # bytes of an answer


class LayerLike(Protocol):
    @property
    def digest(self) -> str: ...

    @property
    def size(self) -> int: ...


class VolumeLike(Protocol):
    """``aenv.snapshot.manifest.Volume``, which is above this package."""

    @property
    def virtual_size(self) -> int: ...

    @property
    def layers(self) -> Sequence[LayerLike]: ...


@dataclass(frozen=True, slots=True)
class Unexported:
    deferred: bool  # it is open still, and goes when it no longer is


def repository_of(settings: RepositorySettings, home: Path) -> dict[str, Any]:
    """What ``LayerServer`` needs to know of the configured repository; ``home`` is ``$AENV_HOME``."""
    value: dict[str, Any] = settings.model_dump(mode="json")
    if settings.backend == "posix_fs":
        value["path"] = str(settings.path or home / "repository")
    return value


class LayerServer:
    """``repository`` says where layers are: see ``aenv.storage.layerd.opening.StoredLayers``."""

    def __init__(self, config: Config, repository: Mapping[str, Any], module: str = MODULE) -> None:
        self.config = config
        self._repository = dict(repository)
        self._module = module
        self._starting = asyncio.Lock()

    async def ensure_running(self) -> bool:
        """Find the server, or start one that outlives this process; whether it was started.

        True also means that earlier exports are gone, and that sandboxes which had them open are dead. A server with
        other settings, or of another version, is replaced only when none of its files is open. Raises SourceError
        when it does not start.
        """
        async with self._starting:
            running = await self._ping()
            if running is not None and alive(self.config.mount):
                if running["version"] == VERSION and running["config"] == self.config.dump():
                    return False
                try:
                    await self.stop()
                except ConflictError:
                    log.warning("the layer server keeps its old settings while its files are open")
                    return False
            await self._start()
            return True

    async def export(
        self,
        name: str,
        volume: VolumeLike,
        *,
        sequential: bool = False,
        repository: Mapping[str, Any] | None = None,
    ) -> Path:
        """A file with the volume's contents. Idempotent. ``repository``: where its layers are, if somewhere else.

        ``sequential``: it will be read by read(2), as a disk is, so the kernel reads ahead when that is in order. A
        memory, which is mapped, must not be: each of its page faults would fetch a megabyte.

        Raises ConflictError when the name has other contents, SourceError, CorruptFileError.
        """
        layers = [{"digest": layer.digest, "size": layer.size} for layer in volume.layers]
        request = {
            "name": name,
            "virtual_size": volume.virtual_size,
            "layers": layers,
            "repository": self._repository if repository is None else dict(repository),
            "sequential": sequential,
        }
        return Path((await self._call("export", **request))["path"])

    async def unexport(self, name: str) -> Unexported:
        """Take the file away. Who has it open keeps it. Raises NotFoundError."""
        return Unexported((await self._call("unexport", name=name))["deferred"])

    async def exports(self) -> list[dict[str, Any]]:
        """Name, virtual_size, layers, open (how often), removed (goes when closed) of each."""
        listed: list[dict[str, Any]] = (await self._call("list"))["exports"]
        return listed

    async def stats(self) -> dict[str, Any]:
        """``cache`` (see CacheStats), ``total`` and ``exports`` (see Account; touched: bytes of distinct pages)."""
        return await self._call("stats")

    async def ping(self) -> dict[str, Any]:
        """version, pid, config, open (files), exports. Raises SourceError when it does not answer."""
        return await self._call("ping")

    async def stop(self, *, force: bool = False) -> None:
        """Unmount and end it. ``force``: open files get I/O errors. Raises ConflictError when some are open."""
        with contextlib.suppress(ConnectionError, EOFError, FileNotFoundError):  # it may end before it answers
            await self._once({"op": "stop", "force": force}, CALL_TIMEOUT)
        for _ in range(500):
            if not self.config.socket.exists():
                return
            await asyncio.sleep(0.01)
        raise SourceError("The layer server does not end.", f"See {self.config.log}.")

    async def _ping(self) -> dict[str, Any] | None:
        if not self.config.socket.exists():
            return None
        try:
            return await self._once({"op": "ping"}, START_TIMEOUT)
        except (OSError, TimeoutError, EOFError):
            return None

    async def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Ask; again when the server is restarted meanwhile: each request may be repeated."""
        failure: Exception | None = None
        for attempt in range(5):
            if attempt:
                await asyncio.sleep(0.05 * 2**attempt)
            try:
                return await self._once({"op": op, **arguments}, CALL_TIMEOUT)
            except (ConnectionError, FileNotFoundError, EOFError) as error:
                failure = error
            except TimeoutError as error:
                failure = error
                break
        raise SourceError(f"The layer server does not answer: {failure!r}.", f"See {self.config.log}.")

    async def _once(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_unix_connection(self.config.socket, limit=LONGEST)
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                await writer.drain()
                line = await reader.readline()
            finally:
                writer.close()
        if not line.endswith(b"\n"):
            raise EOFError("the connection was closed")
        return control.result(line)

    async def _start(self) -> None:
        self.config.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
        begin = self.config.log.stat().st_size if self.config.log.exists() else 0
        process = await asyncio.to_thread(self._spawn)
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT
        while asyncio.get_running_loop().time() < deadline:
            if await self._ping() is not None and alive(self.config.mount):
                return
            if process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        said = await asyncio.to_thread(self._said, begin)
        raise SourceError(f"The layer server did not start: {said}", f"See {self.config.log}.")

    def _spawn(self) -> "subprocess.Popen[bytes]":
        argv = [sys.executable, "-m", self._module, "keep", self.config.dump()]
        with self.config.log.open("ab") as out:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
            )

    def _said(self, begin: int) -> str:
        with contextlib.suppress(OSError), self.config.log.open("rb") as file:
            file.seek(begin)
            return file.read(4000).decode(errors="replace").strip()[-400:]
        return "nothing is known."
