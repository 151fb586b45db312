"""A node and the repository: it publishes its snapshots, finds those of other nodes, and claims what it uses."""

import asyncio
import socket
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import structlog

from aenv.errors import AenvError
from aenv.orchestrator.eviction import Eviction
from aenv.orchestrator.files import SnapshotFiles
from aenv.orchestrator.imports import Imports
from aenv.orchestrator.model import SavedSnapshot, Template
from aenv.orchestrator.publication import Publication
from aenv.orchestrator.remote import remotely
from aenv.orchestrator.store import Store
from aenv.orchestrator.volumes import LayerServer, Volumes
from aenv.snapshot.commit import Committer, Origins
from aenv.snapshot.repository import Repository
from aenv.storage.layout import Layout

log = structlog.get_logger()

LISTING = 60.0  # seconds between two listings of the repository
CLAIMING = 60.0  # seconds between two attempts to claim what former lives of this node recorded
EVICTION = 10.0  # seconds between two looks at the disk
# Seconds between two looks whether this node deleted snapshots, whose layers are collected then. The first look takes
# it for granted: a former life may have.
COLLECTION = 300.0
GRACE = timedelta(minutes=10)  # layers younger than this are left alone


def node_name(path: Path) -> str:
    """What claims call this node, the same in all its lives: kept in a file."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        host = "".join(c if c.isalnum() or c in "-." else "-" for c in socket.gethostname())
        name = f"{host.strip('-.')[:64] or 'node'}-{uuid.uuid4().hex[:8]}"
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        temporary.write_text(name + "\n")
        temporary.replace(path)
        return name


class Sharing:
    def __init__(
        self,
        layout: Layout,
        store: Store,
        repository: Repository,
        server: LayerServer,
        name: str,
        place: str,
        origins: Origins,
    ) -> None:
        """``name`` is this node's, ``place`` the repository's. ``origins`` know of volumes that are not in it."""
        self._layout = layout
        self._store = store
        self.repository = repository
        self._committer = Committer(repository, layout.commits, f"{name}.commits", origins)
        self._former = {f"{name}.commits", f"{name}.imports"}  # owners of claims that were not dropped yet
        self._place = place
        self.volumes = Volumes(store, server, repository, f"{name}.volumes")
        self.imports = Imports(layout, store, repository, self.volumes, f"{name}.imports")
        self.publication: Publication | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._collected = -1  # of the snapshots that were deleted

    async def start(self, files: SnapshotFiles, is_short: Callable[[], bool], *, shared: bool) -> None:
        """After recovery. ``is_short`` says that the disk has less room than it should; ``shared`` that other nodes
        use the repository, so that snapshots of theirs are to be expected.

        A repository that cannot be reached is tried again, and keeps nothing else from working.
        """
        files.on_forget = self.volumes.forget
        if shared:
            self.volumes.background.spawn(self.volumes.prepare())
        self.publication = Publication(
            self._layout, self._store, files, self.repository, self._committer, self._place
        )
        self._store.saved.on_change = self._saved_changed
        self._store.templates.on_change = self._template_changed
        self.publication.start()
        eviction = Eviction(self._layout, self._store, files, self.repository, self.volumes, is_short)
        self._tasks = [
            asyncio.create_task(self._regularly(self._take_over, CLAIMING), name="claims-of-former-lives"),
            asyncio.create_task(self._regularly(self.imports.refresh, LISTING), name="repository-listing"),
            asyncio.create_task(self._regularly(eviction.relieve, EVICTION), name="snapshot-eviction"),
            asyncio.create_task(self._regularly(self._collect, COLLECTION, COLLECTION), name="repository-collection"),
        ]

    async def _take_over(self) -> None:
        """What former lives of this node claimed: volumes that are on record, and commits and imports broken off."""
        await self.volumes.take_over()
        for owner in list(self._former):
            await remotely(self.repository.drop_claims, owner)
            self._former.discard(owner)

    def _saved_changed(self, before: SavedSnapshot | None, after: SavedSnapshot | None) -> None:
        assert self.publication is not None
        if any(saved is not None and not saved.imported for saved in (before, after)):
            self.publication.kick()

    def _template_changed(self, before: Template | None, after: Template | None) -> None:
        assert self.publication is not None
        if before is None or after is None or (before.tags, before.aliases) != (after.tags, after.aliases):
            self.publication.kick()

    async def _regularly(self, work: Callable[[], Awaitable[object]], interval: float, first: float = 0.0) -> None:
        await asyncio.sleep(first)
        while True:
            try:
                await work()
            except (AenvError, OSError) as error:
                log.warning("the repository does not answer as it should; trying again", error=str(error))
            except Exception:
                log.exception("work with the repository failed; trying again")
            await asyncio.sleep(interval)

    async def _collect(self) -> None:
        """Free the layers of snapshots that this node deleted, but those that others name or use."""
        assert self.publication is not None
        deleted = self.publication.deleted + self.imports.deleted
        if deleted == self._collected:
            return
        report = await remotely(self.repository.gc, GRACE)
        log.info("collected layers of the repository", layers=report.layers_deleted, bytes=report.bytes_freed)
        if not report.young:
            self._collected = deleted

    async def close(self) -> None:
        """Published snapshots and claims stay; the next life of the node goes on with what was under way."""
        for task in self._tasks:
            task.cancel()
        if self.publication is not None:
            await self.publication.close()
        await self.volumes.close()
        await remotely(self.repository.close)
