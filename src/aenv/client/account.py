"""Which server a program talks to and with which key: environment, credentials file, the node on this machine.

``~/.config/aenv/credentials`` (``$XDG_CONFIG_HOME`` is honoured) is TOML with ``api_url`` and ``api_key``, readable
by its owner alone.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aenv.errors import AenvError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_HOME = "/var/lib/aenv"


@dataclass(frozen=True, slots=True)
class Account:
    """``url_from`` and ``key_from`` name where each was found; ``api_key`` is None when it was nowhere."""

    api_url: str
    url_from: str
    api_key: str | None = field(repr=False)
    key_from: str


def credentials_path(environment: Mapping[str, str] = os.environ) -> Path:
    config = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME") or "~").expanduser() / ".config")
    return Path(config) / "aenv" / "credentials"


def load(environment: Mapping[str, str] = os.environ) -> Account:
    """The first of each that is set: ``AENV_*``, ``E2B_*``, the credentials file, the local node's.

    A key from the file or of the local node is used with that place's address only, so that it is not sent to a
    server that a variable names. Raises AenvError when the file cannot be read.
    """
    stored = _stored(credentials_path(environment))
    file = str(credentials_path(environment))
    local_url = f"http://127.0.0.1:{environment.get('AENV_PORT') or 8000}"
    urls = [
        (environment.get("AENV_API_URL"), "AENV_API_URL"),
        (environment.get("E2B_API_URL"), "E2B_API_URL"),
        (stored.get("api_url"), file),
        (local_url, "this machine"),
    ]
    url, url_from = next((url, name) for url, name in urls if url)
    keys = [(environment.get("AENV_API_KEY"), "AENV_API_KEY"), (environment.get("E2B_API_KEY"), "E2B_API_KEY")]
    if stored.get("api_url") == url:
        keys.append((stored.get("api_key"), file))
    if _is_local(url):
        home = Path(environment.get("AENV_HOME") or DEFAULT_HOME)
        keys.append((_read(home / "api-key"), str(home / "api-key")))
    key, key_from = next(((key, name) for key, name in keys if key), (None, ""))
    return Account(url.rstrip("/"), url_from, key, key_from)


def _is_local(url: str) -> bool:
    host = url.partition("://")[2].partition("/")[0].rpartition(":")[0]
    return host in ("127.0.0.1", "localhost", "[::1]")


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _stored(path: Path) -> dict[str, str]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise AenvError(
            f"{path} cannot be read: {error}.", "Correct it, or remove it and run `aenv auth login`."
        ) from error
    return {name: value for name, value in found.items() if isinstance(value, str)}


def save(path: Path, api_url: str, api_key: str) -> None:
    """Replace the credentials file; it appears complete, and with mode 0600."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            # A JSON string of printable characters is a TOML basic string.
            url, key = (json.dumps(text, ensure_ascii=False) for text in (api_url, api_key))
            file.write(f"api_url = {url}\napi_key = {key}\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def remove(path: Path) -> bool:
    """Whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
