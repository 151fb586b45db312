"""When a VM counts as idle, and that its memory is given back once each time."""

from hypothesis import given
from hypothesis import strategies as st

from aenv.orchestrator.idle import BUSY, Watched, look


def test_once_each_time_it_falls_idle() -> None:
    watched = Watched(cpu=0.0, seen=0.0, idle_since=0.0)
    assert not look(watched, 5.0, 10.0, after=30.0), "busy"
    assert not look(watched, 5.0, 20.0, after=30.0)
    assert not look(watched, 5.1, 30.0, after=30.0), "a little is idle as well"
    assert look(watched, 5.1, 40.0, after=30.0)
    assert not look(watched, 5.1, 100.0, after=30.0), "once"
    assert not look(watched, 15.0, 110.0, after=30.0), "busy again"
    assert not look(watched, 15.0, 139.0, after=30.0)
    assert look(watched, 15.0, 140.0, after=30.0)


@given(st.lists(st.tuples(st.floats(0.1, 20), st.floats(0, 1)), max_size=50), st.floats(1, 100))
def test_never_while_busy_or_too_early(looks: list[tuple[float, float]], after: float) -> None:
    watched = Watched(0.0, 0.0, 0.0)
    now = cpu = last_busy = 0.0
    for step, share in looks:
        now, cpu = now + step, cpu + step * share
        busy = cpu - watched.cpu > BUSY * (now - watched.seen)
        if busy:
            last_busy = now
        assert not look(watched, cpu, now, after) or (not busy and now - last_busy >= after)
