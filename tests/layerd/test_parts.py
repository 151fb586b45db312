"""The parts of the layer server that need no mount: protocol, exports, shared memory, read-ahead, data maps."""

import errno
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import ConflictError, CorruptFileError, InvalidRequestError, NotFoundError
from aenv.storage.layerd import control, protocol, shared
from aenv.storage.layerd.config import Config
from aenv.storage.layerd.datamap import DataMap
from aenv.storage.layerd.exports import Exports, Layer, parse
from aenv.storage.layerd.handoff import Handoff
from aenv.storage.layerd.protocol import Flag, FuseError, Op
from aenv.storage.layerd.touched import Touched
from aenv.storage.readahead import BACK, GAP, LARGEST, START, ReadAhead
from aenv.storage.runs import ZERO, Runs

LAYER = Layer("sha256:" + "0" * 64, 10000)


def init(major: int = 7, minor: int = 45, flags: int = 0xFFFFFFFF_FFFFFFFF) -> bytes:
    body = struct.pack("<IIIII44x", major, minor, 131072, flags & 0xFFFFFFFF, flags >> 32)
    return struct.pack("<IIQQIIIHH", 40 + len(body), 26, 7, 0, 0, 0, 0, 0, 0) + body


def test_init_takes_what_both_know() -> None:
    answer, session = protocol.initialise(init(), 256, 512)
    length, error, unique, major, minor, _, flags = struct.unpack_from("<IiQIIII", answer)
    assert (length, error, unique, major, minor) == (len(answer), 0, 7, 7, 38)
    assert len(answer) == 16 + 64  # struct fuse_init_out
    assert flags & Flag.MAX_PAGES
    assert not flags & 1 << 16  # FUSE_WRITEBACK_CACHE was offered and is not wanted
    assert session.max_pages == 256
    assert session.resends
    _, old = protocol.initialise(init(minor=31, flags=int(Flag.ASYNC_READ)), 256, 512)
    assert (old.minor, old.max_pages, old.resends) == (31, 32, False)


@pytest.mark.parametrize(
    "request_", [init(major=6), init(minor=20), init()[:50], b"", init()[:4] + b"\1" + init()[5:]]
)
def test_init_of_something_else(request_: bytes) -> None:
    with pytest.raises(FuseError) as caught:
        protocol.initialise(request_, 256, 512)
    assert caught.value.number == errno.EPROTO


def test_sizes_are_the_kernels() -> None:
    attributes = protocol.Attributes(5, 1000, 0o100400, 0, 1)
    assert len(protocol.attributes(attributes)) == 88
    assert len(protocol.entry_reply(attributes)) == 128
    assert len(protocol.attributes_reply(attributes)) == 104
    assert len(protocol.open_reply(1)) == 16
    assert len(protocol.statfs_reply(10, 1)) == 80
    assert protocol.IN_HEADER.size == 40
    assert struct.unpack_from("<Q", protocol.entry_reply(attributes), 16) == (0,)  # the name is not remembered


@given(st.lists(st.binary(min_size=1, max_size=255), max_size=40), st.integers(0, 4096))
def test_directories_in_pieces(names: list[bytes], size: int) -> None:
    entries = [(n + 1, n + 2, name, False) for n, name in enumerate(names)]
    data = protocol.directory_reply(entries, size)
    assert len(data) <= size
    at, found = 0, []
    while at < len(data):
        inode, position, length, kind = struct.unpack_from("<QQII", data, at)
        found.append((position, inode, data[at + 24 : at + 24 + length], kind == 4))
        at += -(-(24 + length) // 8) * 8
    assert found == entries[: len(found)]
    assert len(found) == len(entries) or size - len(data) < 24 + 255 + 8


def test_exports_survive_and_keep_their_inodes(tmp_path: Path) -> None:
    path = tmp_path / "exports.json"
    exports = Exports(path)
    one, new = exports.add("one", 100, (LAYER,), {"backend": "s3", "secret": "x"})
    assert new
    two, _ = exports.add("two", 100, (), {})
    assert path.stat().st_mode & 0o777 == 0o600
    renewed, new = exports.add("one", 100, (LAYER,), {"backend": "s3", "secret": "y"})
    assert not new
    assert Exports(path).by_inode(one.inode) == renewed
    with pytest.raises(ConflictError):
        exports.add("one", 101, (LAYER,), {})
    exports.hide("one")
    again = Exports(path)
    assert again.by_name("one") is None
    hidden = again.by_inode(one.inode)
    assert hidden is not None
    assert hidden.removed
    with pytest.raises(NotFoundError):
        again.hide("one")
    other, _ = again.add("one", 5, (), {})
    assert other.inode > two.inode > one.inode
    again.drop(one.inode)
    assert [e.inode for e in Exports(path).all()] == [two.inode, other.inode]
    again.drop(other.inode)
    assert Exports(path).add("three", 1, (), {})[0].inode > other.inode  # never used again
    path.write_text('{"next": 1, "exports": [{}]}')
    with pytest.raises(CorruptFileError):
        Exports(path)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"name": "", "virtual_size": 1, "layers": [], "repository": {}},
        {"name": "a/b", "virtual_size": 1, "layers": [], "repository": {}},
        {"name": "..", "virtual_size": 1, "layers": [], "repository": {}},
        {"name": "a", "virtual_size": -1, "layers": [], "repository": {}},
        {"name": "a", "virtual_size": 1, "layers": [7], "repository": {}},
        {"name": "a", "virtual_size": 1, "layers": [{"digest": "sha256:x", "size": 1}], "repository": {}},
        {"name": "a", "virtual_size": 1, "layers": [{"digest": LAYER.digest, "size": 1}] * 256, "repository": {}},
        {"name": "a", "virtual_size": 1, "layers": [], "repository": "here"},
    ],
)
def test_exports_that_make_no_sense(value: dict[str, object]) -> None:
    with pytest.raises(InvalidRequestError):
        parse(value)


def test_requests_and_open_files_outlive_a_server() -> None:
    fd = shared.create()
    first = shared.Shared(fd)
    slots = [first.take() for _ in range(3)]
    for slot in slots:
        first.request(slot)[:40] = protocol.IN_HEADER.pack(80, Op.READ, slot + 100, 2, 0, 0, 0, 0, 0)
    first.done(slots[1])
    assert first.opened(100, 2)
    assert not first.opened(100, 2)
    first.opened(200, 3)
    second = shared.Shared(fd)
    assert list(second.unanswered()) == [slots[0], slots[2]]
    assert protocol.IN_HEADER.unpack_from(second.request(slots[2]))[2] == slots[2] + 100
    taken = {second.take() for _ in range(shared.SLOTS - 2)}
    assert not taken & {slots[0], slots[2]}
    assert second.open_inodes() == {2: 1, 3: 1}
    second.released(100)
    second.released(100)
    assert not second.is_open(2)
    assert second.is_open(3)
    assert shared.Shared(fd).open_inodes() == {3: 1}
    os.close(fd)


def test_all_handles_in_use() -> None:
    fd = shared.create()
    table = shared.Shared(fd)
    for handle in range(1, shared.HANDLES + 1):
        table.opened(handle, 2)
    with pytest.raises(FuseError) as caught:
        table.opened(1 << 40, 2)
    assert caught.value.number == errno.ENFILE
    table.released(77)
    assert table.opened(1 << 40, 2)
    os.close(fd)


def test_what_is_handed_on() -> None:
    config = Config(Path("/run/x"), None, 1, 2, 3)
    assert Config.load(config.dump()) == config
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    device, memory, listener, lock, alive = fds
    handoff = Handoff(config, protocol.Session(38, 5, 256), device, memory, listener, lock, alive)
    for fd in fds:
        os.set_inheritable(fd, True)
    assert Handoff.load(handoff.dump()) == handoff
    assert not any(os.get_inheritable(fd) for fd in fds)
    for fd in fds:
        os.close(fd)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 1 << 20)), max_size=60))
def test_scattered_reads_fetch_nothing_ahead_in_vain(reads: list[tuple[int, int]]) -> None:
    streams, ahead, total = ReadAhead(), 0, 0
    for begin, length in reads:
        start, end = streams.after(begin, begin + length)
        assert 0 <= end - start <= 2 * LARGEST
        ahead += end - start
        total += length + GAP
    assert ahead <= total


def test_a_stream_is_fetched_once_and_ahead() -> None:
    streams, have = ReadAhead(), 0
    for at in range(0, 100 << 20, 64 << 10):
        start, end = streams.after(at, at + (64 << 10))
        if start < end:
            assert start >= have  # nothing twice
            assert have == 0 or start == have  # no gap
            have = end
        if at > 4 * START:
            assert have > at + (64 << 10)
    assert have <= (100 << 20) + LARGEST
    assert streams.after(5 << 20, (5 << 20) + BACK) == ((5 << 20) + BACK,) * 2


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from([ZERO, 0, 1])), max_size=12),
    st.integers(0, 60),
    st.booleans(),
)
@settings(max_examples=300)
def test_where_data_is(pieces: list[tuple[int, int, int]], offset: int, data: bool) -> None:
    disk = [False] * 64
    at, rows = 0, []
    for gap, length, layer in pieces:
        begin = at + gap
        at = begin + length
        rows.append((begin, at, layer))
        disk[begin:at] = [layer != ZERO] * length
    columns = list(zip(*rows, strict=True)) or [(), (), ()]
    start, end, layers = (np.array(column, dtype=np.int64) for column in columns)
    size = max(64, at)
    found = DataMap(Runs(start, end, layers.astype(np.int32), start), size).seek(offset, data=data)
    expected = next((i for i in range(offset, len(disk)) if disk[i] is data), None if data else size)
    assert found == expected


def test_touched_pages_are_counted_once() -> None:
    touched = Touched(10 * 4096 + 5)
    touched.add(4095, 2)
    touched.add(0, 4096)
    touched.add(10 * 4096, 5)
    assert touched.bytes() == 3 * 4096


def test_errors_travel_as_what_they_are() -> None:
    def refuse(request: dict[str, object]) -> dict[str, object]:
        raise ConflictError("No.", "Do that.")

    with pytest.raises(ConflictError, match=r"No\. Do that\."):
        control.result(_line(control.answer(b'{"op": "x"}', refuse)))
    with pytest.raises(InvalidRequestError):
        control.result(_line(control.answer(b"{", refuse)))
    assert control.result(_line(control.answer(b"{}", lambda _: {"a": 1}))) == {"a": 1}


def _line(value: dict[str, object]) -> bytes:
    return json.dumps(value).encode()
