"""VMM processes spawned ahead, each in its own network slot, waiting for a snapshot."""

import asyncio
import secrets
import shutil
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from aenv.network.pool import SlotPool
from aenv.network.slot import NetworkSlot
from aenv.vmm.protocol import MachineShape, NetworkAttachment, Vm, Vmm

log = structlog.get_logger()

REFILL_RETRY = 5.0  # seconds before a failed refill is tried again


def attachment(slot: NetworkSlot) -> NetworkAttachment:
    return NetworkAttachment(netns=slot.netns, tap=slot.tap, mac=slot.guest_mac)


def new_vm_id() -> str:
    return secrets.token_hex(6)


@dataclass(frozen=True, slots=True)
class Lease:
    """A VM process and the network slot it is plugged into; they live and die together."""

    vm: Vm
    slot: NetworkSlot


class VmPool:
    """Hands out VM processes; those of the usual shape are ready before they are asked for."""

    def __init__(self, vmm: Vmm, slots: SlotPool, shape: MachineShape, warm: int) -> None:
        self._vmm = vmm
        self._slots = slots
        self._shape = shape
        self._warm = warm
        self._ready: deque[Lease] = deque()
        self._wake = asyncio.Event()
        self._refiller: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._refiller = asyncio.create_task(self._refill(), name="vm-pool-refill")
        self._wake.set()

    async def close(self) -> None:
        """End the waiting processes and give back their slots."""
        if self._refiller is not None:
            self._refiller.cancel()
            await asyncio.gather(self._refiller, return_exceptions=True)
        await asyncio.gather(*(self.discard(lease) for lease in self._ready))
        for lease in self._ready:
            shutil.rmtree(lease.vm.console.parent, ignore_errors=True)  # no sandbox ever had this console
        self._ready.clear()

    @property
    def ready(self) -> int:
        return len(self._ready)

    async def acquire(self, shape: MachineShape) -> Lease:
        """A waiting process of ``shape``, or a new one. Raises VmmError or CapacityError."""
        if shape == self._shape:
            while self._ready:
                lease = self._ready.popleft()
                self._wake.set()
                if lease.vm.alive:
                    return lease
                await self.discard(lease)
        return await self._spawn(shape)

    async def boot(
        self,
        vm_id: str,
        shape: MachineShape,
        disk: Path,
        prepare: Callable[[NetworkSlot], Awaitable[Mapping[str, str]]],
    ) -> Lease:
        """A VM that boots the node's kernel on ``disk``, in a slot of its own.

        ``prepare`` is called with the slot before there is a process, to record who holds it and to make the disk;
        it returns the boot parameters. Raises VmmError, CapacityError or what ``prepare`` raises.
        """
        slot = await self._slots.acquire()
        try:
            parameters = await prepare(slot)
            return Lease(await self._vmm.boot(vm_id, shape, attachment(slot), disk, parameters), slot)
        except BaseException:
            await asyncio.shield(self._slots.release(slot))
            raise

    async def discard(self, lease: Lease) -> None:
        """End the process, then free its slot: in that order, a tap in use cannot be removed."""
        try:
            await lease.vm.kill()
        finally:
            await self._slots.release(lease.slot)

    async def _spawn(self, shape: MachineShape) -> Lease:
        slot = await self._slots.acquire()
        try:
            return Lease(await self._vmm.spawn(new_vm_id(), shape, attachment(slot)), slot)
        except BaseException:
            await asyncio.shield(self._slots.release(slot))
            raise

    async def _refill(self) -> None:
        # One at a time: filling up must not take the cores from the restores that emptied the pool.
        while True:
            await self._wake.wait()
            self._wake.clear()
            while len(self._ready) < self._warm:
                try:
                    self._ready.append(await self._spawn(self._shape))
                except Exception as error:  # whatever it was: without its refiller the pool stays empty for good
                    log.warning("vm pool cannot be refilled", error=repr(error))
                    await asyncio.sleep(REFILL_RETRY)
