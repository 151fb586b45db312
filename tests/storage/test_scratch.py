"""A disk that is written to and sealed into layers, against a plain byte string, in whatever order it is written."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv.errors import CapacityError, CorruptFileError
from aenv.storage.scratch import PAGE, ScratchDisk
from aenv.storage.source import FileSource
from aenv.storage.stack import Stack, open_layer
from aenv.storage.zfile import write_zfile

PAGES = 12
SIZE = PAGES * PAGE

places = st.one_of(st.integers(0, SIZE - 1), st.integers(0, PAGES - 1).map(lambda page: page * PAGE))
lengths = st.one_of(st.integers(0, 3 * PAGE), st.integers(0, 4).map(lambda pages: pages * PAGE))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("write"), places, lengths),
        st.tuples(st.just("zero"), places, lengths),
        st.tuples(st.just("blank"), places, lengths),
        st.tuples(st.just("read"), places, lengths),
        st.tuples(st.just("seal"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@given(steps)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_it_reads_as_it_was_written_and_so_do_its_layers(tmp_path: Path, work: list[tuple[str, int, int]]) -> None:
    disk, model, sealed = ScratchDisk([], SIZE, tmp_path), bytearray(SIZE), []
    for number, (what, offset, length) in enumerate(work):
        length = min(length, SIZE - offset)
        if what == "seal":
            sealed.append(disk.seal())
        elif what == "read":
            assert disk.read(offset, length) == model[offset : offset + length]
        elif what == "zero":
            disk.zero(offset, length)
            model[offset : offset + length] = bytes(length)
        else:
            data = bytes(length) if what == "blank" else bytes([number % 255 + 1]) * length
            disk.write(offset, memoryview(data))
            model[offset : offset + length] = data
    assert disk.read(0, SIZE) == model
    sealed.append(disk.seal())
    assert disk.read(0, SIZE) == model
    stack = Stack([open_layer(each) for each in sealed])
    assert stack.size == SIZE and stack.read(0, SIZE) == model
    for each in sealed:  # a layer's bytes are the same in whatever pieces they are read
        whole = each.read(0, each.size)
        assert b"".join(each.read(at, min(1000, each.size - at)) for at in range(0, each.size, 1000)) == whole
    again = ScratchDisk([open_layer(each) for each in sealed], SIZE, tmp_path)
    again.write(5, memoryview(b"x"))
    model[5:6] = b"x"
    assert again.read(0, SIZE) == model


def test_layers_hold_what_was_written_alone(tmp_path: Path) -> None:
    disk = ScratchDisk([], SIZE, tmp_path)
    disk.write(0, memoryview(bytes(2 * PAGE)))
    disk.write(3 * PAGE, memoryview(b"a" * PAGE))
    for _ in range(5):
        disk.write(3 * PAGE, memoryview(b"b" * PAGE))
    first = disk.seal()
    assert first.data_bytes == PAGE, "zeros over nothing are nothing, and a page has one place"
    disk.write(3 * PAGE + 1, memoryview(b"c"))
    disk.zero(5 * PAGE, PAGE)
    second = disk.seal()
    assert second.data_bytes == PAGE
    assert open_layer(second).extents.zeroed.tolist() == [False, True], "zeros hide what may be below"
    assert disk.seal().data_bytes == 0


def test_a_sealed_layer_is_one_like_any_other(tmp_path: Path) -> None:
    disk = ScratchDisk([], SIZE, tmp_path)
    data = os.urandom(SIZE)
    for page in range(PAGES - 1, -1, -1):  # stored the other way round
        disk.write(page * PAGE, memoryview(data)[page * PAGE : (page + 1) * PAGE])
    write_zfile(disk.seal(), tmp_path / "layer")
    with FileSource(tmp_path / "layer") as file:
        view = open_layer(file)
        assert Stack([view]).read(0, SIZE) == data
        assert len(view.extents) == 1, "in the order of the disk"
        larger = ScratchDisk([view], 2 * SIZE, tmp_path)
        assert larger.read(SIZE - PAGE, 2 * PAGE) == data[-PAGE:] + bytes(PAGE)


def test_what_is_outside_or_does_not_fit_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = ScratchDisk([], SIZE, tmp_path)
    for call in (
        lambda: disk.read(SIZE, 1),
        lambda: disk.write(SIZE - 1, memoryview(b"xy")),
        lambda: disk.zero(-1, 1),
    ):
        with pytest.raises(CorruptFileError):
            call()
    with pytest.raises(ValueError, match="whole number"):
        ScratchDisk([], SIZE + 1, tmp_path)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CapacityError):
        disk.write(0, memoryview(b"x" * PAGE))
