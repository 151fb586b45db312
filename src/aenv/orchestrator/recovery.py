"""What a starting server does with the records and processes that the last one left behind.

Order matters: VMs that no running sandbox owns are ended first (they hold disks and network slots), then slots
are reconciled, then records are finished or undone, and only then are files without a record removed. A disk
layer that a VM writes to is asked from the VM itself, because the server may have died between freezing a
disk and recording the new layer.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import structlog

from aenv.errors import VmmError
from aenv.network.errors import NetworkError
from aenv.network.pool import SlotPool
from aenv.network.slot import NetworkSlot
from aenv.orchestrator import lifecycle, records
from aenv.orchestrator.capacity import Capacity
from aenv.orchestrator.compaction import parent_of
from aenv.orchestrator.lifecycle import Recovery
from aenv.orchestrator.machines import Machines, egress_policy
from aenv.orchestrator.model import Sandbox, SandboxState
from aenv.orchestrator.pool import Lease
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer
from aenv.storage.layout import Layout
from aenv.vmm.protocol import Vm, Vmm

log = structlog.get_logger()


async def find_vms(store: Store, vmm: Vmm) -> dict[str, Vm]:
    """VMs that outlived the last server, by sandbox; every other VM is ended here."""
    owners = {
        s.vm_id: s.id
        for s in store.sandboxes.rows.values()
        if s.vm_id and s.state in (SandboxState.RUNNING, SandboxState.PAUSING)
    }
    found: dict[str, Vm] = {}
    known = vmm.known()
    # Together: each waits a while for a process that hangs.
    for vm_id, vm in zip(known, await asyncio.gather(*map(vmm.adopt, known)), strict=True):
        if vm is None:
            continue
        if (owner := owners.get(vm_id)) is not None:
            found[owner] = vm
        else:
            log.info("ending a VM that no sandbox owns", vm=vm_id, pid=vm.pid)
            await vm.kill()
    return found


async def recover(
    store: Store, layout: Layout, slots: SlotPool, machines: Machines, capacity: Capacity, vms: dict[str, Vm]
) -> list[Sandbox]:
    """Bring every record to a stable state; the sandboxes that run again. ``slots`` must be started."""
    running: list[Sandbox] = []
    for sandbox in list(store.sandboxes.rows.values()):
        survivor = await _surviving(sandbox, vms, slots)
        snapshot = store.snapshots.get(sandbox.snapshot_id or "")
        owned = snapshot is not None and snapshot.owner == sandbox.id
        decision = lifecycle.recover(sandbox, vm_alive=survivor is not None, has_own_snapshot=owned)
        if decision is not Recovery.KEEP:
            log.info("recovering", sandbox=sandbox.id, was=str(sandbox.state), decision=decision.name.lower())
        if decision is Recovery.ADOPT:
            assert survivor is not None
            vm, slot, disk = survivor
            adopted = await _adopt(store, sandbox, vm, disk)
            # The last server may have died before it could tell the guest its token: one that was restored has that
            # of its snapshot, one that booted has none.
            tokens = [adopted.envd_access_token, snapshot.guest_token if snapshot else None, None]
            machines.adopt(adopted, Lease(vm, slot), tokens)
            capacity.take(1, force=True)
            running.append(adopted)
        elif decision is Recovery.ROLL_BACK:
            assert snapshot is not None
            with store.transaction():
                store.sandboxes.put(records.rolled_back(sandbox, snapshot))
        elif decision is Recovery.DELETE:
            with store.transaction():
                store.sandboxes.delete(sandbox.id)
    removed = layout.remove_debris(
        layers=store.layers.rows.values(),
        memory=store.memory.rows.keys(),
        snapshots=store.snapshots.rows.keys(),
        sandboxes=store.sandboxes.rows.keys(),
        vms=[vm.id for vm in vms.values()],
    )
    for path in removed:
        log.info("removed debris", path=str(path))
    return running


async def _surviving(sandbox: Sandbox, vms: dict[str, Vm], slots: SlotPool) -> tuple[Vm, NetworkSlot, Path] | None:
    """The VM that outlived the server, its slot with the recorded policy in force, and the disk file it writes to.

    A VM without a slot, or that does not answer, is ended. The last server may have died between recording a policy
    and applying it.
    """
    vm = vms.get(sandbox.id)
    if vm is None or sandbox.slot is None:
        return None
    slot = None
    try:
        slot = slots.adopt(sandbox.slot)
        await slots.apply_policy(slot, egress_policy(sandbox.egress))
        return vm, slot, await vm.disk()
    except (NetworkError, VmmError) as error:
        log.error("ending a VM that cannot be taken over", sandbox=sandbox.id, vm=vm.id, error=str(error))
        await vms.pop(sandbox.id).kill()
        if slot is not None:
            await slots.release(slot)
        return None


async def _adopt(store: Store, sandbox: Sandbox, vm: Vm, disk: Path) -> Sandbox:
    """Record the disk layer that the VM writes to and what is below it, and let the VM run on if it was stopped for
    a capture.

    The last server may have died before it had recorded a new layer, or a merged one that it had put below.
    """
    adopted = replace(sandbox, state=SandboxState.RUNNING, disk=disk.stem)
    layer = DiskLayer(id=disk.stem, parent=await asyncio.to_thread(parent_of, disk), format="qcow2")
    with store.transaction():
        if store.layers.get(layer.id) != layer:
            store.layers.put(layer)
        store.sandboxes.put(adopted)
    await vm.cont()
    return adopted
