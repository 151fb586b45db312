"""A process that unpacks layers: ``python -m aenv.image.worker`` reads one JSON object a line and answers each with
one line, but for those that say where to begin (``aenv.image.unpacker``). It ends with its input.

Layers go to a file system that is mounted for this process alone, so that nothing is left of it, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from aenv.errors import AenvError
from aenv.image import drives
from aenv.image.answers import describe
from aenv.image.budget import Budget
from aenv.image.diskserver import DiskServer
from aenv.image.errors import ImageError
from aenv.image.ext4 import make_blank
from aenv.image.layers import apply_layer
from aenv.image.loop import Flusher, LoopDevice, leave_mounts, unmount
from aenv.image.prepare import prepare_for_sandbox

_NICENESS = 5  # sandboxes come first
_PR_SET_PDEATHSIG = 1


class _EndedError(BaseException):
    """The process was told to end."""


class _Work:
    """What the process has: the disk, and its file system, which is mounted when somebody needs it."""

    def __init__(self, size_mib: int, work: Path, reserve_mib: int, mounts: int) -> None:
        self._file, self._tree = work / "disk", work / "tree"
        self._staged = self._tree
        self._tree.mkdir(mode=0o700)
        self._disk = DiskServer(self._file, work, mounts)
        self._size = size_mib << 20
        self._budget = Budget(size_mib, work, reserve_mib)
        self._loop: LoopDevice | None = None
        self._mounted = False

    def answer(self, request: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
        """Raises ImageError and its kinds, CapacityError."""
        try:
            return self._run(request, note)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._budget.exhausted() from error
            raise ImageError(f"The image cannot be converted: {error.strerror or error}.") from error

    def _run(self, request: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
        match request["op"]:
            case "show":
                self._show(request["layers"], make=request["format"])
            case "apply":
                options = {"diff_id": request["diff_id"], "whiteouts": request["whiteouts"], "note": note}
                with self._disk.blamed(), Flusher(self._mount()):
                    tree = self._staged if request["staged"] else self._tree
                    apply_layer(tree, Path(request["layer"]), self._budget, **options)
            case "stage":
                with self._disk.blamed():
                    self._staged = drives.stage(self._mount())
            case "place":
                with self._disk.blamed():
                    drives.place(self._mount(), request["path"], request["folder"])
            case "extract":
                folder = Path(request["folder"])
                apply_layer(folder, Path(request["layer"]), self._budget, whiteouts=False, note=note)
            case "prepare":
                with self._disk.blamed():
                    return {"user": prepare_for_sandbox(self._mount(), request["user"], request["path"])}
            case "seal":
                with self._disk.blamed():
                    self._unmount()
                digest, size = self._disk.seal(request["out"])
                return {"digest": digest, "size": size}
        return {}

    def _show(self, layers: list[str], *, make: bool) -> None:
        self._disk.show(layers, self._size)
        if make:
            make_blank(self._file)

    def _mount(self) -> Path:
        if not self._mounted:
            self._loop = self._loop or LoopDevice(self._file)
            self._loop.mount(self._tree)
            self._mounted = True
        return self._tree

    def _unmount(self) -> None:
        if self._mounted and self._loop is not None:
            self._loop.unmount()
            self._mounted = False

    def close(self) -> None:
        with contextlib.suppress(AenvError):
            self._disk.discard()
            if self._loop is not None:
                self._loop.close()
        self._disk.close(orderly=not unmount(self._file))


class _Process:
    """What the process does from its first line to its last; it may be used for one image after the other."""

    def __init__(self) -> None:
        self._mounts: int | None = None  # see ``leave_mounts``
        self._work: _Work | None = None
        self._failure: AenvError | None = None

    def answer(self, request: dict[str, Any], note: Callable[[str], None]) -> dict[str, Any] | None:
        """None: the line is not answered. Raises ImageError and its kinds, CapacityError."""
        if request["op"] == "begin":
            self._begin(request)
            return None
        if request["op"] == "end":
            self.close()
            return {}
        if self._work is None:
            assert self._failure is not None
            raise self._failure
        return self._work.answer(request, note)

    def _begin(self, limits: dict[str, Any]) -> None:
        self._failure = None
        try:
            self._mounts = leave_mounts() if self._mounts is None else self._mounts
            self._work = _Work(limits["size_mib"], Path(limits["work"]), limits["reserve_mib"], self._mounts)
        except AenvError as error:
            self._failure = error  # the next request is answered with it
        except OSError as error:
            self._failure = ImageError(f"A place to convert images in cannot be made: {error}.")

    def close(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.close()


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICENESS)
    signal.signal(signal.SIGTERM, _ended)
    process = _Process()
    try:
        for line in sys.stdin:
            notes = list[str]()
            answer: dict[str, Any] | None
            try:
                answer = process.answer(json.loads(line), notes.append)
            except AenvError as error:
                answer = describe(error)
            if answer is not None:
                print(json.dumps({"notes": notes, **answer}), flush=True)
    except _EndedError:
        pass
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        process.close()


def _ended(number: int, frame: FrameType | None) -> NoReturn:
    raise _EndedError


if __name__ == "__main__":
    main()
