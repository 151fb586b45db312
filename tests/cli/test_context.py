"""Files of a build's context, as the archives that COPY steps upload."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from aenv.cli.context import FOLDER, Archive, Context, inline
from aenv.errors import InvalidRequestError
from aenv.template.dockerfile_model import InlineFile


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "context"
    for name in ("a.txt", "b.md", "src/one.py", "src/deep/two.py", "src/skip.log", "empty/.keep"):
        path = made / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (made / "empty/.keep").unlink()
    (made / "src/run.sh").write_text("#!/bin/sh\n")
    (made / "src/run.sh").chmod(0o755)
    (made / "src/link").symlink_to("one.py")
    return made


def context(folder: Path, ignore: str | None = None) -> Context:
    if ignore is not None:
        (folder / ".dockerignore").write_text(ignore)
    return Context(folder, folder / "Dockerfile")


def members(archive: Archive) -> dict[str, tarfile.TarInfo]:
    with archive.file, tarfile.open(fileobj=archive.file) as tar:
        return {member.name: member for member in tar}


def test_one_file_is_packed_under_its_name(folder: Path) -> None:
    archive = context(folder).pack(["src/run.sh"], unpack=False)
    assert archive.source == "run.sh"
    found = members(archive)
    assert list(found) == ["run.sh"]
    assert (found["run.sh"].mode & 0o777, found["run.sh"].uid) == (0o755, 0)


def test_a_folder_is_its_contents(folder: Path) -> None:
    archive = context(folder, "**/*.log\n").pack(["src"], unpack=False)
    assert archive.source == FOLDER
    found = members(archive)
    assert sorted(found) == sorted(
        [FOLDER, *(f"{FOLDER}/{name}" for name in ("deep", "deep/two.py", "link", "one.py", "run.sh"))]
    )
    assert found[f"{FOLDER}/link"].linkname == "one.py"


def test_patterns_and_several_sources(folder: Path) -> None:
    archive = context(folder).pack(["*.txt", "src/*.py", "b.md"], unpack=False)
    assert sorted(members(archive)) == sorted([FOLDER, *(f"{FOLDER}/{name}" for name in ("a.txt", "one.py", "b.md"))])


def test_the_whole_context_and_an_empty_folder(folder: Path) -> None:
    names = members(context(folder, "src\n.dockerignore\n").pack(["."], unpack=False))
    assert sorted(names) == [FOLDER, f"{FOLDER}/a.txt", f"{FOLDER}/b.md", f"{FOLDER}/empty"]
    assert list(members(context(folder).pack(["empty"], unpack=False))) == [FOLDER]


def test_a_file_below_an_excluded_folder_can_be_taken_back(folder: Path) -> None:
    made = context(folder, "src\n!src/deep/two.py\n")
    assert f"{FOLDER}/deep/two.py" in members(made.pack(["src"], unpack=False))


def test_an_ignore_file_of_the_dockerfile_goes_first(folder: Path) -> None:
    (folder / ".dockerignore").write_text("a.txt")
    (folder / "Dockerfile.dockerignore").write_text("b.md")
    made = Context(folder, folder / "Dockerfile")
    assert made.pack(["a.txt"], unpack=False).source == "a.txt"
    with pytest.raises(InvalidRequestError, match="not in the build context"):
        made.pack(["b.md"], unpack=False)


def test_archives_are_unpacked_for_add(folder: Path) -> None:
    with tarfile.open(folder / "x.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("./in/side")
        info.size = 2
        tar.addfile(info, io.BytesIO(b"hi"))
    assert list(members(context(folder).pack(["x.tar.gz"], unpack=True))) == [FOLDER, f"{FOLDER}/in/side"]
    assert context(folder).pack(["x.tar.gz"], unpack=False).source == "x.tar.gz"


def test_an_archive_cannot_lead_out_of_its_folder(folder: Path) -> None:
    with tarfile.open(folder / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo("../out"))
    with pytest.raises(InvalidRequestError, match="outside of itself"):
        context(folder).pack(["x.tar"], unpack=True)


def digest(folder: Path, *sources: str) -> str:
    archive = context(folder).pack(sources, unpack=False)
    archive.file.close()
    return archive.digest


def test_digests_are_of_names_modes_and_contents_and_not_of_times(folder: Path) -> None:
    before = digest(folder, "src")
    os.utime(folder / "src/one.py", (1, 1))
    assert digest(folder, "src") == before
    (folder / "src/one.py").write_text("other")
    changed = digest(folder, "src")
    assert changed != before
    (folder / "src/one.py").chmod(0o600)
    assert digest(folder, "src") != changed
    assert digest(folder, "a.txt") != digest(folder, "b.md")


def test_here_documents() -> None:
    one = inline([InlineFile("a.txt", "A")])
    assert (one.source, list(members(one))) == ("a.txt", ["a.txt"])
    two = inline([InlineFile("a.txt", "A"), InlineFile("b.txt", "B")])
    assert (two.source, list(members(two))) == (FOLDER, [FOLDER, f"{FOLDER}/a.txt", f"{FOLDER}/b.txt"])


def test_what_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="'nothing' is not in the build context"):
        context(folder).pack(["nothing"], unpack=False)
    with pytest.raises(InvalidRequestError, match=r"'\*\.nothing' is not in the build context"):
        context(folder).pack(["*.nothing"], unpack=False)
    with pytest.raises(InvalidRequestError, match="is not a folder"):
        Context(tmp_path / "missing", tmp_path / "Dockerfile")
