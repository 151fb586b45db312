"""Credentials for a registry: given with the call, from this node's configuration, or from Docker's config.json.

Format of config.json and of credential helpers: docker/cli ``cli/config/configfile`` and
docker/docker-credential-helpers (``docker-credential-NAME get``: server on standard input, JSON on standard output).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv.image.errors import RegistryUnauthorizedError
from aenv.image.reference import DOCKER_HUB

_HUB_KEY = "https://index.docker.io/v1/"
_TOKEN_USER = "<token>"  # how a helper marks an identity token
_HELPER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HELPER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user name and a password, or an OAuth2 identity (refresh) token. Never printed."""

    username: str
    password: str
    identity_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials({self.username!r})"

    @property
    def basic(self) -> str:
        """The value of a Basic ``Authorization`` header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


def docker_config_file() -> Path:
    """Where Docker's programs look."""
    directory = os.environ.get("DOCKER_CONFIG")
    return (Path(directory) if directory else Path.home() / ".docker") / "config.json"


async def from_docker_config(file: Path, registry: str) -> Credentials | None:
    """What config.json knows about a registry. None where the file is missing or says nothing.

    Raises RegistryUnauthorizedError where the file cannot be read or a helper fails: falling back to anonymous
    access would only produce a less clear error.
    """
    try:
        config = json.loads(await asyncio.to_thread(file.read_bytes))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unusable(file, f"cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise _unusable(file, "is not a JSON object")
    keys = _keys(registry)
    helpers = _object(config, "credHelpers")
    named = next((helpers[key] for key in keys if key in helpers), config.get("credsStore"))
    if isinstance(named, str) and named:
        found = await _ask_helper(file, named, keys[0])
        if found is not None:
            return found
    auths = _object(config, "auths")
    for key in keys:
        if isinstance(auths.get(key), dict) and (entry := _entry(file, auths[key])) is not None:
            return entry
    return None


def _keys(registry: str) -> list[str]:
    """The names under which a registry may be listed, the usual one first."""
    hosts = [registry]
    if registry == DOCKER_HUB:
        hosts += ["index.docker.io", "registry-1.docker.io"]
    first = [_HUB_KEY] if registry == DOCKER_HUB else []
    urls = (
        f"{scheme}{host}{path}" for host in hosts for scheme in ("https://", "http://") for path in ("", "/", "/v1/")
    )
    return list(dict.fromkeys([*first, *hosts, *urls]))


def _entry(file: Path, entry: dict[str, Any]) -> Credentials | None:
    username, password = entry.get("username") or "", entry.get("password") or ""
    if entry.get("auth"):
        try:
            decoded = base64.b64decode(entry["auth"], validate=True).decode()
        except (TypeError, ValueError, binascii.Error) as error:
            raise _unusable(file, "has an `auth` that is not base64") from error
        username, _, password = decoded.partition(":")
        password = password.strip("\x00")
    token = entry.get("identitytoken") or ""
    return Credentials(username, password, token) if (username and password) or token else None


async def _ask_helper(file: Path, name: str, server: str) -> Credentials | None:
    if not _HELPER_NAME.fullmatch(name):
        raise _unusable(file, f"names an impossible credential helper {name!r}")
    program = f"docker-credential-{name}"
    try:
        process = await asyncio.create_subprocess_exec(
            program,
            "get",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise _unusable(file, f"names {program}, which cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(_HELPER_TIMEOUT_S):
            output, errors = await process.communicate(server.encode())
    except TimeoutError as error:
        raise _unusable(file, f"names {program}, which did not answer in {_HELPER_TIMEOUT_S:.0f} s") from error
    finally:
        if process.returncode is None:
            process.kill()
    text = (output + errors).decode(errors="replace").strip()
    if process.returncode != 0:
        if "not found" in text:  # "credentials not found in native keychain": the protocol's only way to say so
            return None
        raise _unusable(file, f"names {program}, which failed: {text[:200]}")
    try:
        answer = json.loads(output)
        username, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError) as error:
        raise _unusable(file, f"names {program}, which did not answer in the helpers' format") from error
    return Credentials("", "", secret) if username == _TOKEN_USER else Credentials(username, secret)


def _object(value: dict[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _unusable(file: Path, what: str) -> RegistryUnauthorizedError:
    return RegistryUnauthorizedError(f"{file} {what}.", "Repair it with `docker login`, or pass credentials.")
