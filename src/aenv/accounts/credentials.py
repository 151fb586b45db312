"""API keys and access tokens: made here, shown once, kept as hashes.

A credential carries 160 random bits, so a plain SHA-256 is as good as a slow hash would be: there is nothing to
guess, and the check stays cheap enough for every request. The node's own key (``$AENV_HOME/api-key``) is not in the
database; it is listed as a key that cannot be deleted.
"""

import hashlib
import hmac
import json
import secrets
import sqlite3
import time
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

from aenv.accounts.database import team_id
from aenv.errors import ConflictError, NotFoundError

USE_GRANULARITY = 60.0  # seconds between two writes of a key's time of last use


class Kind(StrEnum):
    API_KEY = "api-key"
    ACCESS_TOKEN = "access-token"


_PREFIX = {Kind.API_KEY: "e2b_", Kind.ACCESS_TOKEN: "sk_e2b_"}  # as E2B's, which its tools show


class CredentialNotFoundError(NotFoundError):
    def __init__(self, kind: Kind, credential_id: str) -> None:
        what = "API key" if kind is Kind.API_KEY else "Access token"
        super().__init__(f"{what} {credential_id[:64]!r} not found.")


@dataclass(frozen=True, slots=True)
class Mask:
    """What may be shown of a value: its prefix, the length of the rest, and the rest's two ends."""

    prefix: str
    length: int
    head: str
    tail: str


@dataclass(frozen=True, slots=True)
class Credential:
    id: str
    kind: Kind
    name: str
    mask: Mask
    created_at: datetime
    last_used: datetime | None


def digest(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def mask(value: str) -> Mask:
    prefix = next((p for p in ("sk_e2b_", "e2b_") if value.startswith(p)), "")
    rest = value[len(prefix) :]
    if len(rest) < 16:  # an operator's own short key: its ends would tell too much of it
        return Mask(prefix, len(rest), "", "")
    return Mask(prefix, len(rest), rest[:2], rest[-4:])


class Credentials:
    """Checks and manages the credentials of the node's one team. ``node_key`` is always valid."""

    def __init__(self, database: sqlite3.Connection, node_key: str) -> None:
        self._database = database
        self._node_key = node_key.encode()
        self.team_id = team_id(database)
        self._node_credential = Credential(
            id=str(uuid.uuid5(uuid.UUID(self.team_id), "node-key")),
            kind=Kind.API_KEY,
            name="node key (api-key in the node's home)",
            mask=mask(node_key),
            created_at=datetime.now(UTC),
            last_used=None,
        )
        # Hash to id and the monotonic time of the last write of its use. All of them: a node has few.
        self._known: dict[str, tuple[str, float]] = {
            found: (credential_id, 0.0)
            for credential_id, found in database.execute("SELECT id, hash FROM credentials")
        }

    def valid(self, presented: str) -> bool:
        """Whether ``presented`` opens the API.

        The node's key is compared in constant time; of the others only a hash is looked up, from whose timing
        nothing can be learned about a value.
        """
        if hmac.compare_digest(self._node_key, presented.encode(errors="surrogateescape")):
            return True
        if not presented.isascii():
            return False
        found = digest(presented)
        entry = self._known.get(found)
        if entry is None:
            return False
        credential_id, written = entry
        now = time.monotonic()
        if written == 0.0 or now - written > USE_GRANULARITY:
            self._known[found] = (credential_id, now)
            self._database.execute(
                "UPDATE credentials SET last_used = ? WHERE id = ?", (datetime.now(UTC).isoformat(), credential_id)
            )
        return True

    def create(self, kind: Kind, name: str) -> tuple[Credential, str]:
        """A new credential and its value, which is not kept."""
        value = _PREFIX[kind] + secrets.token_hex(20)
        made = Credential(str(uuid.uuid4()), kind, name, mask(value), datetime.now(UTC), None)
        hidden = json.dumps([made.mask.prefix, made.mask.length, made.mask.head, made.mask.tail])
        self._database.execute(
            "INSERT INTO credentials VALUES (?, ?, ?, ?, ?, ?, NULL)",
            (made.id, kind, name, digest(value), hidden, made.created_at.isoformat()),
        )
        self._known[digest(value)] = (made.id, 0.0)
        return made, value

    def list(self, kind: Kind) -> list[Credential]:
        """Oldest first; the node's own key leads the API keys."""
        rows = self._database.execute(
            "SELECT id, kind, name, mask, created_at, last_used FROM credentials WHERE kind = ? "
            "ORDER BY created_at, id",
            (kind,),
        )
        own = [self._node_credential] if kind is Kind.API_KEY else []
        return own + [_credential(*row) for row in rows]

    def rename(self, kind: Kind, credential_id: str, name: str) -> None:
        """Raises CredentialNotFoundError; ConflictError for the node's own key."""
        self._refuse_own(credential_id)
        done = self._database.execute(
            "UPDATE credentials SET name = ? WHERE id = ? AND kind = ?", (name, credential_id, kind)
        )
        if not done.rowcount:
            raise CredentialNotFoundError(kind, credential_id)

    def delete(self, kind: Kind, credential_id: str) -> None:
        """It stops to work at once. Raises CredentialNotFoundError; ConflictError for the node's own key."""
        self._refuse_own(credential_id)
        row = self._database.execute(
            "DELETE FROM credentials WHERE id = ? AND kind = ? RETURNING hash", (credential_id, kind)
        ).fetchone()
        if row is None:
            raise CredentialNotFoundError(kind, credential_id)
        self._known.pop(row[0], None)

    def _refuse_own(self, credential_id: str) -> None:
        if credential_id == self._node_credential.id:
            raise ConflictError(
                "This is the node's own key, which the API does not change.",
                "Replace the file api-key in the node's home, or api_key in its configuration, and restart it.",
            )


def _credential(
    credential_id: str, kind: str, name: str, hidden: str, created_at: str, last_used: str | None
) -> Credential:
    return Credential(
        credential_id,
        Kind(kind),
        name,
        Mask(*json.loads(hidden)),
        datetime.fromisoformat(created_at),
        datetime.fromisoformat(last_used) if last_used else None,
    )
