"""What every VM that is a process of its own has, whatever runs in it; the rest is its hypervisor's."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from aenv.vmm import process
from aenv.vmm.protocol import MachineShape, NetworkAttachment
from aenv.vmm.record import VmRecord

log = structlog.get_logger()
T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=VmRecord)


async def beside(work: Awaitable[T], *others: "asyncio.Future[None]") -> T:
    """The result of ``work`` when ``others`` have come to their ends too. Its error goes before theirs."""
    try:
        result = await work
    finally:
        await asyncio.gather(*others, return_exceptions=True)
    for other in others:
        other.result()
    return result


class VmProcess(Generic[RecordT]):
    """The part of ``Vm`` that is the same for all."""

    def __init__(
        self,
        vm_id: str,
        directory: Path,
        console: Path,
        record: RecordT,
        proc: process.Process,
        executor: ThreadPoolExecutor,
    ) -> None:
        self._id = vm_id
        self._directory = directory
        self._console = console
        self._record = record
        self._process = proc
        self._executor = executor
        self._tidying: asyncio.Future[None] | None = None

    @property
    def id(self) -> str:
        return self._id

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.alive

    @property
    def console(self) -> Path:
        return self._console

    @property
    def directory(self) -> Path:
        """Its runtime files."""
        return self._directory

    @property
    def shape(self) -> MachineShape:
        return self._record.shape

    @property
    def network(self) -> NetworkAttachment:
        return self._record.network

    async def wait(self) -> int | None:
        return await self._process.wait()

    def _tidy(self, function: Callable[..., None], *arguments: Any) -> None:
        """Do what nobody waits for, once, in a worker thread; ``_tidied`` waits for it."""
        assert self._tidying is None
        self._tidying = self._blocking(function, *arguments)
        self._tidying.add_done_callback(self._report)

    def _report(self, tidying: "asyncio.Future[None]") -> None:
        # Of a process that has died it cannot work.
        if not tidying.cancelled() and (error := tidying.exception()) is not None and self.alive:
            log.error("a VM could not be tidied up after", vm=self._id, error=str(error))

    async def _tidied(self) -> None:
        if self._tidying is not None:
            await asyncio.wait({self._tidying})

    def _blocking(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
