"""Which memory is in use, as bits and as text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import CorruptFileError
from aenv.vmm import hot

PAGE = 4096
PER = hot.UNIT // PAGE


@given(st.sets(st.integers(0, 1999), max_size=300), st.integers(1, 40))
def test_pages_to_ranges_and_back(pages: set[int], longest: int) -> None:
    size = 2000 * PAGE
    numbers = np.array(sorted(pages), dtype=np.uint64)
    units = hot.of_runs(numbers, np.ones(len(numbers), dtype=np.uint64), PAGE, size)
    assert set(np.flatnonzero(units).tolist()) == {page // PER for page in pages}
    assert np.array_equal(hot.decode(hot.encode(units)), units)
    found = list(hot.ranges(units, longest * hot.UNIT))
    assert all(0 < length <= longest * hot.UNIT for _, length in found)
    covered = {unit for at, length in found for unit in range(at // hot.UNIT, (at + length) // hot.UNIT)}
    assert covered == set(np.flatnonzero(units).tolist())
    assert found == sorted(found)


def test_runs_that_overlap_units() -> None:
    units = hot.of_runs(np.array([6, 40], dtype=np.uint64), np.array([4, 1], dtype=np.uint64), PAGE, 64 * PAGE)
    assert np.flatnonzero(units).tolist() == [0, 1, 5]


@given(st.text(max_size=60))
def test_junk_is_refused(text: str) -> None:
    with pytest.raises(CorruptFileError):
        hot.decode(text + "!")


def test_a_bomb_is_refused() -> None:
    bits = hot.encode(np.zeros(1 << 20, dtype=np.bool_))
    with pytest.raises(CorruptFileError):
        hot.decode("8" + bits[bits.index(":") :])
