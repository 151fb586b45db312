"""Unpacks layers in a process of its own: a layer is seconds of Python, which would hold up the server's event loop.

``python -m aenv.image.worker`` reads one JSON object a line and answers each with one line. It ends with its input.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aenv.errors import AenvError, CapacityError
from aenv.image import errors
from aenv.image.budget import Budget
from aenv.image.layers import apply_layer
from aenv.image.prepare import prepare_for_sandbox

_NICENESS = 5  # sandboxes come first
_PR_SET_PDEATHSIG = 1
_MAX_LINE = 1 << 20


class Unpacker:
    """The process, as an asynchronous context manager. Cancelling ends it; the caller removes what it wrote."""

    def __init__(self, size_mib: int, work: Path, reserve_mib: int, note: Callable[[str], None]) -> None:
        self._limits = {"size_mib": size_mib, "work": str(work), "reserve_mib": reserve_mib}
        self._note = note
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            json.dumps(self._limits),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MAX_LINE,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()  # it has nothing to finish
        # Shielded: the tree may be removed only once its writer is gone.
        await asyncio.shield(asyncio.ensure_future(self._process.wait()))

    async def apply(self, tree: Path, layer: Path, *, diff_id: str | None = None, whiteouts: bool = True) -> None:
        """See ``apply_layer``."""
        await self._call({"tree": str(tree), "layer": str(layer), "diff_id": diff_id, "whiteouts": whiteouts})

    async def prepare(self, tree: Path, user: str, path: str) -> str:
        """See ``prepare_for_sandbox``."""
        return str((await self._call({"prepare": str(tree), "user": user, "path": path}))["user"])

    async def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            await process.stdin.drain()
            line = await process.stdout.readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, ValueError) as error:
            raise errors.ImageError(
                f"The process that unpacks the image ended with status {await process.wait()}.",
                "The server's log may say why; it may have run out of memory.",
            ) from error
        for text in answer.get("notes", []):
            self._note(text)
        if "error" in answer:
            kind = CapacityError if answer["error"] == "CapacityError" else getattr(errors, answer["error"], None)
            raise (kind or errors.ImageError)(answer["message"], answer["hint"])
        return answer


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    limits = json.loads(sys.argv[1])
    budget = Budget(limits["size_mib"], Path(limits["work"]), limits["reserve_mib"])
    for line in sys.stdin:
        request, notes = json.loads(line), list[str]()
        answer: dict[str, Any] = {"notes": notes}
        try:
            if "prepare" in request:
                tree = Path(request["prepare"])
                answer["user"] = prepare_for_sandbox(tree, request["user"], request["path"])
            else:
                tree, layer = Path(request["tree"]), Path(request["layer"])
                apply_layer(
                    tree,
                    layer,
                    budget,
                    diff_id=request["diff_id"],
                    whiteouts=request["whiteouts"],
                    note=notes.append,
                )
        except AenvError as error:
            answer |= {"error": type(error).__name__, "message": error.message, "hint": error.hint}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
