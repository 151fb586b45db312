"""The process that unpacks layers (``aenv.image.worker``), as its caller sees it: a layer is seconds of Python, which
would hold up the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aenv.background import Background
from aenv.image.answers import raise_error
from aenv.image.errors import ImageError

MODULE = "aenv.image.worker"
_MAX_LINE = 1 << 20
_GRACE_S = 10.0  # from being told to end to being killed: it unmounts in order, else the kernel's log has I/O errors


class Unpackers:
    """Starts and ends the processes. One that has done its work waits for more, for ``keep`` seconds: loading its
    libraries takes a new one longer than most second images.
    """

    def __init__(self, keep: float = 0.0) -> None:
        self._keep = keep
        self._background = Background()
        self._spare: asyncio.subprocess.Process | None = None
        self._ending: asyncio.Task[None] | None = None

    async def take(self) -> asyncio.subprocess.Process:
        spare, self._spare = self._spare, None
        if spare is not None and spare.returncode is None:
            return spare
        return await _start()

    async def give_back(self, process: asyncio.subprocess.Process, *, usable: bool) -> None:
        """``usable``: it is at its beginning again."""
        if not usable or not self._keep or self._spare is not None or process.returncode is not None:
            await _end(process)
            return
        self._spare = process
        self._ending = asyncio.create_task(self._end_later(process))

    async def _end_later(self, process: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(self._keep)
        if self._spare is process:
            await self._end_spare()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that a caller need not wait for: to end a process and remove its folder."""
        self._background.spawn(work)

    async def close(self) -> None:
        """What is left to be done, and the process that nobody uses."""
        await self._background.settle()
        if self._ending is not None:
            self._ending.cancel()
        await self._end_spare()

    async def _end_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            await _end(spare)


async def _start() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MODULE,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MAX_LINE,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # it forks, and does no algebra
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
    try:
        async with asyncio.timeout(_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class Unpacker:
    """One process, as an asynchronous context manager. Cancelling ends it; the caller removes what it wrote.

    ``work`` is an empty folder of its own. All methods raise ImageError and its kinds, CapacityError.
    """

    def __init__(
        self, processes: Unpackers, size_mib: int, work: Path, reserve_mib: int, note: Callable[[str], None]
    ) -> None:
        self._processes = processes
        self._limits = {"size_mib": size_mib, "work": str(work), "reserve_mib": reserve_mib}
        self._note = note
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await self._processes.take()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"op": "begin", **self._limits}).encode() + b"\n")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: what it wrote may be removed only once it is done with it.
        await asyncio.shield(asyncio.ensure_future(self._leave(usable=kind is None)))

    async def _leave(self, *, usable: bool) -> None:
        assert self._process is not None
        if usable:
            try:
                await self._call({"op": "end"})
            except ImageError:
                usable = False
        await self._processes.give_back(self._process, usable=usable)

    async def format(self) -> None:
        """Begin with an empty file system."""
        await self._call({"op": "show", "layers": [], "format": True})

    async def show(self, layers: Sequence[Path]) -> None:
        """Begin with the file system in these layers, bottom first."""
        await self._call({"op": "show", "layers": [str(path) for path in layers], "format": False})

    async def apply(
        self, layer: Path, *, diff_id: str | None = None, whiteouts: bool = True, staged: bool = False
    ) -> None:
        """Apply a layer to the file system, or to what is staged. See ``apply_layer``."""
        options = {"diff_id": diff_id, "whiteouts": whiteouts, "staged": staged}
        await self._call({"op": "apply", "layer": str(layer), **options})

    async def stage(self) -> None:
        """See ``aenv.image.drives``."""
        await self._call({"op": "stage"})

    async def place(self, path: str, folder: str) -> None:
        """See ``aenv.image.drives``."""
        await self._call({"op": "place", "path": path, "folder": folder})

    async def extract(self, folder: Path, archive: Path) -> None:
        """Unpack an archive into a folder of the host."""
        await self._call({"op": "extract", "folder": str(folder), "layer": str(archive)})

    async def prepare(self, user: str, path: str) -> str:
        """See ``prepare_for_sandbox``."""
        return str((await self._call({"op": "prepare", "user": user, "path": path}))["user"])

    async def seal(self, out: Path) -> tuple[str, int]:
        """Write what changed since the beginning, or the last time, to ``out`` as a layer: its digest and size."""
        answer = await self._call({"op": "seal", "out": str(out)})
        return answer["digest"], answer["size"]

    async def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            await _end(process)  # one whose answer is nonsense has not
            raise ImageError(
                f"The process that unpacks the image ended with status {process.returncode}.",
                "The server's log may say why; it may have run out of memory.",
            ) from error
        for text in answer.get("notes", []):
            self._note(text)
        raise_error(answer)
        return answer
