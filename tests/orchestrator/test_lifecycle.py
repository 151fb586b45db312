from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import ConflictError, InvalidRequestError
from aenv.orchestrator import lifecycle
from aenv.orchestrator.lifecycle import Recovery, recover, should_compose
from aenv.orchestrator.model import SandboxState
from tests.orchestrator.samples import NOW, sandbox

STATES = list(SandboxState)


@given(st.sampled_from(STATES), st.booleans(), st.booleans())
def test_every_state_has_a_recovery_that_needs_only_what_exists(
    state: SandboxState, alive: bool, owned: bool
) -> None:
    decision = recover(sandbox(state=state), vm_alive=alive, has_own_snapshot=owned)
    if decision is Recovery.ADOPT:
        assert alive
    if decision is Recovery.ROLL_BACK and state is not SandboxState.RESUMING:
        assert owned and not alive
    # Nothing that a caller was told exists is deleted while a way to keep it exists.
    if state in (SandboxState.RUNNING, SandboxState.PAUSING, SandboxState.PAUSED) and (alive or owned):
        assert decision is not Recovery.DELETE
    if state in (SandboxState.STARTING, SandboxState.DELETING):
        assert decision is Recovery.DELETE


def test_deleting_is_final() -> None:
    for state in STATES:
        with pytest.raises(RuntimeError):
            lifecycle.move(sandbox(state=SandboxState.DELETING), state)


def test_a_paused_sandbox_only_resumes_or_goes() -> None:
    paused = sandbox(state=SandboxState.PAUSED)
    assert lifecycle.move(paused, SandboxState.RESUMING).state is SandboxState.RESUMING
    with pytest.raises(RuntimeError):
        lifecycle.move(paused, SandboxState.RUNNING)


def test_require_names_the_action_and_what_to_do() -> None:
    with pytest.raises(ConflictError) as caught:
        lifecycle.require(sandbox(state=SandboxState.PAUSED), SandboxState.RUNNING, "paused")
    assert "'i1' cannot be paused: it is paused" in str(caught.value)
    assert "Connect" in caught.value.hint


def test_traffic_wakes_only_what_asked_for_it_and_has_memory() -> None:
    asleep = sandbox(state=SandboxState.PAUSED, auto_resume=True)
    lifecycle.require_wakeable(asleep)
    for refused in (replace(asleep, auto_resume=False), replace(asleep, memory_kept=False)):
        with pytest.raises(ConflictError, match="paused") as caught:
            lifecycle.require_wakeable(refused)
        assert "Connect" in caught.value.hint


@pytest.mark.parametrize(
    ("kept", "wanted", "allowed"),
    [
        (True, None, True),
        (True, True, True),
        (True, False, False),
        (False, None, True),
        (False, False, True),
        (False, True, False),
    ],
)
def test_a_paused_sandbox_is_saved_as_it_was_paused(kept: bool, wanted: bool | None, allowed: bool) -> None:
    paused = sandbox(state=SandboxState.PAUSED, memory_kept=kept)
    if allowed:
        lifecycle.require_kept(paused, wanted)
    else:
        with pytest.raises(ConflictError):
            lifecycle.require_kept(paused, wanted)


@given(st.integers(-(2**40), 2**40))
def test_timeouts_are_bounded(timeout: int) -> None:
    if 0 <= timeout <= 100:
        lifecycle.check_timeout(timeout, 100)
    else:
        with pytest.raises(InvalidRequestError):
            lifecycle.check_timeout(timeout, 100)


@given(st.integers(0, 1000), st.integers(0, 1000))
def test_refreshing_never_shortens(remaining: int, duration: int) -> None:
    before = sandbox(end_at=NOW + timedelta(seconds=remaining))
    after = lifecycle.expiring_at_least(before, duration, NOW)
    assert after.end_at == NOW + timedelta(seconds=max(remaining, duration))
    assert lifecycle.expiring(before, duration, NOW).end_at == NOW + timedelta(seconds=duration)


def test_composing_pays_only_for_many_children_or_big_deltas() -> None:
    base = 100 << 20
    assert not should_compose(5 << 20, base, 1)
    assert not should_compose(5 << 20, base, 16)
    assert should_compose(100 << 20, base, 16)
    assert not should_compose(400 << 20, base, 1)
