"""Volumes of the repository that VMs of this node read on demand: made available before a VM opens them, and kept.

A volume is a file of the layer server. It is there until the host restarts, so it is asked for before each use; its
layers stay in the repository while this node's claim names them, whoever deletes the snapshot that they came from.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import structlog

from aenv.background import Background
from aenv.errors import AenvError, NotFoundError
from aenv.orchestrator.remote import remotely
from aenv.orchestrator.store import Store
from aenv.orchestrator.warming import warm
from aenv.snapshot.manifest import Manifest, Volume
from aenv.snapshot.model import Committed, DiskLayer, MemoryBase, is_volume, volume_id
from aenv.snapshot.reachability import chain
from aenv.snapshot.repository import Claim, Repository

log = structlog.get_logger()


class LayerServer(Protocol):
    """What this node asks of the layer server: see ``aenv.storage.layerd.client``."""

    async def ensure_running(self) -> bool: ...

    async def export(self, name: str, volume: Volume, *, sequential: bool) -> Path: ...

    async def unexport(self, name: str) -> object: ...


def volumes_of(store: Store, disk: str, memory_base: str | None) -> list[str]:
    """Ids of the volumes that a VM on that disk layer and memory base reads."""
    names = [layer.id for layer in chain(store.layers.rows, disk)]
    if memory_base is not None:
        names.append(memory_base)
    return [name for name in names if is_volume(name)]


def put_volumes(store: Store, manifest: Manifest) -> tuple[str, str | None]:
    """Record a committed snapshot's disk and memory as volumes; their ids. Inside a transaction."""

    def put(volume: Volume) -> str:
        name = volume_id(volume)
        store.committed.put(Committed(name, volume))
        return name

    disk, memory = put(manifest.disk), manifest.memory
    store.layers.put(DiskLayer(disk, None, "raw"))
    if memory is None:
        return disk, None
    base = put(memory)
    store.memory.put(MemoryBase(base, sum(layer.size for layer in memory.layers)))
    return disk, base


class Volumes:
    def __init__(self, store: Store, server: LayerServer, repository: Repository, owner: str) -> None:
        """``owner`` names this node in claims."""
        self._store = store
        self._server = server
        self._repository = repository
        self.owner = owner
        self._claim: Claim | None = None
        self._claiming = asyncio.Lock()
        self._taken_over = False  # the claim holds what former lives of this node recorded, and theirs are gone
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # one exports or removes a file
        self._coming: Counter[str] = Counter()  # digests that records are about to name
        self._warmed: set[str] = set()  # memories whose hot parts were read ahead
        self.background = Background()

    async def take_over(self) -> None:
        """Claim what former lives of this node left recorded, then let the claims go that they held; once.

        To be called until it succeeds: those claims hold on for hours and are renewed by nobody. Raises SourceError.
        """
        if self._taken_over:
            return
        async with self._claiming:
            await self._claim_anew()
        await remotely(self._repository.drop_claims, self.owner)
        self._taken_over = True

    async def prepare(self) -> None:
        """Start the layer server before anybody waits for it."""
        try:
            await self._server.ensure_running()
        except AenvError as error:
            log.warning("the layer server could not be started ahead", error=str(error))

    async def ensure(self, disk: str, memory_base: str | None = None, hot: str | None = None) -> None:
        """Have as files all volumes below a disk layer, and the memory base. Raises SourceError.

        What of the memory is ``hot`` is read ahead behind it, once as long as the file is there.
        """
        names = volumes_of(self._store, disk, memory_base)
        if not names:
            return
        if await self._server.ensure_running():
            self._warmed.clear()
        for name in names:
            # Files on a disk are read in order, pages of a memory are not.
            sequential = name != memory_base
            async with self._turns.setdefault(name, asyncio.Lock()):
                path = await self._server.export(name, self._store.committed[name].volume, sequential=sequential)
            if not sequential and hot is not None and name not in self._warmed:
                self._warmed.add(name)
                self.background.spawn(warm(path, hot))

    @asynccontextmanager
    async def keeping(self, digests: Iterable[str]) -> AsyncIterator[None]:
        """Claim layers that records written inside will name. Raises SourceError."""
        names = list(digests)
        self._coming.update(names)
        try:
            async with self._claiming:
                if self._claim is None:
                    self._claim = await remotely(self._repository.claim, names, self.owner)
                else:
                    await remotely(self._claim.add, names)
            yield
        finally:
            self._coming.subtract(names)
            self._coming += Counter()  # drops zeros

    def forget(self, names: Iterable[str]) -> None:
        """Their records are gone."""
        if names := list(names):
            self.background.spawn(self._forget(names))

    async def _forget(self, names: list[str]) -> None:
        for name in names:
            self._warmed.discard(name)
            async with self._turns.setdefault(name, asyncio.Lock()):
                if name not in self._store.committed.rows:  # it was not imported again meanwhile
                    with contextlib.suppress(NotFoundError):
                        await self._server.unexport(name)
        async with self._claiming:
            await self._claim_anew()

    async def _claim_anew(self) -> None:
        """One claim of exactly what is in use, then let the one before go. With ``_claiming`` held."""
        used = (row.volume.layers for row in self._store.committed.rows.values() if is_volume(row.id))
        digests = {layer.digest for layers in used for layer in layers} | set(self._coming)
        claim = await remotely(self._repository.claim, digests, self.owner) if digests else None
        former, self._claim = self._claim, claim
        if former is not None:
            await remotely(former.release)

    async def close(self) -> None:
        """The claim stays, since VMs and records do; it is dropped by the next life of the node, or expires."""
        await self.background.settle()
