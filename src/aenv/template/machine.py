"""The VM of one build: started from a snapshot or booted from a disk, captured between steps.

Its disk is a layer without a record until a capture freezes it, so that what a dead server leaves is debris that the
next start removes. A capture records snapshot and layer at once and pins them until the build ends: by then a cached
layer or a template names them, or they are garbage.
"""

import asyncio
import secrets
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from aenv.client.guest import GuestClient, GuestIdentity
from aenv.config import Settings
from aenv.errors import IncompatibleSnapshotError
from aenv.network.pool import SlotPool
from aenv.orchestrator.boot import ZERO_FREED, boot_parameters
from aenv.orchestrator.checkpoint import Checkpoints
from aenv.orchestrator.compaction import MAX_CHAIN
from aenv.orchestrator.pool import Lease, VmPool, attachment, new_vm_id
from aenv.orchestrator.store import Store
from aenv.orchestrator.volumes import Volumes
from aenv.snapshot.model import DiskLayer, MemoryBase, Snapshot
from aenv.snapshot.reachability import chain
from aenv.storage.layout import Layout, allocated_bytes, remove
from aenv.storage.lsmt import compose
from aenv.storage.merge import merge_layers
from aenv.storage.qcow2 import create_overlay
from aenv.vmm.liveness import while_alive
from aenv.vmm.protocol import MachineShape, MemoryImage, Vm, Vmm

MIB = 1 << 20


class Pins:
    """Snapshots that one build needs until it ends."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._held: list[str] = []

    def add(self, snapshot_id: str) -> None:
        self._held.append(snapshot_id)
        self._checkpoints.files.pin(snapshot_id)

    def release(self) -> None:
        held, self._held = self._held, []
        self._checkpoints.files.unpin(*held)


@dataclass(frozen=True, slots=True)
class Workshop:
    """What build machines are made of. ``initramfs_sha256`` and ``envd_version`` are of guests booted now."""

    settings: Settings
    layout: Layout
    store: Store
    vmm: Vmm
    pool: VmPool
    slots: SlotPool
    guests: GuestClient
    volumes: Volumes
    checkpoints: Checkpoints
    default_shape: MachineShape
    initramfs_sha256: str
    envd_version: str

    def runs_here(self, snapshot: Snapshot, initramfs_sha256: str, shape: MachineShape) -> bool:
        """Whether a machine of ``shape`` can go on from the snapshot, rather than boot from its disk."""
        return (
            snapshot.has_memory
            and snapshot.shape == shape
            and not snapshot.fingerprint.mismatches(self.vmm.fingerprint)
            and initramfs_sha256 == self.initramfs_sha256
        )

    async def restore(self, snapshot: Snapshot, pins: Pins) -> "BuildMachine":
        """A machine that runs on from ``snapshot``. Raises CapacityError, VmmError, SandboxStartError."""
        pins.add(snapshot.id)
        await self.volumes.ensure(snapshot.disk, snapshot.memory_base, snapshot.hot)
        lease = await self.pool.acquire(snapshot.shape)
        snapshot = self.store.snapshots[snapshot.id]  # its memory may have been merged meanwhile
        assert snapshot.memory_base is not None  # see ``runs_here``
        layer = _new_layer(snapshot.disk)
        machine = BuildMachine(self, pins, lease, layer, snapshot.memory_base, snapshot.shape, snapshot.disk_mib)
        try:
            disk = self.layout.layer(layer)
            parent = self.store.layers[snapshot.disk]
            create_overlay(disk, self.layout.layer(parent), snapshot.disk_mib * MIB, parent.format)
            delta = self.layout.delta(snapshot.id) if snapshot.delta_bytes else None
            memory = MemoryImage(self.layout.memory(snapshot.memory_base), delta)
            await lease.vm.restore(memory, self.layout.state(snapshot.id), disk)
            await machine.introduce(snapshot.guest_token, self.settings.start_timeout)
        except BaseException:
            await asyncio.shield(machine.close())
            raise
        return machine

    async def boot(self, parent: DiskLayer, shape: MachineShape, disk_mib: int, pins: Pins) -> "BuildMachine":
        """A machine booted from a disk, which is not written to. Raises CapacityError, VmmError, SandboxStartError.

        ``parent`` is kept by a pin, or is a new layer without a record, which the machine then owns.
        """
        layer = _new_layer(parent.id)
        disk = self.layout.layer(layer)
        if parent.id in self.store.layers.rows:
            await self.volumes.ensure(parent.id)
        slot = await self.slots.acquire()
        vm: Vm | None = None
        try:
            create_overlay(disk, self.layout.layer(parent), disk_mib * MIB, parent.format)
            parameters = boot_parameters(slot, self.settings.dns, "sandbox", ZERO_FREED)
            vm = await self.vmm.boot(new_vm_id(), shape, attachment(slot), disk, parameters)
        except BaseException:
            if vm is not None:
                await asyncio.shield(vm.kill())
            disk.unlink(missing_ok=True)
            await asyncio.shield(self.slots.release(slot))
            raise
        machine = BuildMachine(self, pins, Lease(vm, slot), layer, None, shape, disk_mib)
        if parent.id not in self.store.layers.rows:
            machine.own(parent)
        try:
            await machine.introduce(None, self.settings.boot_timeout)
        except BaseException:
            await asyncio.shield(machine.close())
            raise
        return machine

    async def settled(self, snapshot: Snapshot, pins: Pins) -> DiskLayer:
        """The disk of a snapshot with what was in its guest's memory only; a layer without a record, the caller's.

        Raises IncompatibleSnapshotError where it cannot run.
        """
        differences = snapshot.fingerprint.mismatches(self.vmm.fingerprint)
        if differences:
            raise IncompatibleSnapshotError(
                f"The snapshot cannot be restored here: {'; '.join(differences)}.", "Take it anew, or without memory."
            )
        machine = await self.restore(snapshot, pins)
        try:
            return await machine.settle()
        finally:
            await machine.close()


def _new_layer(parent: str) -> DiskLayer:
    return DiskLayer(id=secrets.token_hex(10), parent=parent, format="qcow2")


class BuildMachine:
    """Made by ``Workshop`` only. ``close`` it whatever happens."""

    def __init__(
        self,
        workshop: Workshop,
        pins: Pins,
        lease: Lease,
        layer: DiskLayer,
        memory_base: str | None,
        shape: MachineShape,
        disk_mib: int,
    ) -> None:
        self._workshop = workshop
        self._pins = pins
        self._lease = lease
        self._layer = layer  # written to now; without a record
        self._memory_base = memory_base  # None: it was booted
        self._shape = shape
        self._disk_mib = disk_mib
        self._owned: list[DiskLayer] = []  # below it, without a record until the first capture
        self._closed = False

    def own(self, layer: DiskLayer) -> None:
        self._owned.append(layer)

    @property
    def vm(self) -> Vm:
        return self._lease.vm

    @property
    def disk_mib(self) -> int:
        return self._disk_mib

    async def grow(self, disk_mib: int) -> None:
        """Make the root disk larger; its file system is the guest's business. Raises VmmError."""
        await self.vm.grow_disk(disk_mib * MIB)
        self._disk_mib = disk_mib

    @property
    def host(self) -> str:
        return self._lease.slot.host_address

    async def introduce(self, token: str | None, timeout: float) -> None:
        """Wait for the guest, then set its clock, entropy and name."""
        guests, deadline = self._workshop.guests, time.monotonic() + timeout
        await while_alive(self.vm, guests.wait_until_ready(self.host, deadline))
        identity = GuestIdentity("template", "template", None)
        await while_alive(self.vm, guests.introduce(self.host, identity, [token], deadline))

    async def capture(self) -> Snapshot:
        """Keep the machine as it is now, recorded and pinned, and let it run on.

        Of a booted machine this writes all memory, each time: ``finish`` it and restore that instead.
        """
        snapshot = await self._capture()
        layout = self._workshop.layout
        fresh = _new_layer(self._layer.id)
        try:
            await self.vm.rebase_disk(layout.layer(fresh))
        except BaseException:
            remove(layout.snapshot(snapshot.id))
            layout.layer(fresh).unlink(missing_ok=True)
            raise
        frozen, self._layer = self._layer, fresh
        await self._record(snapshot, frozen)
        await self.vm.cont()
        # The guest's clock stood still meanwhile.
        await self.introduce(None, self._workshop.settings.start_timeout)
        return self._workshop.store.snapshots[snapshot.id]

    async def finish(self) -> Snapshot:
        """Keep the machine as a snapshot with a memory base of its own and a shallow disk, and end it.

        The host's disk has all of it when this returns.
        """
        snapshot = await self._capture()
        frozen = self._layer
        await self.close(keep_disk=True)
        await self._record(snapshot, frozen, own_memory=True)
        await self._flatten(snapshot.id)
        kept = self._workshop.store.snapshots[snapshot.id]
        await self._workshop.checkpoints.files.make_durable(kept)
        return kept

    async def settle(self) -> DiskLayer:
        """End it with everything written out; its disk, a layer without a record, which is the caller's.

        Raises GuestUnresponsiveError when the guest cannot be asked to write.
        """
        await while_alive(self.vm, self._workshop.guests.freeze(self.host, None))
        await self.vm.stop()
        await self.close(keep_disk=True)
        return self._layer

    async def close(self, *, keep_disk: bool = False) -> None:
        """End the VM and forget its disk; idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._workshop.pool.discard(self._lease)
        finally:
            remove(self._workshop.layout.vms / self.vm.id)
            if not keep_disk:
                for layer in (self._layer, *self._owned):
                    self._workshop.layout.layer(layer).unlink(missing_ok=True)

    async def _capture(self) -> Snapshot:
        layout = self._workshop.layout
        snapshot_id = secrets.token_hex(10)
        layout.snapshot(snapshot_id).mkdir(mode=0o700)
        try:
            await self.vm.stop()
            stats = await self.vm.capture(layout.state(snapshot_id), layout.delta(snapshot_id))
        except BaseException:
            remove(layout.snapshot(snapshot_id))
            raise
        return Snapshot(
            id=snapshot_id,
            owner=None,
            memory_base=self._memory_base or "",
            delta_bytes=max(1, stats.memory_bytes),
            disk=self._layer.id,
            shape=self._shape,
            disk_mib=self._disk_mib,
            fingerprint=self._workshop.vmm.fingerprint,
            guest_token=None,
            created_at=datetime.now(UTC),
            hot=stats.hot,
        )

    async def _record(self, snapshot: Snapshot, layer: DiskLayer, *, own_memory: bool = False) -> None:
        layout, store = self._workshop.layout, self._workshop.store
        memory: MemoryBase | None = None
        try:
            if self._memory_base is None or own_memory:
                memory = await self._compose(layout.delta(snapshot.id))
                snapshot = replace(snapshot, memory_base=memory.id, delta_bytes=0)
                layout.delta(snapshot.id).unlink()
            self._pins.add(snapshot.id)
            with store.transaction():
                for owned in self._owned:
                    store.layers.put(owned)
                store.layers.put(layer)
                if memory is not None:
                    store.memory.put(memory)
                store.snapshots.put(snapshot)
            self._owned.clear()
        except BaseException:
            remove(layout.snapshot(snapshot.id))
            for file in (layer, *self._owned):
                layout.layer(file).unlink(missing_ok=True)
            if memory is not None:
                layout.memory(memory.id).unlink(missing_ok=True)
            raise

    async def _compose(self, delta: Path) -> MemoryBase:
        """A memory base of its own: the present one with ``delta`` over it."""
        layout, target = self._workshop.layout, secrets.token_hex(10)
        base = layout.memory(self._memory_base) if self._memory_base else None
        path = layout.memory(target)
        writing = asyncio.ensure_future(asyncio.to_thread(compose, base, delta, path))
        try:
            await asyncio.shield(writing)
        except BaseException:
            await asyncio.wait({writing})  # a thread cannot be cancelled, and would leave the file behind
            path.unlink(missing_ok=True)
            raise
        return MemoryBase(target, allocated_bytes(path))

    async def _flatten(self, snapshot_id: str) -> None:
        """Merge the layers above the base image into one when there are many; each costs an open per start."""
        layout, store = self._workshop.layout, self._workshop.store
        snapshot = store.snapshots[snapshot_id]
        layers = chain(store.layers.rows, snapshot.disk)
        if len(layers) <= MAX_CHAIN:
            return
        base = layers[-1]
        merged = _new_layer(base.id)
        path = layout.layer(merged)
        await merge_layers(layout.layer(layers[0]), layout.layer(base), base.format, path)
        with store.transaction():
            store.layers.put(merged)
            store.snapshots.put(replace(store.snapshots[snapshot_id], disk=merged.id))
