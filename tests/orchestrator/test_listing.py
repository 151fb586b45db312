from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import InvalidRequestError
from aenv.orchestrator.listing import decode_token, encode_token, page, sandbox_key
from aenv.orchestrator.model import Sandbox, SandboxFilter, SandboxState
from tests.orchestrator.samples import NOW, sandbox

ALL = SandboxFilter()

sandboxes = st.lists(
    st.builds(
        lambda n, second, state, team: sandbox(
            f"i{n}", state=state, started_at=NOW + timedelta(seconds=second), metadata={"team": team}
        ),
        st.integers(0, 10_000),
        st.integers(0, 5),
        st.sampled_from(list(SandboxState)),
        st.sampled_from(["a", "b"]),
    ),
    unique_by=lambda s: s.id,
    max_size=40,
)


def walk(rows: list[Sandbox], where: SandboxFilter, limit: int) -> list[Sandbox]:
    found: list[Sandbox] = []
    token = None
    while True:
        part = page(rows, where, limit, token)
        found += part.items
        if part.next_token is None:
            return found
        assert len(part.items) == limit
        token = part.next_token


orders = st.booleans()


@given(sandboxes, st.integers(1, 7), orders)
def test_pages_together_are_the_listing(rows: list[Sandbox], limit: int, newest_first: bool) -> None:
    where = SandboxFilter(newest_first=newest_first)
    whole = list(page(rows, where, 1000, None).items)
    assert walk(rows, where, limit) == whole
    starts = [s.started_at for s in whole]
    assert starts == sorted(starts, reverse=newest_first)
    assert {s.id for s in whole} == {
        s.id for s in rows if s.state not in (SandboxState.STARTING, SandboxState.DELETING)
    }


@given(sandboxes, st.sampled_from(["running", "paused"]), st.sampled_from(["a", "b"]))
def test_filters_select_exactly(rows: list[Sandbox], state: str, team: str) -> None:
    where = SandboxFilter(states=frozenset({state}), metadata={"team": team})
    for found in page(rows, where, 1000, None).items:
        assert found.state.public == state
        assert found.metadata["team"] == team


@given(sandboxes, st.integers(1, 7))
def test_the_orders_are_each_others_reverse(rows: list[Sandbox], limit: int) -> None:
    assert walk(rows, SandboxFilter(newest_first=False), limit) == walk(rows, ALL, limit)[::-1]


@given(sandboxes, st.integers(0, 6), orders, st.integers(1, 7))
def test_started_after_takes_in_its_moment(rows: list[Sandbox], second: int, newest_first: bool, limit: int) -> None:
    moment = NOW + timedelta(seconds=second)
    where = SandboxFilter(started_after=moment, newest_first=newest_first)
    expected = page(rows, SandboxFilter(newest_first=newest_first), 1000, None).items
    assert walk(rows, where, limit) == [s for s in expected if s.started_at >= moment]


@given(sandboxes, sandboxes, st.integers(1, 5), orders)
def test_pages_stay_stable_while_others_come_and_go(
    rows: list[Sandbox], others: list[Sandbox], limit: int, newest_first: bool
) -> None:
    """What exists during the whole walk is listed exactly once, whatever appears and vanishes meanwhile."""
    known = {s.id for s in rows}
    coming = [s for s in others if s.id not in known]
    where = SandboxFilter(newest_first=newest_first)
    expected = {s.id for s in page(rows, where, 1000, None).items}
    seen: list[str] = []
    token = None
    turn = 0
    while True:
        present = rows + (coming if turn % 2 else [])
        part = page(present, where, limit, token)
        seen += [s.id for s in part.items if s.id in known]
        token = part.next_token
        turn += 1
        if token is None:
            break
    assert len(seen) == len(set(seen))
    # The walk may end on a turn without `coming`; everything of `rows` has been passed by then.
    assert set(seen) == expected


def test_a_token_round_trips() -> None:
    one = sandbox()
    assert decode_token(encode_token(sandbox_key(one))) == (one.started_at, one.id)


@given(st.text(max_size=200))
def test_foreign_tokens_are_refused(text: str) -> None:
    try:
        decode_token(text)
    except InvalidRequestError as error:
        assert "nextToken" in str(error)


@pytest.mark.parametrize("token", ["", "!!", "AAAA", "W10=", "WzEsMl0=", "WyIyMDI2LTAxLTAxIiwgImkiXQ=="])
def test_known_bad_tokens(token: str) -> None:
    with pytest.raises(InvalidRequestError):
        decode_token(token)
