"""Listing filters, without the API."""

import urllib.parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.api.listing import page, parse_metadata, parse_states
from aenv.errors import InvalidRequestError

_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def as_python_sdk(metadata: dict[str, str]) -> str:
    """As e2b 2.63 builds the parameter (before the HTTP client encodes it once more)."""
    return urllib.parse.urlencode({urllib.parse.quote(k): urllib.parse.quote(v) for k, v in metadata.items()})


@settings(deadline=None)
@given(st.dictionaries(_text, _text, max_size=5))
def test_metadata_survives_the_sdk(metadata: dict[str, str]) -> None:
    assert parse_metadata(as_python_sdk(metadata)) == metadata


@settings(deadline=None)
@given(st.dictionaries(_text.filter(lambda t: "%" not in t), _text.filter(lambda t: "%" not in t), max_size=5))
def test_metadata_quoted_once(metadata: dict[str, str]) -> None:
    assert parse_metadata(urllib.parse.urlencode(metadata)) == metadata


@settings(deadline=None)
@given(st.text(max_size=60))
def test_arbitrary_metadata_is_read_or_refused(text: str) -> None:
    try:
        parse_metadata(text)
    except InvalidRequestError as error:
        assert "metadata" in error.message


@settings(deadline=None)
@given(st.lists(st.sampled_from(["running", "paused"])), st.booleans())
def test_states_in_either_form(states: list[str], comma: bool) -> None:
    assert parse_states([",".join(states)] if comma else states) == frozenset(states)


def test_unknown_states() -> None:
    with pytest.raises(InvalidRequestError, match="dead"):
        parse_states(["running,dead"])


@settings(deadline=None)
@given(st.lists(st.integers(), unique=True, max_size=30), st.integers(1, 10))
def test_pages_cover_everything_once(values: list[int], limit: int) -> None:
    items = [(str(value), value) for value in values]
    seen: list[int] = []
    token = None
    while True:
        part, token = page(items, limit, token)
        assert len(part) <= limit
        seen += part
        if token is None:
            break
    assert seen == values
