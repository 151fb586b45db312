"""What a hypervisor that is watched does, and what is concluded from it. Programs stand in for hypervisors."""

import re
from pathlib import Path

import pytest

from aenv.vmm.probe import MARKER, watch

UP = f"echo '{MARKER}'; exec sleep 60"
HANGS = "echo booting; exec sleep 60"
DIES = "echo booting; echo Kernel panic - not syncing; exit 1"


def program(folder: Path, *lives: str) -> list[str]:
    """One that lives the first time as the first of ``lives`` says, and so on; the last one is for ever."""
    cases = " ".join(f"{number}) {life};;" for number, life in enumerate(lives[:-1], start=1))
    return ["sh", "-c", f"echo >> {folder}/starts; case $(wc -l < {folder}/starts) in {cases} *) {lives[-1]};; esac"]


@pytest.mark.parametrize(
    ("lives", "works", "said", "starts"),
    [
        ([UP], True, "reached user space", 1),
        ([DIES, UP], True, "reached user space", 2),
        ([DIES], False, "Tried twice. It ended after .*Kernel panic", 2),
        (["echo no such machine >&2; exit 1"], False, "It ended after .*no such machine", 1),
        ([HANGS], False, "did not start within .*'booting'", 1),
    ],
)  # fmt: skip
async def test_what_is_concluded(tmp_path: Path, lives: list[str], works: bool, said: str, starts: int) -> None:
    silence = 0.5 if HANGS in lives else 30.0
    found, reason = await watch("It", program(tmp_path, *lives), tmp_path, silence, first=30.0, prints_console=True)
    assert found is works
    assert len((tmp_path / "starts").read_text().splitlines()) == starts
    assert re.search(said, reason), reason


async def test_a_console_of_its_own(tmp_path: Path) -> None:
    quiet, loud = (f"exec > {tmp_path}/console; {life}" for life in (DIES, UP))
    found, _ = await watch("It", program(tmp_path, quiet, loud), tmp_path, 30.0)
    assert found
