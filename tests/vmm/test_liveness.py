"""Waiting for a guest ends with its VM, and leaves no task behind."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from aenv.errors import SandboxStartError
from aenv.vmm.liveness import while_alive
from aenv.vmm.protocol import Vm


class Dying:
    """As much of a VM as this needs: it ends when told to."""

    def __init__(self, console: Path) -> None:
        self.console = console
        self.end = asyncio.Event()

    def errors(self) -> str:
        return "qemu: out of luck"

    async def wait(self) -> int:
        await self.end.wait()
        return 1


async def others() -> set[str]:
    await asyncio.sleep(0)
    return {repr(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()}


async def forever() -> None:
    await asyncio.Event().wait()


async def test_the_result_comes_through(tmp_path: Path) -> None:
    async def answer() -> int:
        return 42

    before = await others()
    assert await while_alive(cast(Vm, Dying(tmp_path / "console")), answer()) == 42
    assert await others() == before


async def test_a_vm_that_ends_first_is_quoted(tmp_path: Path) -> None:
    vm = Dying(tmp_path / "console")
    vm.console.write_text("x" * 100_000 + "Kernel panic - not syncing")
    waiting = while_alive(cast(Vm, vm), forever())
    vm.end.set()
    with pytest.raises(SandboxStartError, match=r"x+Kernel panic.*the VMM said: qemu: out of luck") as caught:
        await waiting
    assert len(str(caught.value)) < 1000


async def test_cancelled_before_its_first_step_nothing_goes_on(tmp_path: Path) -> None:
    before = await others()
    waiting = while_alive(cast(Vm, Dying(tmp_path / "console")), forever())
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert await others() == before
