"""The process behind the disk that an image's layers are written to: it answers for the disk's blocks, and makes
overlaybd layers of those that were written.

It is a fork of the unpacking process (``aenv.image.worker``), and must be another one than that (see
``aenv.storage.scratchfile``). They talk over a socket, one JSON object a line; each request is answered.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aenv.errors import AenvError
from aenv.image.answers import describe, raise_error
from aenv.image.errors import ImageError
from aenv.image.loop import join_mounts
from aenv.storage.scratch import ScratchDisk
from aenv.storage.scratchfile import ScratchFile, mount
from aenv.storage.source import FileSource
from aenv.storage.stack import open_layer
from aenv.storage.zfile import write_zfile

_PR_SET_PDEATHSIG, _PR_SET_IO_FLUSHER = 1, 57
_LONGEST = 1 << 20


class DiskServer:
    """Used by the unpacking process. Raises ImageError, CapacityError."""

    def __init__(self, file: Path, folder: Path, mounts: int) -> None:
        """Show the disk as ``file``, which is made; what is written goes to ``folder``'s disk. The process sees the
        mounts of ``mounts`` (see ``leave_mounts``), not those of this one.
        """
        file.touch(0o600)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # former ones, which nobody waited for
                pass
        device = mount(file)
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if not self._pid:
            try:
                ours.close()
                nothing = os.open(os.devnull, os.O_RDWR)
                for number in (0, 1):  # the other process's; its reader is to see their end
                    os.dup2(nothing, number)
                _serve(device, theirs, folder, mounts)
            finally:
                os._exit(1)
        os.close(device)
        theirs.close()
        self._socket = ours
        self._lines = ours.makefile("rb")

    def show(self, layers: list[str], size: int) -> None:
        """The disk is ``size`` bytes with these layers (paths, bottom first) from now on. Once."""
        self._call(op="show", layers=layers, size=size)

    def seal(self, out: str) -> tuple[str, int]:
        """Write what changed since the last time to ``out``, a layer, durably: digest and size of that file."""
        answer = self._call(op="seal", out=out)
        return answer["digest"], answer["size"]

    def discard(self) -> None:
        """Forget what is written from now on: the disk is of no use any more."""
        self._call(op="discard")

    @contextlib.contextmanager
    def blamed(self) -> Iterator[None]:
        """Where what is done on the disk fails because it could not be kept, say so."""
        try:
            yield
        except (AenvError, OSError):
            self._call(op="check")
            raise

    def close(self, *, orderly: bool) -> None:
        """It ends with the mount, which has ended if ``orderly``. Nobody waits: it may have much to give back."""
        if not orderly:
            os.kill(self._pid, signal.SIGKILL)
        self._lines.close()
        self._socket.close()

    def _call(self, **request: Any) -> dict[str, Any]:
        try:
            self._socket.sendall(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(self._lines.readline(_LONGEST))
        except (OSError, ValueError) as error:
            raise ImageError(
                "The process that keeps an image's disk has ended.",
                "The server's log may say why; it may have run out of memory.",
            ) from error
        raise_error(answer)
        return answer


def _serve(device: int, control: socket.socket, folder: Path, mounts: int) -> None:
    """The process's life: until the file is unmounted and the other process has gone."""
    # Its last act must not be to unmount what it serves: the kernel would write that out, and wait for an answer from
    # the process that is ending. The other one unmounts, before this one is told to end, however it ends.
    join_mounts(mounts)
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The kernel writes pages out through this process: its own allocations must not wait for that.
    libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the other process ends first, in order
    file = ScratchFile(device)
    commands = _Commands(file, folder)
    lines = control.makefile("rb")

    def one() -> bool:
        line = lines.readline(_LONGEST)
        if not line:
            return False
        try:
            answer = commands.run(json.loads(line))
        except AenvError as error:
            answer = describe(error)
        except OSError as error:
            answer = {"error": "ImageError", "message": f"An image's disk cannot be kept: {error}.", "hint": ""}
        control.sendall(json.dumps(answer).encode() + b"\n")
        return True

    file.serve(control.fileno(), one)


class _Commands:
    def __init__(self, file: ScratchFile, folder: Path) -> None:
        self._file = file
        self._folder = folder
        self._disk: ScratchDisk | None = None

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "show":
            layers = [open_layer(FileSource(Path(path))) for path in request["layers"]]
            self._disk = ScratchDisk(layers, request["size"], self._folder)
            self._file.show(self._disk)
        elif request["op"] == "discard":
            self._file.discard()
        elif request["op"] == "check":
            self._check()
        else:
            return self._seal(Path(request["out"]))
        return {}

    def _check(self) -> None:
        if (failure := self._file.failure) is not None:
            raise failure

    def _seal(self, out: Path) -> dict[str, Any]:
        self._check()
        assert self._disk is not None
        write_zfile(self._disk.seal(), out, durable=True)
        with out.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return {"digest": f"sha256:{digest.hexdigest()}", "size": os.fstat(file.fileno()).st_size}
