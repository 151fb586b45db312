"""Filtering and paging of listings: pure, stable while items come and go.

Order is by (time, id), newest first unless asked otherwise. A page's token names the last item that was returned, so
items that appear or vanish between two calls neither repeat nor hide others.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import TypeVar

from aenv.errors import InvalidRequestError
from aenv.orchestrator.model import Sandbox, SandboxFilter, SandboxPage, SandboxState

T = TypeVar("T")
Key = tuple[datetime, str]

_HIDDEN = (SandboxState.STARTING, SandboxState.DELETING)


def matches(sandbox: Sandbox, where: SandboxFilter) -> bool:
    return (
        sandbox.state not in _HIDDEN
        and (not where.states or sandbox.state.public in where.states)
        and all(sandbox.metadata.get(key) == value for key, value in where.metadata.items())
        and where.template in (None, sandbox.template_id, sandbox.template_alias)
        and (where.started_after is None or sandbox.started_at >= where.started_after)
    )


def encode_token(key: Key) -> str:
    text = json.dumps([key[0].isoformat(), key[1]])
    return base64.urlsafe_b64encode(text.encode()).decode()


def decode_token(token: str) -> Key:
    """Raises InvalidRequestError for anything that ``encode_token`` did not make."""
    try:
        time, item_id = json.loads(base64.urlsafe_b64decode(token.encode()))
        moment = datetime.fromisoformat(time)
        if not isinstance(item_id, str) or moment.tzinfo is None:
            raise ValueError(token)
    except (ValueError, TypeError, binascii.Error, RecursionError) as error:
        raise InvalidRequestError(
            "The nextToken is not one of this server's.", "Pass the x-next-token header of the previous page."
        ) from error
    return moment, item_id


def cut(
    items: Iterable[T], key: Callable[[T], Key], limit: int, token: str | None, *, newest_first: bool = True
) -> tuple[tuple[T, ...], str | None]:
    """One page of ``items`` and the token of the next, None on the last. InvalidRequestError for a foreign token."""
    after = decode_token(token) if token else None

    def is_left(item: T) -> bool:
        return after is None or (key(item) < after if newest_first else key(item) > after)

    found = sorted(filter(is_left, items), key=key, reverse=newest_first)
    chosen = tuple(found[:limit])
    return chosen, encode_token(key(chosen[-1])) if len(found) > limit else None


def sandbox_key(sandbox: Sandbox) -> Key:
    return sandbox.started_at, sandbox.id


def page(sandboxes: Iterable[Sandbox], where: SandboxFilter, limit: int, token: str | None) -> SandboxPage:
    found = [sandbox for sandbox in sandboxes if matches(sandbox, where)]
    running = sum(sandbox.state.public == "running" for sandbox in found)
    return SandboxPage(*cut(found, sandbox_key, limit, token, newest_first=where.newest_first), running)
