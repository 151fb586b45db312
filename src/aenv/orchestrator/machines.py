"""Running VMs of sandboxes: restore or boot one from a snapshot, introduce the guest, notice its death, take it down.

Nothing here decides what a sandbox may do (``lifecycle``) or records transitions other than which VM, slot and
disk a sandbox holds, which must be on record before the VM exists so that a crash leaks nothing.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from aenv.client.guest import GuestClient, GuestIdentity
from aenv.config import Settings
from aenv.errors import GuestUnresponsiveError, IncompatibleSnapshotError, SandboxStartError
from aenv.network.policy import EgressPolicy
from aenv.network.pool import SlotPool
from aenv.network.slot import NetworkSlot
from aenv.orchestrator.boot import boot_parameters
from aenv.orchestrator.model import Egress, Sandbox
from aenv.orchestrator.pool import Lease, VmPool, new_vm_id
from aenv.orchestrator.store import Store
from aenv.orchestrator.volumes import Volumes
from aenv.snapshot.model import DiskLayer, Snapshot
from aenv.storage.layout import Layout, remove
from aenv.storage.qcow2 import create_overlay
from aenv.vmm.liveness import last_words, while_alive
from aenv.vmm.protocol import Fingerprint, MemoryImage, Vm

log = structlog.get_logger()

MIB = 1 << 20
DEFAULT_EGRESS = Egress()
HEALTH_TIMEOUT = 5.0  # seconds after which a guest agent that says nothing counts as unresponsive


@dataclass(slots=True)
class Machine:
    """A running sandbox's VM. ``ready`` ends once the guest knows who it is; traffic waits for it."""

    sandbox_id: str
    lease: Lease
    generation: int
    ready: asyncio.Task[None]
    watcher: asyncio.Task[None] | None = None

    @property
    def vm(self) -> Vm:
        return self.lease.vm

    @property
    def host(self) -> str:
        return self.lease.slot.host_address


def egress_policy(egress: Egress) -> EgressPolicy:
    return EgressPolicy(
        allow_internet=egress.allow_internet is not False,
        allow_out=egress.allow_out,
        deny_out=egress.deny_out,
    )


class Machines:
    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        store: Store,
        pool: VmPool,
        slots: SlotPool,
        guests: GuestClient,
        volumes: Volumes,
        fingerprint: Fingerprint,
        on_death: Callable[[Machine, str], None],
        envd_version: str,
    ) -> None:
        """``envd_version`` is what a guest that boots here runs, whatever it ran before."""
        self._settings = settings
        self._layout = layout
        self._store = store
        self._pool = pool
        self._slots = slots
        self._guests = guests
        self._volumes = volumes
        self._fingerprint = fingerprint
        self._on_death = on_death
        self._envd_version = envd_version
        self._running: dict[str, Machine] = {}
        self._teardowns: dict[str, asyncio.Task[None]] = {}
        self._launching: Counter[str] = Counter()
        # Told the sandbox's id the moment its VM stops to answer: a VM that is taken down closes no connection.
        self.on_retire: Callable[[str], None] = lambda _: None
        self._generation = 0

    def get(self, sandbox_id: str) -> Machine | None:
        return self._running.get(sandbox_id)

    @property
    def count(self) -> int:
        return len(self._running)

    def running(self) -> list[Machine]:
        """Those whose guests have been introduced."""
        return [machine for machine in self._running.values() if machine.ready.done()]

    async def launch(
        self, sandbox: Sandbox, snapshot: Snapshot, layer: DiskLayer, *, reboot: bool = False
    ) -> Machine:
        """Run ``sandbox`` from ``snapshot`` on the new, empty disk ``layer``.

        It boots from the snapshot's disk when there is no memory, or with ``reboot`` nevertheless. The store must
        already hold both records. On any failure VM, slot and disk file are gone again and the records are left to
        the caller. Raises IncompatibleSnapshotError, CapacityError, SandboxStartError.
        """
        if reboot or not snapshot.has_memory:
            await asyncio.gather(self.settled(sandbox.id), self._volumes.ensure(snapshot.disk))
            lease = await self._boot(sandbox, snapshot, layer)
            return self._run(sandbox, lease, [None], self._settings.boot_timeout)
        if problems := snapshot.fingerprint.mismatches(self._fingerprint):
            raise IncompatibleSnapshotError(
                f"Snapshot {snapshot.id} cannot be restored on this node: {'; '.join(problems)}.",
                "Rebuild the template here, or run the node with the VMM and kernel that captured it.",
            )
        await self.settled(sandbox.id)
        self._launching[snapshot.id] += 1
        try:
            await self._volumes.ensure(snapshot.disk, snapshot.memory_base, snapshot.hot)
            lease = await self._pool.acquire(snapshot.shape)
            await self._restore(sandbox, snapshot.id, layer, lease)
        finally:
            self._launching[snapshot.id] -= 1
            self._launching += Counter()  # drops zeros
        return self._run(sandbox, lease, [snapshot.guest_token], self._settings.start_timeout)

    def launching(self, snapshot_id: str) -> bool:
        """Whether a VM is being restored from the snapshot now, so that its files must stay."""
        return self._launching[snapshot_id] > 0

    async def _restore(self, sandbox: Sandbox, snapshot_id: str, layer: DiskLayer, lease: Lease) -> None:
        try:
            # Read anew: its memory may have been merged into another base while the process was acquired.
            snapshot = self._store.snapshots[snapshot_id]
            assert snapshot.memory_base is not None
            self._hold(sandbox.id, lease.vm.id, lease.slot, snapshot.memory_base)
            disk = await self._furnish(sandbox, snapshot, layer, lease.slot)
            delta = self._layout.delta(snapshot.id) if snapshot.delta_bytes else None
            memory = MemoryImage(self._layout.memory(snapshot.memory_base), delta)
            await lease.vm.restore(memory, self._layout.state(snapshot.id), disk)
        except BaseException:
            await asyncio.shield(self._pool.discard(lease))
            self._layout.layer(layer).unlink(missing_ok=True)
            remove(self._layout.vms / lease.vm.id)
            raise

    async def _boot(self, sandbox: Sandbox, snapshot: Snapshot, layer: DiskLayer) -> Lease:
        vm_id = new_vm_id()

        async def prepare(slot: NetworkSlot) -> Mapping[str, str]:
            self._hold(sandbox.id, vm_id, slot, None, envd_version=self._envd_version)
            await self._furnish(sandbox, snapshot, layer, slot)
            return boot_parameters(slot, self._settings.dns, sandbox.id, sandbox.boot_arguments)

        disk = self._layout.layer(layer)
        try:
            return await self._pool.boot(vm_id, snapshot.shape, disk, prepare)
        except BaseException:
            disk.unlink(missing_ok=True)
            remove(self._layout.vms / vm_id)
            raise

    async def _furnish(self, sandbox: Sandbox, snapshot: Snapshot, layer: DiskLayer, slot: NetworkSlot) -> Path:
        """The sandbox's new disk, and its policy in the slot: both before anything of the guest runs."""
        assert layer.parent is not None
        disk = self._layout.layer(layer)
        parent = self._store.layers[layer.parent]
        create_overlay(disk, self._layout.layer(parent), snapshot.disk_mib * MIB, parent.format)
        if sandbox.egress != DEFAULT_EGRESS:
            await self._slots.apply_policy(slot, egress_policy(sandbox.egress))
        return disk

    async def apply_egress(self, machine: Machine, egress: Egress) -> None:
        """Make ``egress`` hold, for open connections as well. Raises NetworkError."""
        await self._slots.apply_policy(machine.lease.slot, egress_policy(egress))

    def adopt(self, sandbox: Sandbox, lease: Lease, tokens: Sequence[str | None]) -> Machine:
        """Take over a VM that outlived the server, perhaps with its disk frozen. Envd may hold any of ``tokens``."""
        return self._run(sandbox, lease, tokens, self._settings.start_timeout, thaw=True)

    def _run(
        self,
        sandbox: Sandbox,
        lease: Lease,
        tokens: Sequence[str | None],
        timeout: float,
        *,
        thaw: bool = False,
    ) -> Machine:
        self._generation += 1
        ready = while_alive(lease.vm, self.introduce(sandbox, lease, tokens, timeout, thaw=thaw))
        # A failure is reported to whoever waits; nobody may be waiting, and that is not an error of its own.
        ready.add_done_callback(lambda task: task.cancelled() or task.exception())
        machine = Machine(sandbox.id, lease, self._generation, ready)
        machine.watcher = asyncio.create_task(self._watch(machine), name=f"watch-{sandbox.id}")
        self._running[sandbox.id] = machine
        return machine

    async def introduce(
        self,
        sandbox: Sandbox,
        lease: Lease,
        tokens: Sequence[str | None],
        timeout: float,
        *,
        thaw: bool = False,
    ) -> None:
        """As soon as the guest answers, set its clock, entropy, identity and token."""
        deadline = time.monotonic() + timeout
        identity = GuestIdentity(
            sandbox_id=sandbox.id,
            template_id=sandbox.template_id,
            access_token=sandbox.envd_access_token,
            env_vars=sandbox.env_vars,
            default_user=sandbox.default_user,
            default_workdir=sandbox.default_workdir,
        )
        host = lease.slot.host_address
        if thaw:
            await self._guests.wait_until_ready(host, deadline)
            try:
                await self._guests.thaw(host, tokens)
            except GuestUnresponsiveError as error:  # most probably it was not frozen either
                log.warning("guest could not be thawed", sandbox=sandbox.id, error=str(error))
        await self._guests.introduce(host, identity, tokens, deadline)

    async def check_health(self, machine: Machine, timeout: float = HEALTH_TIMEOUT) -> None:
        """Raises GuestUnresponsiveError when the guest's agent does not answer within ``timeout`` seconds."""
        try:
            await self._guests.wait_until_ready(machine.host, time.monotonic() + timeout)
        except SandboxStartError as error:
            raise GuestUnresponsiveError(
                f"The guest agent of sandbox {machine.sandbox_id!r} does not answer.", "The sandbox was not changed."
            ) from error

    async def freeze(self, sandbox: Sandbox, machine: Machine) -> None:
        """All of the guest's files on its disk, and none written until ``thaw``. Raises GuestUnresponsiveError."""
        await self._guests.freeze(machine.host, sandbox.envd_access_token)

    async def thaw(self, sandbox: Sandbox, machine: Machine) -> None:
        await self._guests.thaw(machine.host, [sandbox.envd_access_token])

    async def _watch(self, machine: Machine) -> None:
        """Report the VM's death, or a guest that never became ready."""
        died = asyncio.create_task(machine.vm.wait())
        try:
            await asyncio.wait({died, machine.ready}, return_when=asyncio.FIRST_COMPLETED)
            if not died.done() and not machine.ready.cancelled() and (error := machine.ready.exception()):
                self._on_death(machine, str(error))
                return
            status = await died
        finally:
            died.cancel()
        said = await asyncio.to_thread(last_words, machine.vm)  # its files go with it
        self._on_death(machine, f"its VMM process ended (status {status}); {said}")

    def _hold(
        self,
        sandbox_id: str,
        vm_id: str,
        slot: NetworkSlot,
        memory_base: str | None,
        *,
        envd_version: str | None = None,
    ) -> None:
        held = replace(self._store.sandboxes[sandbox_id], vm_id=vm_id, slot=slot.index, memory_base=memory_base)
        if envd_version is not None:
            held = replace(held, envd_version=envd_version)
        with self._store.transaction():
            self._store.sandboxes.put(held)

    def retire(self, sandbox_id: str) -> asyncio.Task[None] | None:
        """Take the VM down in the background and keep its console log; the task, or None without a VM."""
        machine = self._running.pop(sandbox_id, None)
        if machine is None:
            return self._teardowns.get(sandbox_id)
        self.on_retire(sandbox_id)
        task = asyncio.create_task(self._teardown(machine), name=f"teardown-{sandbox_id}")
        self._teardowns[sandbox_id] = task
        task.add_done_callback(lambda done: self._forget(sandbox_id, done))
        return task

    def _forget(self, sandbox_id: str, task: asyncio.Task[None]) -> None:
        if self._teardowns.get(sandbox_id) is task:
            del self._teardowns[sandbox_id]
        if not task.cancelled() and (error := task.exception()):
            log.error("teardown failed", sandbox=sandbox_id, error=str(error))

    async def settled(self, sandbox_id: str) -> None:
        """Wait until a previous VM of the sandbox is gone: it holds the disk's file lock until then."""
        if (task := self._teardowns.get(sandbox_id)) is not None:
            await asyncio.wait({task})

    async def _teardown(self, machine: Machine) -> None:
        self.detach(machine)
        await self._pool.discard(machine.lease)
        self._layout.keep_console(machine.vm.id, machine.sandbox_id)

    def detach(self, machine: Machine) -> None:
        """Stop watching a VM without touching it: the server leaves, the VM stays."""
        machine.ready.cancel()
        if machine.watcher is not None:
            machine.watcher.cancel()

    async def close(self) -> None:
        """Finish teardowns and let go of running VMs, which stay."""
        for machine in self._running.values():
            self.detach(machine)
        self._running.clear()
        if self._teardowns:
            await asyncio.wait(set(self._teardowns.values()))

    async def wait_ready(self, machine: Machine) -> None:
        """Until the guest has been introduced. Raises SandboxStartError when that failed."""
        try:
            await asyncio.shield(machine.ready)
        except asyncio.CancelledError:
            if machine.ready.cancelled():
                raise SandboxStartError(
                    f"Sandbox {machine.sandbox_id} was stopped before its guest came up."
                ) from None
            raise
