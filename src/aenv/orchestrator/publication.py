"""Saved snapshots and built templates on their way to the repository, and out of it again.

What the repository should have of this node follows from the node's records (``wanted``); what it has is on record
too (``Store.published``). One task makes the second like the first, whatever happened in between: a name that is new
is committed, one that went is removed. So there is no queue to lose, and a crash at any point is gone over again.

A snapshot can be used here the moment it is taken; reading, compressing and storing it happens behind that.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from dataclasses import asdict, dataclass, field

import structlog

from aenv.errors import AenvError, ConflictError, SnapshotNotFoundError
from aenv.orchestrator import catalog
from aenv.orchestrator.files import SnapshotFiles
from aenv.orchestrator.model import Published, SavedSnapshot, Template
from aenv.orchestrator.remote import remotely
from aenv.orchestrator.store import Store
from aenv.snapshot.commit import CommitResult, CommitSource, Committer, LocalMemory
from aenv.snapshot.model import Snapshot
from aenv.snapshot.reachability import chain
from aenv.snapshot.repository import Repository
from aenv.storage.layout import Layout

log = structlog.get_logger()

HOT = "hot"  # attribute of a manifest: see ``Snapshot.hot``
LEAVE = 10.0  # seconds that a node that stops waits for the commit under way
RETRY = 5.0, 300.0  # seconds until what failed is tried again: at first, and at most


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a snapshot's manifest says about how to start sandboxes from it."""

    public_id: str  # of the template or saved snapshot
    name: str | None
    sandbox_id: str  # what it is of; empty for a template
    envd_version: str
    env_vars: Mapping[str, str] = field(default_factory=dict)
    default_user: str = "user"
    default_workdir: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one name in the repository should be. ``key`` is as ``Published.id``: ``name:tag``."""

    key: str
    snapshot_id: str
    attributes: Attributes


def wanted(store: Store) -> dict[str, Wanted]:
    """Every name that this node is to have in the repository.

    A saved snapshot has its id and its name; a template that was built its id and aliases, with each tag. What every
    node makes itself (``base``) has no builds and is left out.
    """
    found: dict[str, Wanted] = {}

    def add(name: str, tag: str, snapshot_id: str, attributes: Attributes) -> None:
        key = f"{name}:{tag}"
        found[key] = Wanted(key, snapshot_id, attributes)

    for saved in store.saved.rows.values():
        if not saved.imported:
            for name in (saved.id, saved.name):
                if name is not None:
                    add(name, saved.tag, saved.snapshot_id, _of_saved(saved))
    for template in store.templates.rows.values():
        for tag, target in template.tags.items():
            build = store.builds.get(target.build_id)
            if build is not None and build.image is not None:
                built = catalog.with_build(template, build)
                for name in (template.id, *template.aliases):
                    add(name, tag, built.snapshot_id, _of_template(built))
    return found


def _of_saved(saved: SavedSnapshot) -> Attributes:
    return Attributes(
        saved.id, saved.name, saved.sandbox_id, saved.envd_version,
        saved.env_vars, saved.default_user, saved.default_workdir,
    )  # fmt: skip


def _of_template(template: Template) -> Attributes:
    return Attributes(
        template.id, template.aliases[0] if template.aliases else None, "", template.envd_version,
        template.env_vars, template.default_user, template.default_workdir,
    )  # fmt: skip


class Publication:
    def __init__(
        self,
        layout: Layout,
        store: Store,
        files: SnapshotFiles,
        repository: Repository,
        committer: Committer,
        place: str,
    ) -> None:
        """``place`` says which repository it is: what is in another one is committed again."""
        self._layout = layout
        self._store = store
        self._files = files
        self._repository = repository
        self._committer = committer
        self._place = place
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.deleted = 0  # committed snapshots, since the start

    def start(self) -> None:
        self.kick()
        self._task = asyncio.create_task(self._run(), name="publication")

    def kick(self) -> None:
        """Records may have changed what should be in the repository."""
        self._idle.clear()
        self._changed.set()

    async def settle(self) -> None:
        """Wait until the repository is as it should be, or what failed waits to be tried again."""
        await self._idle.wait()

    async def close(self) -> None:
        """Break off; the next life goes on with it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self) -> None:
        pause = RETRY[0]
        while True:
            self._changed.clear()
            failed = await self._reconcile()
            if not self._changed.is_set():
                self._idle.set()
            if not failed:
                pause = RETRY[0]
                await self._changed.wait()
                continue
            try:
                await asyncio.wait_for(self._changed.wait(), pause)
            except TimeoutError:
                pause = min(2 * pause, RETRY[1])

    async def _reconcile(self) -> bool:
        """One pass, which ends early when records change; whether something failed that is to be tried again."""
        # What goes comes first: it is little work, and new snapshots may come faster than they are committed.
        failed, now = False, wanted(self._store)
        for row in list(self._store.published.rows.values()):
            if row.id not in now and row.id not in wanted(self._store):
                failed |= not await self._attempt(self._retract(row), row.id)
        for want in now.values():
            if not self._is_published(want):
                failed |= not await self._attempt(self._publish(want), want.key)
                if self._changed.is_set():
                    break
        return failed

    def _is_published(self, want: Wanted) -> bool:
        row = self._store.published.get(want.key)
        published = row is not None and (row.snapshot_id, row.repository) == (want.snapshot_id, self._place)
        return published or want.snapshot_id not in self._store.snapshots.rows

    async def _attempt(self, work: Awaitable[None], name: str) -> bool:
        try:
            await work
        except (AenvError, OSError) as error:
            log.error("the repository could not be brought up to date; trying again", name=name, error=str(error))
            return False
        except Exception:  # what is wrong with one snapshot must not keep the others from being committed
            log.exception("the repository could not be brought up to date; trying again", name=name)
            return False
        return True

    async def _publish(self, want: Wanted) -> None:
        former = self._store.published.get(want.key)
        rows = self._store.published.rows.values()
        if not any((row.snapshot_id, row.repository) == (want.snapshot_id, self._place) for row in rows):
            await self._commit(want)
        name, _, tag = want.key.rpartition(":")
        with contextlib.suppress(SnapshotNotFoundError):  # another node has deleted it since: it is not taken back
            await remotely(self._repository.set_name, name, tag, want.snapshot_id)
        if former is not None and former.repository == self._place and former.snapshot_id != want.snapshot_id:
            await self._drop(former)
        with self._store.transaction():
            self._store.published.put(Published(want.key, want.snapshot_id, self._place))

    async def _commit(self, want: Wanted) -> None:
        source = self._source(want)
        pins = [want.snapshot_id, *([source.parent.snapshot_id] if source.parent is not None else [])]
        self._files.pin(*pins)
        try:
            with self._files.reading([layer for layer, _ in source.disk]):
                result = await self._uncancelled(source)
        finally:
            self._files.unpin(*pins)
        with self._store.transaction():
            for row in result.committed:
                if self._exists(row.id):
                    self._store.committed.put(row)
        log.info("committed a snapshot", snapshot=want.snapshot_id, name=want.key, layers=result.layers,
                 bytes=result.bytes)  # fmt: skip

    async def _uncancelled(self, source: CommitSource) -> CommitResult:
        """A thread cannot be cancelled, and reads files that had better stay until it has ended, if that is soon."""
        work = asyncio.ensure_future(remotely(self._committer.commit, source))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait({work}, timeout=LEAVE)
            raise

    def _exists(self, name: str) -> bool:
        store = self._store
        return name in store.layers.rows or name in store.memory.rows or name in store.snapshots.rows

    def _source(self, want: Wanted) -> CommitSource:
        """Everything that the commit reads, by path: what it needs of the records."""
        store, layout = self._store, self._layout
        snapshot = store.snapshots[want.snapshot_id]
        parent = store.snapshots.get(snapshot.parent or "")
        return CommitSource(
            snapshot=snapshot,
            disk=[(layer, layout.layer(layer)) for layer in chain(store.layers.rows, snapshot.disk)],
            memory=self._memory(snapshot),
            state=layout.state(snapshot.id) if snapshot.has_memory else None,
            parent=self._memory(parent),
            committed={row.id: row.volume for row in store.committed.rows.values()},
            attributes={**asdict(want.attributes), HOT: snapshot.hot},
        )

    def _memory(self, snapshot: Snapshot | None) -> LocalMemory | None:
        if snapshot is None or snapshot.memory_base is None:
            return None
        delta = self._layout.delta(snapshot.id) if snapshot.delta_bytes else None
        return LocalMemory(snapshot.id, snapshot.memory_base, self._layout.memory(snapshot.memory_base), delta)

    async def _retract(self, row: Published) -> None:
        name, _, tag = row.id.rpartition(":")
        if row.repository == self._place:
            with contextlib.suppress(SnapshotNotFoundError, ConflictError):  # it is gone, or names what is not ours
                await remotely(self._repository.delete_name, name, tag, expected=row.snapshot_id)
            await self._drop(row)
        with self._store.transaction():
            self._store.published.delete(row.id)

    async def _drop(self, row: Published) -> None:
        """Delete a committed snapshot unless another name of ours means it, or will.

        The row goes after it: else a crash in between would leave a snapshot that nobody deletes.
        """
        others = {other.snapshot_id for other in self._store.published.rows.values() if other.id != row.id}
        if row.snapshot_id in others or any(w.snapshot_id == row.snapshot_id for w in wanted(self._store).values()):
            return
        with contextlib.suppress(SnapshotNotFoundError):
            await remotely(self._repository.delete, row.snapshot_id)
            self.deleted += 1
