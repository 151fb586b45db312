"""Which disk layers are merged: chains stay short, and the copying that takes stays small."""

import math

from hypothesis import given
from hypothesis import strategies as st

from aenv.orchestrator.compaction import MAX_CHAIN, layers_to_merge

sizes = st.lists(st.integers(min_value=0, max_value=1 << 40), max_size=60)


@given(sizes)
def test_a_merge_makes_room_or_there_is_room(layers: list[int]) -> None:
    count = layers_to_merge(layers)
    if len(layers) < MAX_CHAIN:
        assert count == 0
    else:
        assert 2 <= count <= len(layers)
        assert len(layers) - count + 1 <= MAX_CHAIN // 2 + 1


@given(sizes)
def test_what_is_left_alone_is_much_larger_than_what_is_merged(layers: list[int]) -> None:
    count = layers_to_merge(layers)
    if 0 < count < len(layers):
        assert layers[count] > 2 * sum(layers[:count])


@given(st.integers(min_value=1, max_value=1000))
def test_saving_a_thousand_times_copies_each_byte_a_few_times(saves: int) -> None:
    layers, copied, longest = [1 << 30], 0, 0  # a template's layer, never worth copying
    for _ in range(saves):
        layers.insert(0, 1 << 20)
        while count := layers_to_merge(layers):
            merged = sum(layers[:count])
            copied += merged
            layers[:count] = [merged]
        longest = max(longest, len(layers))
    assert longest < MAX_CHAIN
    assert copied <= (1 << 20) * saves * (2 + math.log2(saves + 1)) + (1 << 31)
