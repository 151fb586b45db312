"""Volumes: a name, an id, and the token for the volume's content, which is in ``volume_files``."""

import secrets
import sqlite3
from dataclasses import dataclass

from aenv.accounts.volume_files import VolumeFiles
from aenv.errors import ConflictError, NotFoundError


class VolumeNotFoundError(NotFoundError):
    def __init__(self, volume_id: str) -> None:
        super().__init__(f"Volume {volume_id[:64]!r} not found.")


@dataclass(frozen=True, slots=True)
class Volume:
    id: str
    name: str
    token: str


class Volumes:
    """The records. A folder is made before its record and removed after it, so what has no record is debris."""

    def __init__(self, database: sqlite3.Connection, files: VolumeFiles) -> None:
        self._database = database
        self.files = files
        files.prepare({volume.id for volume in self.list()})

    def create(self, name: str) -> Volume:
        """Raises ConflictError when the name is taken."""
        made = Volume("vol" + secrets.token_hex(10), name, secrets.token_urlsafe(32))
        self.files.create(made.id)
        try:
            self._database.execute(
                "INSERT INTO volumes VALUES (?, ?, ?, strftime('%Y-%m-%dT%H:%M:%fZ'))",
                (made.id, made.name, made.token),
            )
        except sqlite3.IntegrityError:
            self.files.destroy(made.id)
            raise ConflictError(f"A volume named {name!r} exists.", "Use it, or delete it first.") from None
        return made

    def get(self, volume_id: str) -> Volume:
        """Raises VolumeNotFoundError."""
        row = self._database.execute("SELECT id, name, token FROM volumes WHERE id = ?", (volume_id,)).fetchone()
        if row is None:
            raise VolumeNotFoundError(volume_id)
        return Volume(*row)

    def list(self) -> list[Volume]:
        """Oldest first."""
        rows = self._database.execute("SELECT id, name, token FROM volumes ORDER BY created_at, id")
        return [Volume(*row) for row in rows]

    def delete(self, volume_id: str) -> None:
        """The record. ``files.destroy`` is left to the caller, as it may take a while. Raises VolumeNotFoundError."""
        if not self._database.execute("DELETE FROM volumes WHERE id = ?", (volume_id,)).rowcount:
            raise VolumeNotFoundError(volume_id)
