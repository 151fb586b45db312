"""The fuzzer of the formats, for a bounded number of inputs; ``fuzz_formats.py`` runs for as long as one likes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

RUNS = 20_000


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this Python")
def test_fuzz_formats(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    command = [sys.executable, "-m", "tests.storage.fuzz_formats", str(tmp_path / "corpus")]
    options = [f"-runs={RUNS}", "-seed=1", "-max_len=460000", "-timeout=20", "-rss_limit_mb=1024"]
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [*command, *options, f"-artifact_prefix={tmp_path}/"],
        cwd=root,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert f"Done {RUNS} runs" in result.stderr
