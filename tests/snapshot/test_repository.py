"""The repository over a folder and over a real S3 server: commits, names, deletion, collection, verification."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from aenv.errors import (
    ConflictError,
    CorruptFileError,
    InvalidRequestError,
    NotFoundError,
    SnapshotNotFoundError,
    SourceError,
)
from aenv.snapshot.catalog import shard_key
from aenv.snapshot.claims import load_digests
from aenv.snapshot.collector import layer_key
from aenv.snapshot.manifest import LayerRef, dump, load
from aenv.snapshot.objects import ObjectStore
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.sealed import seal, unseal
from aenv.snapshot.shared import SharedRepository
from tests.snapshot.things import WHEN, commit_files, make_file, manifest

ID, OTHER = "ab" * 10, "cd" * 10
NOW = timedelta(0)


def test_a_manifest_is_read_back_and_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    ref = make_file(tmp_path / "x", 10)
    value = manifest(ID, [ref, ref], [ref], ref)
    data = dump(value)
    assert load(data, "it") == value
    for at in range(0, len(data), 7):
        torn = bytearray(data)
        torn[at] ^= 1 << at % 8
        with pytest.raises(CorruptFileError):
            load(bytes(torn), "it")
    for wrong in (data[:-1], data + b"\n", b"", b"{}", seal(b"{}"), seal(b'{"format":"aenv-snapshot","version":2}')):
        with pytest.raises(CorruptFileError):
            load(wrong, "it")


@pytest.mark.parametrize(
    ("pattern", "value"),
    [
        (rb'"size":\d+', b'"size":-1'),
        (rb'"virtual_size":\d+', b'"virtual_size":4611686018427387905'),
        (rb"sha256:[0-9a-f]{64}", b"sha256:../../../../etc/passwd"),
        (rb'"id":"[0-9a-f]+"', b'"id":"../up"'),
        (rb'"state":\{[^}]*\}', b'"state":null'),
        (rb'"parent":null', b'"parent":null,"more":1'),
        (rb"\+00:00|Z(?=\")", b""),
    ],
)
def test_a_sealed_manifest_that_makes_no_sense_is_refused(tmp_path: Path, pattern: bytes, value: bytes) -> None:
    ref = make_file(tmp_path / "x", 10)
    body = unseal(dump(manifest(ID, [ref], [ref], ref)), "it")
    changed = re.sub(pattern, value, body, count=1)
    assert changed != body
    with pytest.raises(CorruptFileError):
        load(seal(changed), "it")


def test_a_commit_is_seen_whole_by_another_node(repository: SharedRepository, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("base", "top", "memory", "state")]
    refs = [make_file(path, size) for path, size in zip(files, (9 << 20, 5000, 70_000, 17), strict=True)]
    value = manifest(ID, refs[:2], refs[2:3], refs[3])
    with repository.claim(value.digests(), "node") as claim:
        for path in files:
            repository.put_layer(path)
        assert not list(repository.list())
        repository.commit(value, claim=claim)
    other = SharedRepository(repository.store)
    assert list(other.list()) == [value] == [other.get(ID)]
    for path, ref in zip(files, refs, strict=True):
        other.fetch(ref, tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == path.read_bytes()
        source = other.open_layer(ref)
        assert source.read(5, 10) == path.read_bytes()[5:15]
        source.close()
    report = other.verify()
    assert (report.clean, report.snapshots, report.layers) == (True, 1, 4)
    assert report.bytes == sum(ref.size for ref in refs)


def test_committing_again_is_fine_and_other_content_is_not(repository: SharedRepository, tmp_path: Path) -> None:
    first = commit_files(repository, ID, [_file(tmp_path / "x")])
    later = replace(first, created_at=WHEN + timedelta(days=1))
    with repository.claim(first.digests(), "two") as claim:
        repository.commit(later, claim=claim)
        with pytest.raises(ConflictError):
            repository.commit(replace(first, disk_mib=1), claim=claim)
    assert repository.get(ID) == first


def test_two_processes_commit_the_same_thing_at_once(store: ObjectStore, tmp_path: Path) -> None:
    files = [_file(tmp_path / f"{number}", 3 << 20) for number in range(3)]
    nodes = [SharedRepository(store) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda node: commit_files(node, ID, files, f"node-{id(node)}"), nodes))
    assert all(value == done[0] for value in done)
    assert nodes[0].verify().clean
    assert not list(store.list("claims/"))


def test_a_commit_needs_its_layers_and_its_claim(repository: SharedRepository, tmp_path: Path) -> None:
    ref = make_file(tmp_path / "x", 100)
    value = manifest(ID, [ref])
    with repository.claim([ref.digest], "node") as claim:
        with pytest.raises(NotFoundError):
            repository.commit(value, claim=claim)
        repository.put_layer(tmp_path / "x")
        with pytest.raises(CorruptFileError):
            repository.commit(manifest(ID, [LayerRef(ref.digest, 99)]), claim=claim)
    with repository.claim([], "node") as nothing, pytest.raises(ConflictError):
        repository.commit(value, claim=nothing)
    assert not list(repository.list())


def test_deleting_frees_exactly_what_nobody_else_names(repository: SharedRepository, tmp_path: Path) -> None:
    shared, mine, other = (_file(tmp_path / name, 1000) for name in ("shared", "mine", "other"))
    one = commit_files(repository, ID, [shared, mine])
    two = commit_files(repository, OTHER, [shared, other])
    assert repository.gc(NOW).layers_deleted == 0
    repository.delete(ID)
    with pytest.raises(SnapshotNotFoundError):
        repository.get(ID)
    with pytest.raises(SnapshotNotFoundError):
        repository.delete(ID)
    usage = repository.usage()
    assert (usage.layers, usage.unreferenced_layers, usage.unreferenced_bytes) == (3, 1, 1000)
    young = repository.gc(timedelta(hours=1))
    assert (young.layers_deleted, young.young) == (0, 1)
    report = repository.gc(NOW)
    assert (report.layers_deleted, report.bytes_freed, report.layers_kept) == (1, 1000, 2)
    assert [repository.has_layer(ref.digest) for ref in one.disk.layers] == [True, False]
    assert all(repository.has_layer(ref.digest) for ref in two.disk.layers)
    assert repository.verify().clean


def test_what_a_node_reads_stays_until_it_lets_go(repository: SharedRepository, tmp_path: Path) -> None:
    value = commit_files(repository, ID, [_file(tmp_path / "x")])
    found, claim = repository.acquire(ID, "reader")
    assert found == value
    repository.delete(ID)
    assert repository.gc(NOW).layers_deleted == 0
    assert repository.usage().claimed_bytes == value.disk.layers[0].size
    claim.release()
    claim.release()
    assert repository.gc(NOW).layers_deleted == 1
    with pytest.raises(SnapshotNotFoundError):
        repository.acquire(ID, "reader")
    assert not list(repository.store.list("claims/"))


def test_a_node_that_starts_drops_the_claims_of_its_former_life(store: ObjectStore, tmp_path: Path) -> None:
    ref = make_file(tmp_path / "x", 10)
    before, now = SharedRepository(store), SharedRepository(store)
    before.claim([ref.digest], "node-1")
    before.claim([ref.digest], "node-10")
    now.claim([ref.digest], "node-1")  # of this life: it stays
    assert now.drop_claims("node-1") == 1
    assert len(list(store.list("claims/"))) == 2


def test_names(repository: SharedRepository, tmp_path: Path) -> None:
    for snapshot in (ID, OTHER):
        commit_files(repository, snapshot, [_file(tmp_path / snapshot)])
    repository.set_name("team/über name", "default", ID)
    repository.set_name("team/über name", "v1", ID, expected=None)
    with pytest.raises(ConflictError):
        repository.set_name("team/über name", "v1", OTHER, expected=None)
    repository.set_name("team/über name", "v1", OTHER, expected=ID)
    assert SharedRepository(repository.store).resolve("team/über name", "v1") == OTHER
    assert [(entry.tag, entry.snapshot) for entry in repository.names()] == [("default", ID), ("v1", OTHER)]
    with pytest.raises(ConflictError):
        repository.delete_name("team/über name", "v1", expected=ID)
    repository.delete_name("team/über name", "v1")
    for call in (
        lambda: repository.resolve("team/über name", "v1"),
        lambda: repository.delete_name("team/über name", "v1"),
        lambda: repository.set_name("a", "b", "00" * 10),
    ):
        with pytest.raises(SnapshotNotFoundError):
            call()
    for name in ("", "a:b", "a\nb", "x" * 300):
        with pytest.raises(InvalidRequestError):
            repository.set_name(name, "default", ID)
    repository.delete(ID)
    assert not list(repository.names())


def test_of_many_that_name_at_once_none_is_lost(repository: SharedRepository, tmp_path: Path) -> None:
    commit_files(repository, ID, [_file(tmp_path / "x")])
    nodes = [SharedRepository(repository.store) for _ in range(6)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda pair: pair[1].set_name("name", str(pair[0]), ID), enumerate(nodes * 3)))
    assert len(list(repository.names())) == 18


def test_flipped_bytes_are_found_and_repaired(repository: SharedRepository, tmp_path: Path) -> None:
    path = _file(tmp_path / "x", 10_000)
    ref = commit_files(repository, ID, [path]).disk.layers[0]
    _flip(repository.store, layer_key(ref.digest), tmp_path)
    report = repository.verify()
    assert [(problem.key, problem.snapshots) for problem in report.problems] == [(layer_key(ref.digest), (ID,))]
    assert repository.verify(deep=False).clean
    with pytest.raises(CorruptFileError):
        repository.fetch(ref, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    repository.put_layer(path, replace=True)
    assert repository.verify().clean
    repository.fetch(ref, tmp_path / "copy")


def test_a_damaged_manifest_is_never_served_and_stops_collections(
    repository: SharedRepository, tmp_path: Path
) -> None:
    commit_files(repository, ID, [_file(tmp_path / "x")])
    commit_files(repository, OTHER, [_file(tmp_path / "y")])
    key = f"snapshots/{ID}.json"
    _flip(repository.store, key, tmp_path)
    again = SharedRepository(repository.store)
    with pytest.raises(CorruptFileError):
        again.get(ID)
    assert [value.id for value in again.list()] == [OTHER]
    assert [problem.snapshots for problem in again.verify().problems] == [(ID,)]
    with pytest.raises(ConflictError):
        again.gc(NOW)
    again.delete(ID)
    assert again.gc(NOW).layers_deleted == 1
    assert again.verify().clean


def test_a_missing_layer_and_a_moved_manifest_are_reported(repository: SharedRepository, tmp_path: Path) -> None:
    ref = commit_files(repository, ID, [_file(tmp_path / "x")]).disk.layers[0]
    data, _ = repository.store.get(f"snapshots/{ID}.json")
    repository.store.put(f"snapshots/{OTHER}.json", data)
    repository.store.delete(layer_key(ref.digest))
    with pytest.raises(SourceError):
        repository.fetch(ref, tmp_path / "copy")
    keys = sorted(problem.key for problem in SharedRepository(repository.store).verify().problems)
    assert keys == sorted([layer_key(ref.digest), f"snapshots/{OTHER}.json"])


@pytest.mark.parametrize("name", ["names/00.json", "claims/node/torn.json", "tombs/torn.json"])
def test_a_damaged_document_is_reported(repository: SharedRepository, name: str) -> None:
    repository.store.put(name, b'{"sha256":"')
    assert len(repository.verify().problems) == 1


def test_a_layer_is_not_written_again(tmp_path: Path) -> None:
    repository = SharedRepository(PosixStore(tmp_path / "repository"))
    ref = repository.put_layer(_file(tmp_path / "x"))
    stored = tmp_path / "repository" / layer_key(ref.digest)
    before = stored.stat().st_ino
    assert repository.put_layer(tmp_path / "x", ref.digest) == ref
    assert stored.stat().st_ino == before
    with pytest.raises(CorruptFileError):
        repository.put_layer(_file(tmp_path / "y", 7), ref.digest)


def _file(path: Path, size: int = 100) -> Path:
    make_file(path, size)
    return path


def _flip(store: ObjectStore, key: str, folder: Path) -> None:
    """Change one bit of an object, as a disk would: without anybody being told."""
    data = bytearray(store.get(key)[0])
    data[len(data) // 2] ^= 4
    store.put(key, bytes(data))


def test_a_damaged_document_of_names_costs_the_others_nothing(repository: SharedRepository, tmp_path: Path) -> None:
    make_file(tmp_path / "x", 100)
    commit_files(repository, ID, [tmp_path / "x"])
    commit_files(repository, OTHER, [tmp_path / "x"])
    names = {shard_key(name): name for name in ("one", "two")}
    assert len(names) == 2
    for name in names.values():
        repository.set_name(name, "default", ID)
    damaged, healthy = names
    repository.store.put(damaged, b"torn")
    assert [entry.name for entry in repository.names()] == [names[healthy]]
    with pytest.raises(CorruptFileError):
        repository.resolve(names[damaged], "default")
    assert [problem.key for problem in repository.verify().problems] == [damaged]
    repository.delete(ID)
    repository.delete(OTHER)
    assert list(repository.names()) == []
    assert repository.gc(NOW).layers_deleted == 1


def test_files_of_others_are_left_alone_and_reported(repository: SharedRepository, tmp_path: Path) -> None:
    """NFS keeps what is open and deleted as ``.nfs…`` in the same folder, and people keep copies."""
    ref = make_file(tmp_path / "x", 100)
    commit_files(repository, ID, [tmp_path / "x"])
    repository.set_name("one", "default", ID)
    hidden = ["layers/ab/.nfs0001", "snapshots/.nfs0002"]
    strange = [
        "layers/ab/foo.tmp",
        f"layers/ab/{'ab' * 32}.orig",
        "snapshots/list.txt",
        "snapshots/up/abababababababababab.json",
    ]
    for key in (*hidden, *strange, "names/list.txt"):
        repository.store.put(key, b"x")
    assert sorted(problem.key for problem in repository.verify().problems) == sorted(strange)
    assert repository.usage().layers == 1
    assert [entry.name for entry in repository.names()] == ["one"]
    assert repository.gc(NOW).layers_deleted == 0
    repository.delete(ID)
    assert repository.gc(NOW).layers_deleted == 1
    assert not repository.has_layer(ref.digest)
    assert all(repository.store.head(key) for key in (*hidden, *strange))


@pytest.mark.parametrize("body", [b"{{", b"5", b'{"a":1}', b"[1]", b"[" * 100_000])
def test_a_sealed_claim_that_makes_no_sense_is_a_typed_error(body: bytes) -> None:
    with pytest.raises(CorruptFileError):
        load_digests(seal(body), "it")


def test_what_is_no_regular_file_is_no_object(tmp_path: Path) -> None:
    store = PosixStore(tmp_path)
    store.put("names/00.json", b"x")
    os.mkfifo(tmp_path / "names/01.json")
    (tmp_path / "names/02.json").symlink_to("02.json")
    assert [info.key for info in store.list("names/")] == ["names/00.json"]
