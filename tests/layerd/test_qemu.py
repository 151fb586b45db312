"""QEMU on files of the layer server: memory mapped privately, disks under qcow2 overlays."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from aenv.vmm.qemu_command import memory_backend
from tests.layerd.support import PAGE, Server, Volume, drop_page_cache

SIZE = 16 << 20


@pytest.fixture
def qemu() -> str:
    found = shutil.which("qemu-system-x86_64")
    if not found or not shutil.which("qemu-io"):
        pytest.skip("QEMU is not installed")
    return found


async def run(*argv: str | Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *argv, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    out, _ = await process.communicate()
    assert process.returncode == 0, out
    return out.decode()


class Monitor:
    """QMP on QEMU's standard streams."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while True:
            value: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), 60))
            if "event" not in value:
                return value

    async def call(self, name: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
        answer = await self.read()
        assert "return" in answer, answer
        return answer["return"]


async def test_guest_memory_is_a_private_mapping(server: Server, qemu: str, tmp_path: Path) -> None:
    """What the guest sees is the file; what it writes stays its own. A kill of the server is not noticed."""
    data = os.urandom(SIZE)
    await server.ensure_running()
    path = await server.export("memory", Volume(SIZE, (server.far.add(SIZE, [(0, data)]),)))
    backend = json.dumps(memory_backend(path, SIZE >> 20))
    process = await asyncio.create_subprocess_exec(
        qemu, "-nodefaults", "-display", "none", "-S", "-M", "microvm,memory-backend=mem", "-accel", "tcg",
        "-m", f"{SIZE >> 20}M", "-object", backend, "-qmp", "stdio",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        qmp = Monitor(process)
        await qmp.read()
        await qmp.call("qmp_capabilities")
        half = tmp_path / "half"
        await qmp.call("pmemsave", val=1 << 20, size=SIZE // 2, filename=str(half))
        assert half.read_bytes() == data[1 << 20 :][: SIZE // 2]
        server.kill9()
        drop_page_cache(path)
        rest = tmp_path / "rest"
        await qmp.call("pmemsave", val=10 << 20, size=4 << 20, filename=str(rest))
        assert rest.read_bytes() == data[10 << 20 :][: 4 << 20]
        assert (await server.unexport("memory")).deferred
        await qmp.call("quit")
        await process.wait()
        assert await server.exports() == []
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_disk_under_an_overlay(server: Server, qemu: str, tmp_path: Path) -> None:
    data = os.urandom(SIZE // 2)
    await server.ensure_running()
    path = await server.export("disk", Volume(SIZE, (server.far.add(SIZE, [(0, data)]),)), sequential=True)
    overlay = tmp_path / "overlay"
    await run("qemu-img", "create", "-q", "-f", "qcow2", "-b", path, "-F", "raw", overlay)
    await run("qemu-io", "-c", f"write -P 7 {5 * PAGE} {PAGE}", overlay)
    await run("qemu-img", "convert", "-O", "raw", overlay, tmp_path / "flat")
    contents = bytearray(data.ljust(SIZE, b"\0"))
    contents[5 * PAGE : 6 * PAGE] = b"\7" * PAGE
    assert (tmp_path / "flat").read_bytes() == contents
    # SEEK_HOLE spares QEMU the half that nobody wrote.
    assert (await server.stats())["exports"]["disk"]["touched"] <= SIZE // 2 + (2 << 20)
