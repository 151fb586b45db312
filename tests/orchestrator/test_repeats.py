"""Which sandbox an idempotency key stands for, and that its requests take turns."""

import asyncio
from dataclasses import replace

import pytest

from aenv.errors import ReusedKeyError
from aenv.orchestrator.model import SandboxSpec, SandboxState
from aenv.orchestrator.repeats import Turns, made_before, marker
from tests.orchestrator.samples import sandbox

SPEC = SandboxSpec(template="base", timeout=60, metadata={"a": "b"}, idempotency_key="k-1")


def test_the_same_request_finds_its_sandbox() -> None:
    others = [sandbox("i2"), replace(sandbox("i3"), request=marker(replace(SPEC, idempotency_key="k-10")))]
    made = replace(sandbox("i1"), request=marker(SPEC))
    assert made_before([*others, made], SPEC) is made
    assert made_before(others, SPEC) is None
    for state in (SandboxState.STARTING, SandboxState.DELETING):
        assert made_before([replace(made, state=state)], SPEC) is None
    assert made_before([replace(made, state=SandboxState.PAUSED)], SPEC) is not None
    assert marker(replace(SPEC, idempotency_key=None)) is None


@pytest.mark.parametrize("changed", [{"timeout": 61}, {"metadata": {}}, {"template": "other"}, {"secure": True}])
def test_another_request_may_not_use_its_key(changed: dict[str, object]) -> None:
    made = replace(sandbox("i1"), request=marker(SPEC))
    with pytest.raises(ReusedKeyError, match="k-1"):
        made_before([made], replace(SPEC, **changed))  # type: ignore[arg-type]


async def test_turns() -> None:
    turns, inside, order = Turns(), 0, []

    async def request(key: str, number: int) -> None:
        nonlocal inside
        async with turns.of(key):
            inside += key == "a"
            assert inside <= 1
            order.append((key, number))
            await asyncio.sleep(0)
            inside -= key == "a"

    failing = turns.of("a")
    with pytest.raises(KeyError):
        async with failing:
            raise KeyError
    await asyncio.gather(*(request("ab"[n % 4 == 3], n) for n in range(12)))
    assert sorted(order) == sorted(("ab"[n % 4 == 3], n) for n in range(12))
    assert not turns._taken
