"""What layers do to a tree: against a simple model, and hostile ones."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aenv.errors import CapacityError
from aenv.image.budget import Budget
from aenv.image.errors import ArchiveError, DigestMismatchError, ImageTooLargeError, UnsafeArchiveError
from aenv.image.layers import apply_layer
from tests.image.writer import archive, compress, digest_of, folder, hard_link, member, symlink

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="unpacking needs root"),
    pytest.mark.timeout(20),
]

Member = tuple[tarfile.TarInfo, bytes]
Apply = Callable[..., Path]


@pytest.fixture
def apply(tmp_path: Path) -> Apply:
    """Applies layers, each a list of members, to one tree, beside which is a file that nobody may touch."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/victim").write_text("untouched")

    def run(*layers: list[Member], size_mib: int = 64, reserve: int = 0, **more: object) -> Path:
        for members in layers:
            layer = tmp_path / "layer.tar"
            layer.write_bytes(archive(members))
            apply_layer(tree, layer, Budget(size_mib, tmp_path, reserve), **more)  # type: ignore[arg-type]
        return tree

    return run


def untouched(tree: Path) -> bool:
    outside = tree.parent / "outside"
    return [path.name for path in outside.iterdir()] == ["victim"] and (outside / "victim").read_text() == "untouched"


# --- A model: the tree as a dictionary --------------------------------------------------------------------------

Model = dict[str, bytes | None]  # content of a file, None for a directory

names = st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "a/a/a", "a/a/b", "b/a/a"])
operations = st.tuples(st.sampled_from(["file", "folder", "whiteout", "opaque"]), names, st.binary(max_size=3))


def remove(model: Model, name: str, spared: set[str]) -> None:
    for path in [path for path in model if (path == name or path.startswith(f"{name}/")) and path not in spared]:
        if not any(other.startswith(f"{path}/") for other in spared):
            del model[path]


def model_apply(model: Model, layer: list[tuple[str, str, bytes]]) -> None:
    made: set[str] = set()
    for kind, name, data in layer:
        if kind == "whiteout":
            remove(model, name, made)
            continue
        if kind == "opaque":
            for path in [
                path for path in model if path.startswith(f"{name}/") and path.count("/") == name.count("/") + 1
            ]:
                remove(model, path, made)
            continue
        parts = name.split("/")
        for end in range(1, len(parts)):
            parent = "/".join(parts[:end])
            if model.get(parent, b"") is not None:
                model[parent] = None
                made.add(parent)
        if kind == "file" or model.get(name, b"") is not None:
            remove(model, name, set())
            made -= {path for path in made if path.startswith(f"{name}/")}
            model[name] = data if kind == "file" else None
        made.add(name)


def members_of(layer: list[tuple[str, str, bytes]]) -> list[Member]:
    found = []
    for kind, name, data in layer:
        above, _, last = name.rpartition("/")
        prefix = f"{above}/" if above else ""
        found.append(
            {
                "file": lambda: member(name, data),  # noqa: B023
                "folder": lambda: folder(name),  # noqa: B023
                "whiteout": lambda: member(f"{prefix}.wh.{last}"),  # noqa: B023
                "opaque": lambda: member(f"{name}/.wh..wh..opq"),  # noqa: B023
            }[kind]()
        )
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=st.lists(st.lists(operations, max_size=6), min_size=1, max_size=3))
def test_layers_do_what_the_model_does(
    layers: list[list[tuple[str, str, bytes]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("model")
    tree = directory / "tree"
    tree.mkdir()
    model: Model = {}
    for layer in layers:
        (directory / "layer").write_bytes(archive(members_of(layer)))
        apply_layer(tree, directory / "layer", Budget(64, directory, 0))
        model_apply(model, layer)
    found: Model = {
        str(path.relative_to(tree)): None if path.is_dir() else path.read_bytes() for path in tree.rglob("*")
    }
    assert found == model


# --- Details ------------------------------------------------------------------------------------------------------


def test_a_whiteout_spares_its_own_layer_in_any_order(apply: Apply) -> None:
    tree = apply(
        [member("d/old", b"1"), member("f", b"1")],
        [member("d/new", b"2"), member("d/.wh..wh..opq"), member("f", b"2"), member(".wh.f"), member(".wh.d")],
    )
    assert sorted(path.name for path in tree.rglob("*")) == ["d", "f", "new"]
    assert (tree / "f").read_bytes() == b"2"


def test_a_file_system_archive_has_no_whiteouts(apply: Apply) -> None:
    tree = apply([member("f"), member(".wh.f")], whiteouts=False)
    assert sorted(path.name for path in tree.iterdir()) == [".wh.f", "f"]


def test_a_rewritten_file_does_not_change_its_other_names(apply: Apply) -> None:
    tree = apply([member("a", b"old"), hard_link("b", "a")], [member("a", b"new")])
    assert ((tree / "a").read_bytes(), (tree / "b").read_bytes()) == (b"new", b"old")


def test_a_link_to_itself_keeps_the_file(apply: Apply) -> None:
    tree = apply([member("a", b"x"), symlink("d", "."), hard_link("d/a", "a"), hard_link("a", "a")])
    assert (tree / "a").read_bytes() == b"x"


def test_parents_are_made_and_replaced(apply: Apply) -> None:
    tree = apply(
        [symlink("dangling", "/made/here"), member("file", b"1"), folder("set", mode=0o2755, gid=9)],
        [member("dangling/x", b"1"), member("file/x", b"2"), member("set/x/y", b"3")],
    )
    assert (tree / "made/here/x").read_bytes() == b"1" and (tree / "file/x").read_bytes() == b"2"
    implicit = (tree / "set/x").stat()
    assert (stat.S_IMODE(implicit.st_mode), implicit.st_gid) == (0o755, 0)


def test_a_sparse_file_stays_sparse(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 29)
        file.write(b"middle")
    (tmp_path / "tree").mkdir()
    with (tmp_path / "layer").open("wb") as layer:
        subprocess.run(["tar", "-c", "-S", "-C", tmp_path, "sparse"], stdout=layer, check=True)
    apply_layer(tmp_path / "tree", tmp_path / "layer", Budget(64, tmp_path, 0))
    status = (tmp_path / "tree/sparse").stat()
    assert status.st_size == 1 << 30 and status.st_blocks * 512 < 1 << 20


def test_the_digest_of_the_content_is_checked(tmp_path: Path) -> None:
    data = archive([member("a", b"x" * 5000)])
    (tmp_path / "tree").mkdir()
    (tmp_path / "layer").write_bytes(compress(data + bytes(5000), "zstd"))
    whole = digest_of(data + bytes(5000))  # also what follows the archive's end
    assert apply_layer(tmp_path / "tree", tmp_path / "layer", Budget(64, tmp_path, 0), diff_id=whole) == whole
    with pytest.raises(DigestMismatchError):
        apply_layer(tmp_path / "tree", tmp_path / "layer", Budget(64, tmp_path, 0), diff_id=digest_of(data))


# --- Hostile archives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../outside/new", "a/../../outside/new", "..", "/../outside/new", "x/../.."])
def test_names_that_lead_outside_are_refused(apply: Apply, name: str) -> None:
    with pytest.raises(UnsafeArchiveError, match="outside its root"):
        apply([member(name, b"evil")])
    with pytest.raises(UnsafeArchiveError):
        apply([member("a"), hard_link("b", name)])


@pytest.mark.parametrize("up", ["..", "../..", "../../../../../../../..", "/", "/proc/self/root", "/proc/self/cwd"])
def test_links_cannot_lead_outside(apply: Apply, tmp_path: Path, up: str) -> None:
    outside = str(tmp_path / "outside").lstrip("/")
    for target in (up, f"{up}/{outside}", f"{up}/outside"):
        tree = apply(
            [
                symlink("link", target),
                member("link/new", b"evil"),
                member(f"link/{outside}/victim", b"evil"),
                member("link/outside/victim", b"evil"),
                folder("link/outside", mode=0o777),
                member("link/outside/.wh.victim"),
                member("link/outside/.wh..wh..opq"),
                symlink("second", "link/outside"),
                member("second/victim", b"evil"),
            ]
        )
        assert untouched(tree)
        with pytest.raises(ArchiveError):
            apply([hard_link("stolen", f"link/{outside}/does-not-exist")])


def test_a_final_link_is_never_followed(apply: Apply, tmp_path: Path) -> None:
    victim = tmp_path / "outside/victim"
    before = victim.stat()
    tree = apply(
        [symlink("f", str(victim)), symlink("d", str(victim.parent)), symlink("own", str(victim), uid=5)],
        [member("f", b"evil", mode=0o777, uid=9), folder("d", mode=0o777, uid=9), hard_link("h", "own")],
    )
    assert untouched(tree) and victim.stat().st_mode == before.st_mode and victim.stat().st_uid == before.st_uid
    assert (tree / "f").read_bytes() == b"evil" and (tree / "h").is_symlink()


@pytest.mark.parametrize("name", [".wh..", ".wh...", ".wh.", "a/.wh..."])
def test_impossible_whiteouts_are_refused(apply: Apply, name: str) -> None:
    with pytest.raises(UnsafeArchiveError, match="whiteout"):
        apply([folder("a"), member(name)])


@pytest.mark.parametrize(
    "members",
    [
        [symlink("a", "a"), member("a/x")],
        [symlink("a", "b"), symlink("b", "a"), member("b/x")],
        [*(symlink(f"l{n}", f"l{n + 1}/x") for n in range(60)), member("l0/y")],
        [member("d/" * 300 + "x")],
        [symlink("s", "d/" * 200), member("s/" + "d/" * 200 + "x")],
        [folder("d"), hard_link("h", "d")],
        [member("x" * 300)],
        [member(".", b"root as a file")],
        [member("a", uid=2**32 - 1)],
        [member("a", pax={"path": "nul\0inside"})],
        [member("a", pax={"SCHILY.xattr.user.nul\0inside": "x"})],
        [member("a", kind=tarfile.CHRTYPE, device=(0o7777777, 0o7777777))],
        [hard_link("a", "missing")],
    ],
)
def test_nonsense_is_a_typed_error(apply: Apply, members: list[Member]) -> None:
    with pytest.raises(ArchiveError):
        apply(members)


def test_attributes_that_cannot_be_kept_are_told_in_few_words(tmp_path: Path) -> None:
    many = {f"SCHILY.xattr.odd\x1b{number}": "x" for number in range(5000)}
    (tmp_path / "tree").mkdir()
    (tmp_path / "layer").write_bytes(archive([member("f", pax=many)]))
    notes = list[str]()
    apply_layer(tmp_path / "tree", tmp_path / "layer", Budget(8, tmp_path, 0), note=notes.append)
    assert 0 < len(notes) < 100 and all(note.isprintable() for note in notes)


def test_bombs_are_stopped(apply: Apply, tmp_path: Path) -> None:
    (tmp_path / "tree2").mkdir()
    (tmp_path / "bomb").write_bytes(compress(archive([member("zeros", bytes(40 << 20))]), "zstd"))
    with pytest.raises(ImageTooLargeError, match="more data"):
        apply_layer(tmp_path / "tree2", tmp_path / "bomb", Budget(8, tmp_path, 0))
    with pytest.raises(ImageTooLargeError, match="more files"):
        apply([member(f"f{number}") for number in range(1100)], size_mib=8)
    with pytest.raises(CapacityError):
        apply([member("a")], reserve=1 << 40)


def test_a_map_of_holes_cannot_fill_the_disk(apply: Apply) -> None:
    """A sparse file's size is only a number; what it stores is counted."""
    pax = {"GNU.sparse.size": str(1 << 60), "GNU.sparse.map": f"{(1 << 60) - 4},4", "GNU.sparse.numblocks": "1"}
    with pytest.raises(ArchiveError):
        apply([member("huge", b"data", pax=pax)])
