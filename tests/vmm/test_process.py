"""Processes: started apart, watched by pidfd, never mistaken for another."""

# ruff: noqa: ASYNC240 - nothing else runs on a test's event loop

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.vmm import process


async def launch(tmp_path: Path, *argv: str) -> int:
    return await asyncio.to_thread(process.launch, argv, None, tmp_path / "log", [])


async def test_exit_status_and_no_zombie(tmp_path: Path) -> None:
    watched = process.Process(await launch(tmp_path, "sh", "-c", "echo said; exit 3"))
    assert await watched.wait() == 3
    assert await watched.wait() == 3
    assert not watched.alive
    assert not Path(f"/proc/{watched.pid}").exists()
    assert (tmp_path / "log").read_text() == "said\n"
    watched.send(signal.SIGKILL)


async def test_it_has_its_own_session_and_nothing_of_ours(tmp_path: Path) -> None:
    watched = process.Process(await launch(tmp_path, "sleep", "60"))
    assert os.getsid(watched.pid) == watched.pid
    fds = {str(fd.readlink()) for fd in Path(f"/proc/{watched.pid}/fd").iterdir()}
    assert fds == {"/dev/null", str(tmp_path / "log")}
    watched.send(signal.SIGTERM)
    assert await watched.wait() == -signal.SIGTERM


async def test_start_time_guards_the_pid(tmp_path: Path) -> None:
    watched = process.Process(await launch(tmp_path, "sleep", "60"))
    start = process.start_time(watched.pid)
    assert start is not None
    assert process.Process(watched.pid, start).alive
    with pytest.raises(ProcessLookupError):
        process.Process(watched.pid, start + 1)
    watched.send(signal.SIGKILL)
    await watched.wait()
    with pytest.raises(ProcessLookupError):
        process.Process(watched.pid, start)
    assert process.start_time(watched.pid) is None


async def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="no-such-program"):
        await launch(tmp_path, "no-such-program")


async def test_found_by_argument(tmp_path: Path) -> None:
    marker = f"marker-{os.getpid()}"
    watched = process.Process(await launch(tmp_path, sys.executable, "-c", "import time; time.sleep(60)", marker))
    assert process.find_by_argument(marker) == [watched.pid]
    watched.send(signal.SIGKILL)
    await watched.wait()
    assert process.find_by_argument(marker) == []
