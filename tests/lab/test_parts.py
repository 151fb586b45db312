"""What of the lab can be tested without one: these run everywhere."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.__main__ import chosen, main
from lab.__main__ import test as run_tests
from lab.checkout import listing
from lab.disk import backports
from lab.machine import LabMachine, LabPanicError
from lab.prepare import environment
from lab.settings import ENVD, LabSettings

from aenv.guest.apt_sources import Source
from lab import homes, recipe


def test_a_checkout_is_what_git_would_commit_and_what_was_built(tmp_path: Path) -> None:
    for name in (".gitignore", "kept", "src/__pycache__/m.pyc", "gone", "new", "ignored", "folder/a b\nc", ENVD):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("envd/target\nignored\n__pycache__\n")
    (tmp_path / "link").symlink_to("nowhere")
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "kept", "gone"], check=True)
    (tmp_path / "gone").unlink()
    wanted = {".gitignore", "kept", "new", "folder/a b\nc", "link", "src/__pycache__/m.pyc", str(ENVD)}
    found = listing(tmp_path)
    assert set(found) == wanted
    assert len(found) == len(wanted)


def test_a_digest_changes_with_every_part_and_their_borders(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("b")
    assert recipe.digest(["a", file]) == recipe.digest([b"a", "b"])
    assert recipe.digest(["ab", ""]) != recipe.digest(["a", "b"])
    before = recipe.digest([file])
    file.write_text("c")
    assert recipe.digest([file]) != before


def test_debian_12_takes_qemu_from_the_machines_own_backports() -> None:
    main_archive = Source(("http://mirror/debian",), ("bookworm", "bookworm-updates"), ("main",), "/key")
    other = Source(("http://mirror/debian",), ("bookworm-backports", "bookworm-backports-sloppy"), ("main",), "/key")
    found = Source(("http://mirror/debian",), ("bookworm-backports",), ("main",), "/key")
    assert backports([main_archive, other], "bookworm") == [found]
    assert "n=bookworm-backports" in recipe.preferences("bookworm")
    assert recipe.preferences("trixie") == ""


def test_the_labs_own_tests_run_unless_others_are_named(tmp_path: Path) -> None:
    (tmp_path / "tests/vmm").mkdir(parents=True)
    assert chosen(tmp_path, []) == ["tests/lab"]
    assert chosen(tmp_path, ["-x", "-k", "pause"]) == ["tests/lab", "-x", "-k", "pause"]
    assert chosen(tmp_path, ["-x", "tests/vmm::test"]) == ["-x", "tests/vmm::test"]


def test_firecracker_is_said_to_be_missing_where_no_binary_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(homes.FIRECRACKER_BIN, raising=False)
    outside = LabSettings.read()
    assert homes.missing("qemu", environment(outside)) is None
    assert homes.FIRECRACKER_BIN in (homes.missing("firecracker", environment(outside)) or "")
    binary = tmp_path / "firecracker-v1"
    binary.touch(0o755)
    monkeypatch.setenv(homes.FIRECRACKER_BIN, str(binary))
    inside = environment(LabSettings.read())
    assert homes.missing("firecracker", inside) is None
    found = homes.settings("firecracker", inside)
    assert (found["AENV_VMM"], found["AENV_ACCELERATOR"]) == ("firecracker", "kvm")
    assert found["AENV_FIRECRACKER"] == "/opt/firecracker/firecracker-v1"


def test_a_lab_that_does_not_run_is_told_how_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AENV_LAB_CACHE", str(tmp_path))
    assert main(["exec", "mine", "true"]) == 1
    assert "python -m lab start mine" in capsys.readouterr().out
    assert main(["no-such-verb"]) == main(["put", "mine"]) == 2


@pytest.mark.parametrize(("panics", "status", "runs"), [(0, 7, 1), (1, 0, 2), (9, 0, 3)])
def test_a_run_whose_lab_panics_is_made_again_and_a_failing_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, panics: int, status: int, runs: int
) -> None:
    settings = LabSettings(tmp_path, tmp_path / "results", cpus=1, memory_mib=256, firecracker=None)
    done: list[str] = []

    class Channel:
        def call(self, command: str, env: dict[str, str]) -> int:
            done.append(command)
            return 255 if len(done) <= panics else status

    class Machine(LabMachine):
        channel = Channel()  # type: ignore[assignment]

    @contextmanager
    def fresh(settings: LabSettings, *, prepared: bool) -> Iterator[LabMachine]:
        machine = Machine(settings, "run")
        machine.folder.mkdir(parents=True, exist_ok=True)
        text = "[  80.9] Kernel panic - not syncing: corrupted stack\n" if len(done) < panics else "fine\n"
        machine.console.write_text(text)
        yield machine

    monkeypatch.setattr("lab.__main__.fresh", fresh)
    if panics < runs:
        assert run_tests(settings, []) == status
    else:
        with pytest.raises(LabPanicError, match="corrupted stack"):
            run_tests(settings, [])
    assert len(done) == runs
    kept = sorted(path.name for path in (tmp_path / "results").glob("panic-*"))
    assert kept == [f"panic-{number}.log" for number in range(1, runs)]
    assert (tmp_path / "results" / "console.log").exists()


def test_the_scripts_of_the_lab_are_shell_that_parses() -> None:
    guest = Path(recipe.__file__).parent / "guest"
    for name in ("init", "boot"):
        assert os.access(guest / name, os.X_OK)
        subprocess.run(["sh", "-n", guest / name], check=True)
