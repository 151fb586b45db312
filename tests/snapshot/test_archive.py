"""A snapshot as one file, and ``aenv-store`` as a person and a script use it."""

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from aenv.errors import CorruptFileError
from aenv.snapshot.archive import export_snapshot, import_snapshot
from aenv.snapshot.collector import layer_key
from aenv.snapshot.manifest import dump
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.shared import SharedRepository
from aenv.storage.zfile import write_zfile
from tests.snapshot.things import commit_files, make_file, manifest

ID, OTHER = "ab" * 10, "cd" * 10


@pytest.fixture
def here(tmp_path: Path) -> SharedRepository:
    repository = SharedRepository(PosixStore(tmp_path / "here"))
    for name, size in (("x", 3 << 20), ("y", 10)):
        make_file(tmp_path / name, size)
    commit_files(repository, ID, [tmp_path / "x", tmp_path / "y", tmp_path / "x"])
    return repository


def exported(repository: SharedRepository, snapshot: str = ID) -> bytes:
    out = io.BytesIO()
    export_snapshot(repository, repository.get(snapshot), out)
    return out.getvalue()


def test_an_archive_makes_the_same_snapshot_elsewhere(here: SharedRepository, tmp_path: Path) -> None:
    archive = exported(here)
    there = SharedRepository(PosixStore(tmp_path / "there"))
    seen: list[tuple[int, int]] = []
    value = import_snapshot(there, io.BytesIO(archive), "tool", lambda *step: seen.append(step))
    assert value == here.get(ID) == there.get(ID)
    assert seen[-1] == ((3 << 20) + 10, (3 << 20) + 10)
    assert there.verify().clean and there.verify().layers == 2
    assert import_snapshot(there, io.BytesIO(archive), "tool") == value
    assert not list(there.store.list("claims/"))


def test_compressed_layers_are_not_compressed_again(tmp_path: Path) -> None:
    repository = SharedRepository(PosixStore(tmp_path / "here"))
    make_file(tmp_path / "x", bytes(1 << 20))
    write_zfile(tmp_path / "x", tmp_path / "z")
    commit_files(repository, ID, [tmp_path / "z"])
    commit_files(repository, OTHER, [tmp_path / "x"])
    with tarfile.open(fileobj=io.BytesIO(exported(repository))) as tar:
        assert tar.getnames()[0] == "snapshot.json" and len(tar.getnames()) == 2
    archive = exported(repository, OTHER)
    assert archive[:4] == b"\x28\xb5\x2f\xfd" and len(archive) < 10_000
    there = SharedRepository(PosixStore(tmp_path / "there"))
    import_snapshot(there, io.BytesIO(archive), "tool")
    assert there.verify().clean


def test_what_is_no_whole_archive_is_refused_and_nothing_is_seen(here: SharedRepository, tmp_path: Path) -> None:
    archive = exported(here)
    plain = zstandard.ZstdDecompressor().stream_reader(archive).read()
    flipped = bytearray(plain)
    flipped[len(plain) // 2] ^= 1
    bad = [b"", b"hello", archive[: len(archive) // 2], plain[: len(plain) // 2], bytes(flipped)]
    bad.append(_tar({"snapshot.json": dump(here.get(ID))}))
    bad.append(_tar({"layers/" + "0" * 64: b""}))
    bad.append(_tar({"snapshot.json": dump(manifest(ID, [])), "../../etc/passwd": b"root"}))
    there = SharedRepository(PosixStore(tmp_path / "there"))
    for data in bad:
        with pytest.raises(CorruptFileError):
            import_snapshot(there, io.BytesIO(data), "tool")
        assert not list(there.list()) and not list(there.store.list("claims/"))


def test_an_import_repairs_damaged_layers(here: SharedRepository) -> None:
    archive = exported(here)
    for ref in here.get(ID).disk.layers:
        here.store.put(layer_key(ref.digest), bytes(ref.size))
    assert len(here.verify().problems) == 2
    import_snapshot(here, io.BytesIO(archive), "tool", repair=True)
    assert here.verify().clean


def _tar(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def tool(folder: Path, *words: str, data: bytes | None = None) -> tuple[int, bytes, str]:
    command = [sys.executable, "-m", "aenv.store_tool", "--path", str(folder), *words]
    done = subprocess.run(command, input=data, capture_output=True)
    return done.returncode, done.stdout, done.stderr.decode()


def test_the_tool(here: SharedRepository, tmp_path: Path) -> None:
    here.set_name("team/x", "default", ID)
    folder = tmp_path / "here"
    (listed,) = json.loads(tool(folder, "ls")[1])
    assert (listed["id"], listed["names"], listed["stored_bytes"]) == (ID, ["team/x"], (3 << 20) + 10)
    shown = json.loads(tool(folder, "show", "team/x")[1])
    assert [layer["of"] for layer in shown["layers"]] == ["disk"] * 3
    assert json.loads(tool(folder, "verify")[1])["clean"] is True
    code, archive, _ = tool(folder, "export", "team/x", "-")
    assert code == 0
    assert tool(folder, "rm", "team/x")[0] == 0
    assert json.loads(tool(folder, "gc", "--grace", "0")[1])["layers_deleted"] == 2
    assert tool(folder, "import", "-", "--name", "again:v1", data=archive)[:2] == (0, f"{ID}\n".encode())
    assert b"again:v1" in tool(folder, "ls", "-o", "table")[1]
    assert json.loads(tool(folder, "usage")[1])["layers"] == 2


def test_the_tool_s_errors_and_exit_codes(here: SharedRepository, tmp_path: Path) -> None:
    folder = tmp_path / "here"
    for words, status in ((["show", "nope"], 1), (["rm", "../x"], 1), (["bad"], 2), (["import", "-"], 4)):
        code, _, said = tool(folder, *words, data=b"nothing")
        assert code == status and said and "Traceback" not in said, (words, code, said)
    here.store.put(layer_key(here.get(ID).disk.layers[1].digest), b"0123456789")
    code, printed, _ = tool(folder, "verify", "-o", "table")
    assert code == 4 and ID.encode() in printed
    assert tool(folder, "verify", "--quick")[0] == 0
    assert tool(tmp_path / "absent", "ls")[0] == 1
