"""``kill -9`` at every step of a commit, a deletion and a collection."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.snapshot.s3_server import S3Server
from tests.snapshot.things import make_file


@pytest.mark.parametrize("scenario", ["commit", "delete"])
def test_in_a_folder(scenario: str) -> None:
    # In memory: a killed process loses nothing that it wrote, and syncing a disk takes most of the time.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        assert _kill_everywhere(scenario, Path(folder), 100_000) >= 30


@pytest.mark.parametrize("scenario", ["commit", "delete"])
def test_in_a_bucket(scenario: str, tmp_path: Path, s3: S3Server) -> None:
    settings = s3.settings("").model_dump(mode="json")
    assert _kill_everywhere(scenario, tmp_path, 3 << 20, json.dumps(settings), S3_FOLDER=str(s3.folder)) >= 15


def _kill_everywhere(scenario: str, folder: Path, size: int, *arguments: str, **environment: str) -> int:
    """The number of steps, after each of which the process was killed once."""
    (folder / "files").mkdir()
    for name in ("shared", "old", "new"):
        make_file(folder / "files" / name, size)
    done = subprocess.run(
        [sys.executable, "-m", "tests.snapshot.killed", scenario, str(folder), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout.split()[-1])
