"""Query parameters of the listings. Pure."""

from collections.abc import Iterable, Sequence
from typing import TypeVar
from urllib.parse import parse_qsl, unquote

from aenv.errors import InvalidRequestError

_T = TypeVar("_T")
_STATES = frozenset({"running", "paused"})
_MAX_FIELDS = 100


def parse_metadata(text: str | None) -> dict[str, str]:
    """``user=abc&app=prod`` -> mapping; keys and values are URL-encoded.

    E2B's SDKs quote every key and value, then build the query string, which quotes again (Python:
    ``urlencode({quote(k): quote(v)})``; JavaScript the same). So after splitting, each part is unquoted once more;
    text that was quoted only once survives that unless it contains a literal ``%XX``.

    Raises InvalidRequestError.
    """
    if not text:
        return {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True, max_num_fields=_MAX_FIELDS)
    except ValueError as error:
        raise InvalidRequestError(
            f"metadata: cannot be read ({error}).", "Write it as key=value&key=value, each part URL-encoded."
        ) from None
    return {unquote(key): unquote(value) for key, value in pairs}


def parse_states(values: Iterable[str]) -> frozenset[str]:
    """``state=running,paused`` or ``state=running&state=paused`` -> set; empty means all."""
    states = frozenset(part.strip() for value in values for part in value.split(",") if part.strip())
    unknown = states - _STATES
    if unknown:
        raise InvalidRequestError(f"state: {sorted(unknown)[0]!r} is not one of running, paused.")
    return states


def page(items: Sequence[tuple[str, _T]], limit: int, token: str | None) -> tuple[list[_T], str | None]:
    """One page of ``items``, which are (id, item) sorted by descending or ascending id; the token is the last id.

    Raises InvalidRequestError for a token that names none of the items.
    """
    start = 0
    if token is not None:
        start = next((i + 1 for i, (key, _) in enumerate(items) if key == token), -1)
        if start < 0:
            raise InvalidRequestError("nextToken: not a token of this listing.", "Start again without it.")
    chosen = items[start : start + limit]
    more = start + limit < len(items)
    return [item for _, item in chosen], chosen[-1][0] if more else None
