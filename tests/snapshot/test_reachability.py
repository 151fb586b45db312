from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from aenv.snapshot.reachability import chain, find_garbage
from tests.orchestrator.samples import layer, snapshot

names = st.integers(0, 15)


@given(
    st.dictionaries(names, st.none() | names, max_size=16),
    st.dictionaries(names, st.tuples(names, st.none() | names), max_size=8),
    st.sets(names),
    st.sets(names),
    st.sets(names),
)
def test_garbage_is_exactly_what_nothing_reaches(
    parents: dict[int, int | None],
    snaps: dict[int, tuple[int, int | None]],
    named_snapshots: set[int],
    named_layers: set[int],
    named_memory: set[int],
) -> None:
    # A parent is always an older layer, so that there are no cycles.
    layers = {f"l{n}": layer(f"l{n}", f"l{p}" if p is not None and p < n else None) for n, p in parents.items()}
    # Without a memory base it is a disk only.
    snapshots = {
        f"s{n}": snapshot(f"s{n}", disk=f"l{d}", memory_base=None if m is None else f"m{m}")
        for n, (d, m) in snaps.items()
    }
    memory = {f"m{n}" for n in range(16)}
    garbage = find_garbage(
        snapshots,
        layers,
        memory,
        named_snapshots=[f"s{n}" for n in named_snapshots],
        named_layers=[f"l{n}" for n in named_layers],
        named_memory=[f"m{n}" for n in named_memory],
    )
    kept_snapshots = snapshots.keys() - garbage.snapshots
    assert kept_snapshots == {f"s{n}" for n in named_snapshots} & snapshots.keys()
    # Whatever is kept can be restored: its memory and its whole chain are kept.
    for name in kept_snapshots:
        assert snapshots[name].memory_base not in garbage.memory
    kept_memory = {f"m{n}" for n in named_memory} | {snapshots[name].memory_base for name in kept_snapshots}
    assert garbage.memory == memory - kept_memory
    roots = {f"l{n}" for n in named_layers} | {snapshots[name].disk for name in kept_snapshots}
    reached: set[str] = set()
    for root in roots & layers.keys():
        if all(parent in layers for parent in _ancestry(layers, root)):
            reached |= {found.id for found in chain(layers, root)}
    assert not reached & garbage.layers


def _ancestry(layers: Mapping[str, object], top: str) -> list[str]:
    found = []
    name: str | None = top
    while name is not None:
        found.append(name)
        name = getattr(layers.get(name), "parent", None)
    return found


def test_a_fork_keeps_the_frozen_layer_after_its_source_is_gone() -> None:
    layers = {x.id: x for x in (layer("base"), layer("frozen", "base"), layer("child", "frozen"))}
    garbage = find_garbage({}, layers, {"m"}, named_snapshots=[], named_layers=["child"], named_memory=["m"])
    assert not garbage
    garbage = find_garbage({}, layers, {"m"}, named_snapshots=[], named_layers=["base"], named_memory=[])
    assert garbage.layers == {"frozen", "child"}
    assert garbage.memory == {"m"}
