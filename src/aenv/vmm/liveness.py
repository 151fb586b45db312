"""Waiting for a guest without waiting for a dead one."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aenv.errors import SandboxStartError
from aenv.vmm import process
from aenv.vmm.protocol import Vm

Result = TypeVar("Result")

QUOTED = 400  # bytes of a log that an error quotes


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
            said = await asyncio.to_thread(last_words, vm)
            raise SandboxStartError(
                f"The VM ended (status {died.result()}) before its guest was ready; {said}.",
                "Try again; if it persists, see the VMM and kernel settings.",
            )
        return task.result()
    finally:
        task.cancel()
        died.cancel()
        await asyncio.gather(task, died, return_exceptions=True)


def last_words(vm: Vm) -> str:
    """What is left to say why a VM ended: the ends of its guest's console and of what the VMM printed. Blocks."""
    console = process.tail(vm.console, QUOTED)
    said = [f"its console ends with: {console}" if console else "its console is empty"]
    if errors := vm.errors()[-QUOTED:]:
        said.append(f"the VMM said: {errors}")
    return "; ".join(said)
