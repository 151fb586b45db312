"""Configuration: where it comes from, and what the program says when it is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

from aenv.errors import AenvError
from aenv.server import load_settings


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config.toml"
    monkeypatch.setenv("AENV_CONFIG", str(file))
    return file


def test_environment_wins_over_the_file_and_arguments_over_both(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml.write_text('port = 1\nhost = "::1"\ndomain = "a.b"\ndns = ["9.9.9.9"]\n')
    monkeypatch.setenv("AENV_PORT", "2")
    monkeypatch.setenv("AENV_HOST", "::2")
    settings = load_settings(host="::3")
    assert (settings.port, settings.host, settings.domain, settings.dns) == (2, "::3", "a.b", ["9.9.9.9"])


def test_lists_are_separated_by_commas_and_empty_variables_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AENV_ALWAYS_ALLOW", "10.1.0.0/16, 10.2.0.1,")
    monkeypatch.setenv("AENV_DNS", "10.2.0.1")
    monkeypatch.setenv("AENV_KERNEL", "")
    settings = load_settings()
    assert settings.always_allow == ["10.1.0.0/16", "10.2.0.1"]
    assert settings.dns == ["10.2.0.1"]
    assert settings.kernel is None


@pytest.mark.parametrize(
    ("text", "said"),
    [('port = "x\n', "cannot be read"), ("port = 70000\n", "port"), ("prot = 1\n", "prot"), ("dns = 3\n", "dns")],
)
def test_a_wrong_file_is_named_by_field(toml: Path, text: str, said: str) -> None:
    toml.write_text(text)
    with pytest.raises(AenvError, match=said):
        load_settings()


def test_a_missing_file_that_was_asked_for_is_an_error(toml: Path) -> None:
    with pytest.raises(AenvError, match="does not exist"):
        load_settings()


def test_the_program_says_it_in_one_line(toml: Path) -> None:
    toml.write_text("nonsense")
    result = subprocess.run([Path(sys.executable).parent / "aenv-server"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("aenv-server: The configuration cannot be read")
    assert len(result.stderr.splitlines()) == 1
