"""Holding a process at an open and at a write."""

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.vmm.firecracker.gate import OpenGate, StatePipe, let_go
from tests.node.process import wait_for

OPENER = "import sys; input(); open(sys.argv[1]).close(); print('open', flush=True)"
WRITER = "import sys; open(sys.argv[1], 'wb').write(bytes(int(sys.argv[2])))"


@pytest.fixture
def root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs CAP_SYS_ADMIN")


async def python(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


async def test_the_process_waits_until_the_gate_is_closed_and_others_pass(root: None, tmp_path: Path) -> None:
    (file := tmp_path / "console").touch()
    opener = await python(OPENER, str(file))
    assert opener.stdin is not None and opener.stdout is not None
    gate = OpenGate(file, opener.pid)
    opener.stdin.write(b"\n")
    await asyncio.wait_for(gate.reached(), 60)
    line = asyncio.create_task(opener.stdout.readline())
    file.open("rb").close()  # this very thread, which runs the event loop
    other = await python(OPENER, str(file))
    await asyncio.wait_for(other.communicate(b"\n"), 60)
    assert other.returncode == 0
    done, _ = await asyncio.wait({line}, timeout=0.1)
    assert not done
    gate.close()
    gate.close()
    assert await line == b"open\n"
    assert await opener.wait() == 0


async def test_a_gate_that_nobody_reaches(root: None, tmp_path: Path) -> None:
    (file := tmp_path / "console").touch()
    gate = OpenGate(file, 1)
    waiting = asyncio.create_task(gate.reached())
    for _ in range(3):
        file.open("rb").close()
        await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    gate.close()


async def test_gates_leave_nothing_behind(root: None, tmp_path: Path) -> None:
    (file := tmp_path / "console").touch()
    before = descriptors()
    for _ in range(50):
        OpenGate(file, 1).close()
    wait_for(lambda: not any(thread.name == "gate" for thread in threading.enumerate()), "the gates' threads to end")
    assert descriptors() <= before


async def test_a_file_that_is_not_there_is_told(root: None, tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="No such file"):
        OpenGate(tmp_path / "none", 1)


async def test_a_writer_waits_until_its_state_is_read(tmp_path: Path) -> None:
    path = tmp_path / "save"
    os.mkfifo(path)
    for size in (4097, 30_000, 2_000_000):
        pipe = StatePipe(path)
        writer = await python(WRITER, str(path), str(size))
        await asyncio.wait_for(pipe.started(), 30)
        waiting = asyncio.create_task(writer.wait())
        done, _ = await asyncio.wait({waiting}, timeout=0.1)
        assert not done
        assert await asyncio.to_thread(pipe.read) == bytes(size)
        assert await waiting == 0
        pipe.close()
        pipe.close()


async def test_a_writer_that_nobody_reads_any_more_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "save"
    os.mkfifo(path)
    await asyncio.to_thread(let_go, path)
    writer = await python(WRITER, str(path), "30000")
    waiting = asyncio.create_task(writer.wait())
    while not waiting.done():  # it may not have come to open the pipe yet
        await asyncio.to_thread(let_go, path)
    assert waiting.result() == 0


async def test_a_state_that_would_not_have_held_its_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "save"
    os.mkfifo(path)
    pipe = StatePipe(path)
    writer = await python(WRITER, str(path), "4096")
    await asyncio.wait_for(pipe.started(), 30)
    with pytest.raises(VmmError, match="4096 bytes"):
        await asyncio.to_thread(pipe.read)
    pipe.close()
    await writer.wait()
