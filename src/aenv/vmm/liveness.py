"""Waiting for a guest without waiting for a dead one."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from aenv.errors import SandboxStartError
from aenv.vmm.protocol import Vm

Result = TypeVar("Result")

CONSOLE_TAIL = 400  # bytes of the serial log that an error quotes


async def while_alive(vm: Vm, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of ``work``, or SandboxStartError as soon as the VM's process ends before it."""
    task = asyncio.ensure_future(work)
    died = asyncio.ensure_future(vm.wait())
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
        for future in (task, died):
            future.cancel()
        await asyncio.gather(task, died, return_exceptions=True)


def _last_words(console: Path) -> str:
    try:
        text = console.read_bytes()[-CONSOLE_TAIL:].decode(errors="replace").strip()
    except OSError:
        text = ""
    return f"its console ends with: {text}" if text else "its console is empty."
