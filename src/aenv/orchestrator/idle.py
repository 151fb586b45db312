"""Finding sandboxes that do nothing, so that their memory can be given back while they keep running."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from aenv.errors import AenvError
from aenv.orchestrator.machines import Machine
from aenv.vmm.reclaim import cpu_seconds

log = structlog.get_logger()

# Of one processor, below which a guest counts as idle. One that waits for its clock uses 0.2 to 1%.
BUSY = 0.03


@dataclass(slots=True)
class Watched:
    """One VM: its processor time when it was last looked at, since when it does little, whether it was reclaimed."""

    cpu: float
    seen: float
    idle_since: float
    reclaimed: bool = False


def look(watched: Watched, cpu: float, now: float, after: float) -> bool:
    """Take note of a VM's processor time; whether to give its memory back now: once each time it falls idle."""
    busy = cpu - watched.cpu > BUSY * (now - watched.seen)
    watched.cpu, watched.seen = cpu, now
    if busy:
        watched.idle_since, watched.reclaimed = now, False
        return False
    if watched.reclaimed or now - watched.idle_since < after:
        return False
    watched.reclaimed = True
    return True


class IdleReclaim:
    def __init__(self, running: Callable[[], Iterable[Machine]], after: float) -> None:
        """``after`` seconds of doing nothing; 0: never."""
        self._running = running
        self._after = after
        self._watched: dict[str, Watched] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._after:
            self._task = asyncio.create_task(self._run(), name="idle-reclaim")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(10.0, self._after / 2))
            machines = {machine.vm.id: machine for machine in self._running()}
            self._watched = {name: seen for name, seen in self._watched.items() if name in machines}
            for name, machine in machines.items():
                cpu = cpu_seconds(machine.vm.pid)
                if cpu is None:
                    continue
                watched = self._watched.setdefault(name, Watched(cpu, clock(), clock()))
                if look(watched, cpu, clock(), self._after):
                    await self._reclaim(machine)

    async def _reclaim(self, machine: Machine) -> None:
        try:
            if await machine.vm.reclaim():
                log.debug("gave back the memory of an idle sandbox", sandbox=machine.sandbox_id)
        except AenvError as error:
            log.warning("memory could not be given back", sandbox=machine.sandbox_id, error=str(error))
