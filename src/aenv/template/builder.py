"""Makes a template: boots a root filesystem, lets it settle, and keeps the running machine as a snapshot."""

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from aenv.client import process
from aenv.client.guest import GuestClient, GuestIdentity
from aenv.config import Settings
from aenv.errors import SandboxStartError
from aenv.guest.artifacts import GuestArtifacts
from aenv.network.pool import SlotPool
from aenv.orchestrator.boot import ZERO_FREED, boot_parameters
from aenv.orchestrator.model import Template
from aenv.orchestrator.pool import attachment, new_vm_id
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer, MemoryBase, Snapshot
from aenv.storage.layout import Layout, allocated_bytes, remove
from aenv.storage.lsmt import compose
from aenv.storage.qcow2 import create_overlay
from aenv.vmm.liveness import while_alive
from aenv.vmm.protocol import MachineShape, Vm, Vmm

MIB = 1 << 20

# Run once before the capture, so that every sandbox starts with what most commands need in its page cache.
SETTLE = (
    ("user", "true"),
    ("user", "python3 -c 'import json, subprocess'"),
    ("root", "sync"),
)
SETTLE_TIMEOUT = 120.0  # seconds for one of them, on an emulated CPU


class TemplateBuilder:
    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        store: Store,
        vmm: Vmm,
        slots: SlotPool,
        guests: GuestClient,
        progress: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._layout = layout
        self._store = store
        self._vmm = vmm
        self._slots = slots
        self._guests = guests
        self._progress = progress

    async def from_rootfs(
        self, rootfs: Path, aliases: Sequence[str], shape: MachineShape, disk_mib: int, artifacts: GuestArtifacts
    ) -> Template:
        """Boot ``rootfs`` (a raw ext4 image, never written) and commit the settled machine as a template.

        Raises SandboxStartError when the guest does not come up; nothing is left behind then.
        """
        base = DiskLayer(secrets.token_hex(10), None, "raw")
        overlay = DiskLayer(secrets.token_hex(10), base.id, "qcow2")
        snapshot_id, memory_id = secrets.token_hex(10), secrets.token_hex(10)
        made = [self._layout.layer(base), self._layout.layer(overlay), self._layout.snapshot(snapshot_id)]
        made.append(self._layout.memory(memory_id))
        try:
            os.link(rootfs, self._layout.layer(base))
            create_overlay(self._layout.layer(overlay), self._layout.layer(base), disk_mib * MIB, base.format)
            self._layout.snapshot(snapshot_id).mkdir(mode=0o700)
            size = await self._boot_and_capture(shape, overlay, snapshot_id, memory_id)
        except BaseException:
            for path in made:
                remove(path)
            raise
        now = datetime.now(UTC)
        snapshot = Snapshot(
            id=snapshot_id,
            owner=None,
            memory_base=memory_id,
            delta_bytes=0,
            disk=overlay.id,
            shape=shape,
            disk_mib=disk_mib,
            fingerprint=self._vmm.fingerprint,
            guest_token=None,
            created_at=now,
        )
        template = Template(
            id=secrets.token_hex(10),
            build_id=secrets.token_hex(16),
            aliases=tuple(aliases),
            snapshot_id=snapshot_id,
            vcpus=shape.vcpus,
            memory_mib=shape.memory_mib,
            disk_mib=disk_mib,
            envd_version=artifacts.envd_version,
            initramfs_sha256=artifacts.initramfs_sha256,
            created_at=now,
            updated_at=now,
        )
        with self._store.transaction():
            self._store.layers.put(base)
            self._store.layers.put(overlay)
            self._store.memory.put(MemoryBase(memory_id, size))
            self._store.snapshots.put(snapshot)
            self._store.templates.put(template)
        return template

    async def _boot_and_capture(
        self, shape: MachineShape, overlay: DiskLayer, snapshot_id: str, memory_id: str
    ) -> int:
        """The allocated size in bytes of the memory base that was written."""
        slot = await self._slots.acquire()
        vm: Vm | None = None
        try:
            parameters = boot_parameters(slot, self._settings.dns, "sandbox", ZERO_FREED)
            started = time.monotonic()
            self._progress("booting the guest")
            vm = await self._vmm.boot(new_vm_id(), shape, attachment(slot), self._layout.layer(overlay), parameters)
            deadline = started + self._settings.boot_timeout
            await while_alive(vm, self._guests.wait_until_ready(slot.host_address, deadline))
            self._progress(f"guest is up after {time.monotonic() - started:.1f} s; letting it settle")
            identity = GuestIdentity("template", "template", None)
            await self._guests.introduce(slot.host_address, identity, [None], time.monotonic() + SETTLE_TIMEOUT)
            for user, command in SETTLE:
                result = await process.run(slot.host_address, command, user=user, timeout=SETTLE_TIMEOUT)
                if result.exit_code != 0:
                    raise SandboxStartError(
                        f"{command!r} as {user} failed in the new template with exit code {result.exit_code}: "
                        f"{result.stderr.strip() or result.stdout.strip()}"
                    )
            self._progress("capturing its memory and devices")
            delta = self._layout.delta(snapshot_id)
            await vm.stop()
            await vm.capture(self._layout.state(snapshot_id), delta)
            await asyncio.to_thread(compose, None, delta, self._layout.memory(memory_id))
            delta.unlink()
            return allocated_bytes(self._layout.memory(memory_id))
        finally:
            if vm is not None:
                await vm.kill()
                remove(self._layout.vms / vm.id)
            await self._slots.release(slot)
