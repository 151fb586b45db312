"""Filtering and paging of sandbox listings: pure, stable while sandboxes come and go.

Order is newest first by (start time, id). A page's token names the last item that was returned, so items that
appear or vanish between two calls neither repeat nor hide others.
"""

import base64
import binascii
import json
from collections.abc import Iterable
from datetime import datetime

from aenv.errors import InvalidRequestError
from aenv.orchestrator.model import Sandbox, SandboxFilter, SandboxPage, SandboxState

_HIDDEN = (SandboxState.STARTING, SandboxState.DELETING)


def matches(sandbox: Sandbox, where: SandboxFilter) -> bool:
    return (
        sandbox.state not in _HIDDEN
        and (not where.states or sandbox.state.public in where.states)
        and all(sandbox.metadata.get(key) == value for key, value in where.metadata.items())
        and where.template in (None, sandbox.template_id, sandbox.template_alias)
    )


def _key(sandbox: Sandbox) -> tuple[datetime, str]:
    return sandbox.started_at, sandbox.id


def encode_token(sandbox: Sandbox) -> str:
    text = json.dumps([sandbox.started_at.isoformat(), sandbox.id])
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_token(token: str) -> tuple[datetime, str]:
    """Raises InvalidRequestError for anything that ``encode_token`` did not make."""
    try:
        started, sandbox_id = json.loads(base64.urlsafe_b64decode(token.encode()))
        moment = datetime.fromisoformat(started)
        if not isinstance(sandbox_id, str) or moment.tzinfo is None:
            raise ValueError(token)
    except (ValueError, TypeError, binascii.Error, RecursionError) as error:
        raise InvalidRequestError(
            "The nextToken is not one of this server's.", "Pass the x-next-token header of the previous page."
        ) from error
    return moment, sandbox_id


def page(sandboxes: Iterable[Sandbox], where: SandboxFilter, limit: int, token: str | None) -> SandboxPage:
    after = decode_token(token) if token else None
    found = sorted(
        (s for s in sandboxes if matches(s, where) and (after is None or _key(s) < after)),
        key=_key,
        reverse=True,
    )
    items = tuple(found[:limit])
    return SandboxPage(items, encode_token(items[-1]) if len(found) > limit else None)
