"""Snapshots that users keep: finding them, and saving under a name.

They are named as templates are (``catalog``). As in E2B, saving under a name and tag that exist gives that snapshot,
whose id stays, another content.
"""

import secrets
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from itertools import chain

from aenv.errors import ConflictError, NotFoundError, SnapshotNotFoundError
from aenv.orchestrator import catalog
from aenv.orchestrator.listing import Key, cut
from aenv.orchestrator.model import Sandbox, SavedSnapshot, SavedSnapshotPage, Template
from aenv.orchestrator.store import Store
from aenv.snapshot.model import Snapshot


def _key(saved: SavedSnapshot) -> Key:
    return saved.created_at, saved.id


class SavedSnapshots:
    """Reads and prepares records of ``Store.saved``; the caller writes them with what they name."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def find(self, text: str) -> SavedSnapshot | None:
        """By id or name, either with a tag. A name without a tag means the default tag."""
        exact = self._store.saved.get(text)
        if exact is not None:
            return exact
        name, _, tag = text.partition(":")
        name, tag = name.lower(), tag or catalog.DEFAULT_TAG
        for saved in self._store.saved.rows.values():
            if saved.tag == tag and name in (saved.name, saved.id):
                return saved
        return None

    def get(self, text: str) -> SavedSnapshot:
        """As ``find``; SnapshotNotFoundError when there is none."""
        found = self.find(text)
        if found is None:
            raise SnapshotNotFoundError(text)
        return found

    def origin(self, text: str) -> Template | SavedSnapshot:
        """What sandboxes and builds start from: the template or saved snapshot so called. Raises NotFoundError."""
        try:
            return catalog.resolve(self._store.templates.rows.values(), self._store.builds.rows, text)
        except NotFoundError:
            if (saved := self.find(text)) is not None:
                return saved
            raise

    def page(
        self,
        sandbox_id: str | None,
        name: str | None,
        limit: int,
        token: str | None,
        others: Iterable[SavedSnapshot] = (),
    ) -> SavedSnapshotPage:
        """Newest first; of one sandbox, and of one name, id, or name with a tag. A name alone means all its tags.

        ``others`` are listed with those of the records.
        """
        rows = chain(self._store.saved.rows.values(), others)
        return SavedSnapshotPage(*cut(self._matching(rows, sandbox_id, name), _key, limit, token))

    def _matching(
        self, rows: Iterable[SavedSnapshot], sandbox_id: str | None, wanted: str | None
    ) -> Iterator[SavedSnapshot]:
        name, _, tag = (wanted or "").partition(":")
        name = name.lower()
        for saved in rows:
            if sandbox_id is not None and saved.sandbox_id != sandbox_id:
                continue
            if wanted is None or (name in (saved.name, saved.id) and tag in ("", saved.tag)):
                yield saved

    def check(self, text: str | None) -> None:
        """Raise InvalidRequestError or ConflictError for a name that no snapshot may have."""
        if text is None:
            return
        name = catalog.parse(text).name
        if catalog.find(self._store.templates.rows.values(), name) is not None:
            raise ConflictError(f"{name!r} is the name of a template.", "Choose another name for the snapshot.")
        if name in self._store.saved.rows:
            raise ConflictError(f"{name!r} is the id of a snapshot.", "Choose another name for the snapshot.")

    def record(self, text: str | None, sandbox: Sandbox, snapshot: Snapshot) -> SavedSnapshot:
        """The record of ``snapshot`` saved under ``text``: a new one, or that name's with another content."""
        now = datetime.now(UTC)
        reference = catalog.parse(text) if text is not None else None
        name = reference.name if reference is not None else None
        made = SavedSnapshot(
            id=secrets.token_hex(10),
            name=name,
            tag=(reference.tag if reference is not None else None) or catalog.DEFAULT_TAG,
            snapshot_id=snapshot.id,
            sandbox_id=sandbox.id,
            vcpus=snapshot.shape.vcpus,
            memory_mib=snapshot.shape.memory_mib,
            disk_mib=snapshot.disk_mib,
            envd_version=sandbox.envd_version,
            created_at=now,
            updated_at=now,
            env_vars=sandbox.env_vars,
            default_user=sandbox.default_user,
            default_workdir=sandbox.default_workdir,
        )
        for known in self._store.saved.rows.values():
            if name is not None and (known.name, known.tag) == (name, made.tag):
                return replace(made, id=known.id, created_at=known.created_at)
        return made
