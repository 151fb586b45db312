"""Which server and key are used, and the file that keeps them."""

import stat
from pathlib import Path

import pytest

from aenv.client import account
from aenv.errors import AenvError


def test_the_first_place_that_has_it_wins(tmp_path: Path) -> None:
    home = tmp_path / "node"
    home.mkdir()
    (home / "api-key").write_text("local\n")
    environment = {"HOME": str(tmp_path), "AENV_HOME": str(home)}
    found = account.load(environment)
    assert (found.api_url, found.api_key) == ("http://127.0.0.1:8000", "local")
    account.save(account.credentials_path(environment), "https://host/", "stored")
    found = account.load(environment)
    assert (found.api_url, found.api_key) == ("https://host", "stored")
    environment["E2B_API_KEY"] = "e2b"
    assert account.load(environment).api_key == "e2b"
    environment["AENV_API_KEY"] = "aenv"
    environment["AENV_API_URL"] = "http://other"
    found = account.load(environment)
    assert (found.api_url, found.api_key, found.url_from, found.key_from) == (
        "http://other",
        "aenv",
        "AENV_API_URL",
        "AENV_API_KEY",
    )


def test_a_key_is_not_sent_to_another_server(tmp_path: Path) -> None:
    home = tmp_path / "node"
    home.mkdir()
    (home / "api-key").write_text("local")
    environment = {"HOME": str(tmp_path), "AENV_HOME": str(home)}
    account.save(account.credentials_path(environment), "https://host", "stored")
    assert account.load({**environment, "AENV_API_URL": "https://elsewhere"}).api_key is None
    assert account.load({**environment, "AENV_API_URL": "http://localhost:9000"}).api_key == "local"


def test_keys_are_not_shown_by_accident() -> None:
    assert "secret" not in repr(account.Account("http://x", "here", "secret", "there"))


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "config" / "aenv" / "credentials"
    environment = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert account.credentials_path(environment) == path
    account.save(path, "http://host", 'key with "quotes"')
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    path.chmod(0o644)
    account.save(path, "http://host", "other")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]
    assert account.load(environment).api_key == "other"
    assert account.remove(path)
    assert not account.remove(path)


def test_a_file_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "aenv" / "credentials"
    path.parent.mkdir()
    path.write_text("not toml at all")
    with pytest.raises(AenvError, match="cannot be read") as caught:
        account.load({"XDG_CONFIG_HOME": str(tmp_path)})
    assert "aenv auth login" in caught.value.hint
