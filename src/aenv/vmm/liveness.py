"""Waiting for a guest without waiting for a dead one."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from aenv.errors import SandboxStartError
from aenv.vmm.protocol import Vm

Result = TypeVar("Result")

CONSOLE_TAIL = 400  # bytes of the serial log that an error quotes


def while_alive(vm: Vm, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
    """A task with the result of ``work``, or SandboxStartError as soon as the VM's process ends before it."""
    task = asyncio.create_task(work)
    race = asyncio.create_task(_race(vm, task))
    race.add_done_callback(lambda _: task.cancel())  # also when it is cancelled before its first step
    return race


async def _race(vm: Vm, task: "asyncio.Task[Result]") -> Result:
    died = asyncio.create_task(vm.wait())
    try:
        await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            said = await asyncio.to_thread(_last_words, vm.console)
            raise SandboxStartError(
                f"The VM ended (status {died.result()}) before its guest was ready; {said}",
                "Try again; if it persists, see the VMM and kernel settings.",
            )
        return task.result()
    finally:
        task.cancel()
        died.cancel()
        await asyncio.gather(task, died, return_exceptions=True)


def _last_words(console: Path) -> str:
    try:
        text = console.read_bytes()[-CONSOLE_TAIL:].decode(errors="replace").strip()
    except OSError:
        text = ""
    return f"its console ends with: {text}" if text else "its console is empty."
