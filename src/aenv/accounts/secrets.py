"""Secrets: written, versioned, and never read back through the API.

Values are in ``accounts.db``, whose mode is 0600: whoever can read it can read the node's own key as well, so an
encryption whose key lies beside it would protect from nobody. Nothing of this node resolves secrets into sandboxes
yet (E2B does so where traffic leaves one).
"""

import json
import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from aenv.errors import ConflictError, InvalidRequestError, NotFoundError

ID_PREFIX = "sec_"
MAX_METADATA_BYTES = 8192
MAX_KEY_BYTES = 128
MAX_VALUE_BYTES = 1024


class SecretNotFoundError(NotFoundError):
    def __init__(self, name: str) -> None:
        super().__init__(f"Secret {name[:128]!r} not found.")


@dataclass(frozen=True, slots=True)
class Secret:
    """What may be known of a secret; its value is no part of it."""

    id: str
    name: str
    version: int
    metadata: Mapping[str, str]
    created_at: datetime
    updated_at: datetime


def check_metadata(metadata: Mapping[str, str]) -> None:
    """E2B's bounds, in bytes of UTF-8. Raises InvalidRequestError."""
    sizes = [(len(key.encode()), len(value.encode())) for key, value in metadata.items()]
    if any(not 0 < key <= MAX_KEY_BYTES or value > MAX_VALUE_BYTES for key, value in sizes):
        raise InvalidRequestError(
            f"metadata: keys have 1 to {MAX_KEY_BYTES} bytes, values at most {MAX_VALUE_BYTES}."
        )
    if sum(key + value for key, value in sizes) > MAX_METADATA_BYTES:
        raise InvalidRequestError(f"metadata: at most {MAX_METADATA_BYTES} bytes in total.")


_COLUMNS = "id, name, version, metadata, created_at, updated_at"


class Secrets:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def create(self, name: str, value: str, metadata: Mapping[str, str]) -> Secret:
        """Raises ConflictError when the name is taken, InvalidRequestError."""
        name = name.lower()
        if name.startswith(ID_PREFIX):
            raise InvalidRequestError(f"name: must not start with {ID_PREFIX}, which marks identifiers.")
        check_metadata(metadata)
        now = datetime.now(UTC).isoformat()
        try:
            self._database.execute(
                "INSERT INTO secrets (id, name, value, version, metadata, created_at, updated_at) "
                "VALUES (?, ?, ?, 1, ?, ?, ?)",
                (ID_PREFIX + secrets.token_hex(12), name, value, json.dumps(dict(metadata)), now, now),
            )
        except sqlite3.IntegrityError:
            raise ConflictError(f"A secret named {name!r} exists.", "Update it, or delete it first.") from None
        return self.get(name)

    def get(self, selector: str) -> Secret:
        """By id or by name. Raises SecretNotFoundError."""
        row = self._database.execute(
            f"SELECT {_COLUMNS} FROM secrets WHERE id = ? OR name = ?", (selector, selector.lower())
        ).fetchone()
        if row is None:
            raise SecretNotFoundError(selector)
        return _secret(*row)

    def list(self) -> list[Secret]:
        """By name."""
        return [_secret(*row) for row in self._database.execute(f"SELECT {_COLUMNS} FROM secrets ORDER BY name")]

    def update(self, selector: str, value: str, metadata: Mapping[str, str] | None) -> Secret:
        """A new version of the value, the only one kept; ``metadata`` replaces what there was unless it is None."""
        found = self.get(selector)
        metadata = found.metadata if metadata is None else metadata
        check_metadata(metadata)
        self._database.execute(
            "UPDATE secrets SET value = ?, version = version + 1, metadata = ?, updated_at = ? WHERE id = ?",
            (value, json.dumps(dict(metadata)), datetime.now(UTC).isoformat(), found.id),
        )
        return self.get(found.id)

    def delete(self, selector: str) -> None:
        self._database.execute("DELETE FROM secrets WHERE id = ?", (self.get(selector).id,))


def _secret(secret_id: str, name: str, version: int, metadata: str, created_at: str, updated_at: str) -> Secret:
    return Secret(
        secret_id,
        name,
        version,
        json.loads(metadata),
        datetime.fromisoformat(created_at),
        datetime.fromisoformat(updated_at),
    )
