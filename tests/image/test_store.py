"""The blob cache and its garbage collection."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.image.errors import DigestMismatchError
from aenv.image.gc import MIN_AGE_S, Entry, candidates, collect
from aenv.image.layerstore import Hold, LayerStore, StoredLayer
from aenv.image.store import BlobStore, Lease
from tests.image.writer import digest_of


async def write(store: BlobStore, data: bytes, digest: str = "") -> Lease:
    async with store.writing(digest or digest_of(data)) as partial:
        partial.append(data)
        return store.commit(partial)


def age(store: BlobStore, data: bytes, seconds: float) -> None:
    moment = time.time() - seconds
    os.utime(store.path(digest_of(data)), (moment, moment))


async def test_written_blobs_are_leased_listed_and_removed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    with await write(store, b"content") as lease:
        assert lease.path == tmp_path / "images/blobs/sha256" / hashlib.sha256(b"content").hexdigest()
        assert lease.path.read_bytes() == b"content"
        assert not store.remove(digest_of(b"content"))
    assert [(blob.digest, blob.size) for blob in store.blobs()] == [(digest_of(b"content"), 7)]
    first, second = store.lease(digest_of(b"content")), store.lease(digest_of(b"content"))
    assert first and second
    first.close()
    assert not store.remove(digest_of(b"content"))
    second.close()
    assert store.remove(digest_of(b"content")) and store.remove(digest_of(b"content"))
    assert store.lease(digest_of(b"content")) is None and store.blobs() == []


async def test_wrong_content_never_gets_its_name(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(DigestMismatchError):
        await write(store, b"other", digest_of(b"content"))
    assert store.lease(digest_of(b"content")) is None
    (await write(store, b"content")).close()  # the wrong start was discarded
    with pytest.raises(ValueError):
        store.path("sha256:../../etc/passwd")


def test_documents_are_verified_when_read(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.put(b"{}", digest_of(b"{}"))
    assert store.get(digest_of(b"{}")) == b"{}"
    store.path(digest_of(b"{}")).write_bytes(b"[]")
    assert store.get(digest_of(b"{}")) is None and store.blobs() == []


async def test_collection_spares_what_was_used_since_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = BlobStore(tmp_path)
    for data in (b"first", b"second"):
        (await write(store, data)).close()
        age(store, data, 2 * MIN_AGE_S)

    def listed(entries: Iterable[Entry], now: float) -> list[Entry]:
        found = candidates(entries, now)
        lease = store.lease(digest_of(b"second"))  # a pull that begins and ends now
        assert lease is not None
        lease.close()
        return found

    monkeypatch.setattr("aenv.image.gc.candidates", listed)
    assert collect(tmp_path, 0).removed == 1
    assert [blob.digest for blob in store.blobs()] == [digest_of(b"second")]


async def test_collection_spares_what_is_used(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    contents = [bytes([number]) * 1000 for number in range(5)]
    leases = [await write(store, data) for data in contents]
    for lease in leases[1:]:
        lease.close()
    for number, data in enumerate(contents[:4]):
        age(store, data, MIN_AGE_S * (10 - number))
    layers, hold = LayerStore(tmp_path), Hold(LayerStore(tmp_path))
    for name in ("linked", "unused"):
        data = os.urandom(8192)
        (tmp_path / "made").write_bytes(data)
        layers.add(hold, tmp_path / "made", StoredLayer(digest_of(data), len(data)))
        layers.record(name, hold)
        os.utime(layers.path(digest_of(data)), (1, 1))
    linked, unused = (layers.path(layer.digest) for layer in hold.layers)
    (tmp_path / "layer").hardlink_to(linked)
    hold.close()
    result = collect(tmp_path, 3000)
    # The oldest blob is leased, the newest is too young; the layer that a template links frees nothing.
    assert {blob.digest for blob in store.blobs()} == {digest_of(contents[number]) for number in (0, 3, 4)}
    assert layers.paths() == [linked] and not unused.exists()
    assert layers.find("unused") is None and not (tmp_path / "images/chains/unused.json").exists()
    found = layers.find("linked")
    assert found is not None
    found.close()
    assert (result.removed, result.kept_bytes) == (3, 3000)
    leases[0].close()
    collect(tmp_path, 0)
    assert [blob.digest for blob in store.blobs()] == [digest_of(contents[4])]


def test_another_process_holds_a_blob(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    store.put(b"content", digest_of(b"content"))
    program = (
        "import sys; from pathlib import Path; from aenv.image.store import BlobStore\n"
        "lease = BlobStore(Path(sys.argv[1])).lease(sys.argv[2]); print(flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program, str(tmp_path), digest_of(b"content")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not store.remove(digest_of(b"content"))
        process.kill()
    assert store.remove(digest_of(b"content"))


entries = st.lists(st.builds(Entry, st.just(Path("x")), st.integers(0, 100), st.floats(0, 10_000)), max_size=20)


@given(entries)
def test_the_longest_unused_go_first(found: list[Entry]) -> None:
    now = 5000.0
    ordered = candidates(found, now)
    assert [entry.used for entry in ordered] == sorted(entry.used for entry in found if entry.used <= now - MIN_AGE_S)
