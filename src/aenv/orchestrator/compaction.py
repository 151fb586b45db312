"""Keeping chains of disk layers short: the newest frozen layers of one are merged into one layer while nobody waits.

Every pause, fork and saved snapshot adds a layer, and each layer costs an open when the disk is opened. Which to
merge is a pure decision (``layers_to_merge``): sizes grow towards the base as in a log-structured merge tree, so that
a byte is copied a logarithmic number of times however often a sandbox is saved.

A running VM takes the merged layer in place of those it was made of; nothing of the guest's view changes. In which
order records and the disk's header follow each other so that a crash leaves a disk that opens is in
``docs/internals/crash-safety.md``.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import structlog

from aenv.background import Background
from aenv.errors import AenvError, CapacityError
from aenv.orchestrator.checkpoint import Checkpoints
from aenv.orchestrator.files import sync_all
from aenv.orchestrator.machines import Machines
from aenv.orchestrator.model import Sandbox, SandboxState
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer
from aenv.snapshot.reachability import chain
from aenv.storage.layout import allocated_bytes
from aenv.storage.merge import merge_layers
from aenv.storage.qcow2 import read_header

log = structlog.get_logger()

MAX_CHAIN = 12  # layers of a disk above which it is compacted


def layers_to_merge(sizes: Sequence[int], limit: int = MAX_CHAIN) -> int:
    """How many of the newest layers to merge; 0: none. ``sizes`` are bytes, newest first, without the base.

    Half of what is allowed stays free after it, and a layer much larger than all newer ones is left alone if it can.
    """
    if len(sizes) < limit:
        return 0
    count, total = 1, sizes[0]
    while count < len(sizes) and (len(sizes) - count > limit // 2 or sizes[count] <= 2 * total):
        total += sizes[count]
        count += 1
    return count if count > 1 else 0


class Compaction:
    def __init__(
        self,
        store: Store,
        machines: Machines,
        checkpoints: Checkpoints,
        locked: Callable[[str], AbstractAsyncContextManager[None]],
    ) -> None:
        """``locked`` serialises operations on one sandbox."""
        self._store = store
        self._machines = machines
        self._checkpoints = checkpoints
        self._locked = locked
        self._busy: set[str] = set()  # sandboxes at work
        self.background = Background()

    def consider(self, sandbox: Sandbox) -> None:
        """Compact the sandbox's disk in the background if it is due. Called after each capture."""
        if sandbox.id not in self._busy and self._due(sandbox):
            self._busy.add(sandbox.id)
            self.background.spawn(self._compact(sandbox))

    def _frozen(self, sandbox: Sandbox) -> list[DiskLayer]:
        """Layers of the sandbox's disk that nobody writes to, newest first, the base included."""
        if sandbox.disk is None or sandbox.disk not in self._store.layers.rows:
            return []
        layers = chain(self._store.layers.rows, sandbox.disk)
        return layers if sandbox.state is SandboxState.PAUSED else layers[1:]

    def _due(self, sandbox: Sandbox) -> int:
        layers = self._frozen(sandbox)[:-1]
        if len(layers) < MAX_CHAIN:
            return 0
        return layers_to_merge([allocated_bytes(self._checkpoints.layout.layer(layer)) for layer in layers])

    async def _compact(self, sandbox: Sandbox) -> None:
        try:
            while count := self._due(sandbox):
                layers = self._frozen(sandbox)
                top, below = layers[0], layers[count]
                merged = DiskLayer(id=secrets.token_hex(10), parent=below.id, format="qcow2")
                path = self._checkpoints.layout.layer(merged)
                with self._checkpoints.files.reading(layers):
                    try:
                        await merge_layers(
                            self._checkpoints.layout.layer(top),
                            self._checkpoints.layout.layer(below),
                            below.format,
                            path,
                        )
                        # What it replaces may have been made durable.
                        await asyncio.to_thread(sync_all, [path, path.parent])
                        async with self._locked(sandbox.id):
                            swapped = await self._swap(sandbox.id, top, merged)
                    except BaseException:
                        if merged.id not in self._store.layers.rows:
                            path.unlink(missing_ok=True)
                        raise
                if not swapped:
                    return
                log.info("merged disk layers", sandbox=sandbox.id, layers=count)
                self._checkpoints.files.collect_garbage()
                sandbox = self._store.sandboxes[sandbox.id]
        except (AenvError, OSError) as error:
            log.error("disk layers could not be merged", sandbox=sandbox.id, error=str(error))
        finally:
            self._busy.discard(sandbox.id)

    async def _swap(self, sandbox_id: str, top: DiskLayer, merged: DiskLayer) -> bool:
        """Put ``merged`` in the place of ``top`` where the sandbox's disk still is as it was."""
        sandbox = self._store.sandboxes.get(sandbox_id)
        if sandbox is not None and sandbox.disk is not None:
            if sandbox.state is SandboxState.PAUSED and sandbox.disk == top.id:
                return self._swap_paused(sandbox, merged)
            writing = self._store.layers[sandbox.disk]
            if sandbox.state is SandboxState.RUNNING and writing.parent == top.id:
                return await self._swap_running(sandbox, writing, merged)
        self._checkpoints.layout.layer(merged).unlink(
            missing_ok=True
        )  # it was paused, resumed, saved or killed meanwhile
        return False

    def _swap_paused(self, sandbox: Sandbox, merged: DiskLayer) -> bool:
        assert sandbox.snapshot_id is not None
        snapshot = self._store.snapshots[sandbox.snapshot_id]
        with self._store.transaction():
            self._put(merged, snapshot.disk)
            self._store.snapshots.put(replace(snapshot, disk=merged.id))
            self._store.sandboxes.put(replace(sandbox, disk=merged.id))
        return True

    def _put(self, merged: DiskLayer, top: str) -> None:
        """Record a layer that reads as ``top`` does: what is committed of the one is so of the other."""
        self._store.layers.put(merged)
        if (known := self._store.committed.get(top)) is not None:
            self._store.committed.put(replace(known, id=merged.id))

    async def _swap_running(self, sandbox: Sandbox, writing: DiskLayer, merged: DiskLayer) -> bool:
        machine = self._machines.get(sandbox.id)
        if machine is None:
            self._checkpoints.layout.layer(merged).unlink(missing_ok=True)
            return False
        # The header of the disk will name the merged layer before its record does: both chains stay until then.
        with self._store.transaction():
            self._store.layers.put(merged)
        disk = self._checkpoints.layout.layer(writing)
        with self._checkpoints.files.reading([merged]):
            try:
                await machine.vm.replace_backing(self._checkpoints.layout.layer(merged))
            finally:
                # It may have failed after it had changed the header, and what the header says is opened next.
                actual = replace(writing, parent=(await asyncio.to_thread(parent_of, disk)) or writing.parent)
                try:
                    with self._store.transaction():
                        self._store.layers.put(actual)
                except CapacityError:
                    self._store.layers.remember(actual)
        return True


def parent_of(disk: Path) -> str | None:
    """The id of the layer that a layer's file names as its backing."""
    backing = read_header(disk).backing
    return backing.stem if backing is not None else None
