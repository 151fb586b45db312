"""The process that unpacks, where it is not what it should be."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.image import unpacker
from aenv.image.errors import ImageError
from aenv.image.unpacker import Unpacker, Unpackers
from tests.image.writer import archive, member

CHATTY = "import sys\nfor line in sys.stdin:\n    print('x' * (2 << 20), flush=True)"


async def test_an_answer_without_end_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[asyncio.subprocess.Process]()

    async def start() -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        started.append(
            await asyncio.create_subprocess_exec(sys.executable, "-c", CHATTY, stdin=pipe, stdout=pipe, limit=1 << 20)
        )
        return started[0]

    monkeypatch.setattr(unpacker, "_start", start)
    async with asyncio.timeout(30):
        with pytest.raises(ImageError, match="process that unpacks"):
            async with Unpacker(Unpackers(), 64, tmp_path, 0, print) as unpacking:
                await unpacking.format()
    assert started[0].returncode is not None


_PR_SET_CHILD_SUBREAPER = 36


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Children of children that die become this process's."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def children(parent: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.skipif(os.geteuid() != 0, reason="unpacking needs root")
def test_killed_with_a_file_system_half_written_it_ends(tmp_path: Path) -> None:
    """The kernel unmounts at the end of who has the mount, and writes out to the disk's process, or not at all."""
    (tmp_path / "layer").write_bytes(archive([member(f"f{number}", os.urandom(1 << 20)) for number in range(16)]))
    (tmp_path / "work").mkdir()
    with adopting():
        process = subprocess.Popen(
            [sys.executable, "-m", unpacker.MODULE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None and process.stdout is not None
        apply = {"layer": str(tmp_path / "layer"), "diff_id": None, "whiteouts": True, "staged": False}
        requests = (
            {"op": "begin", "size_mib": 64, "work": str(tmp_path / "work"), "reserve_mib": 0},
            {"op": "show", "layers": [], "format": True},
            {"op": "apply", **apply},
        )
        for request in requests:
            process.stdin.write(json.dumps(request).encode() + b"\n")
        process.stdin.flush()
        for _ in requests[1:]:
            assert json.loads(process.stdout.readline()) == {"notes": []}
        (disk,) = children(process.pid)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        deadline = time.monotonic() + 20
        while os.waitpid(disk, os.WNOHANG) == (0, 0):
            assert time.monotonic() < deadline, "the disk's process waits for itself"
            time.sleep(0.01)
