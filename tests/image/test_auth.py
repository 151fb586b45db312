"""Challenges, and where credentials come from."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.image.auth import Challenge, parse_challenges
from aenv.image.credentials import Credentials, from_docker_config
from aenv.image.errors import RegistryUnauthorizedError


def test_challenges() -> None:
    header = 'Bearer realm="https://auth.x/token?a=b,c",service="x",scope="repository:a/b:pull,push", Basic realm=x'
    assert parse_challenges(header) == [
        Challenge(
            "bearer", {"realm": "https://auth.x/token?a=b,c", "service": "x", "scope": "repository:a/b:pull,push"}
        ),
        Challenge("basic", {"realm": "x"}),
    ]
    assert parse_challenges('Negotiate, basic realm="a \\"quoted\\" Bearer, word"') == [
        Challenge("basic", {"realm": 'a "quoted" Bearer, word'})
    ]
    assert parse_challenges("Basic") == [Challenge("basic")]
    assert parse_challenges("Basically x=1") == []


@given(st.text(max_size=200))
def test_any_header_parses(header: str) -> None:
    for challenge in parse_challenges(header):
        assert challenge.scheme in ("basic", "bearer")


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


async def test_docker_config(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    assert await from_docker_config(file, "x.org") is None
    auths = {
        "x.org": {"auth": coded("me:pass:word")},
        "https://y.org/v1/": {"username": "you", "password": "p"},
        "https://index.docker.io/v1/": {"auth": coded("hub:h")},
        "z.org": {"auth": coded("00000000-0000:"), "identitytoken": "refresh"},
        "empty.org": {},
    }
    file.write_text(json.dumps({"auths": auths}))
    assert await from_docker_config(file, "x.org") == Credentials("me", "pass:word")
    assert await from_docker_config(file, "y.org") == Credentials("you", "p")
    assert await from_docker_config(file, "docker.io") == Credentials("hub", "h")
    assert await from_docker_config(file, "z.org") == Credentials("00000000-0000", "", "refresh")
    assert await from_docker_config(file, "empty.org") is None
    assert "pass" not in repr(Credentials("me", "pass"))


@pytest.mark.parametrize("text", ["{", "[]", '{"auths": {"x.org": {"auth": "%%%"}}}', '{"credsStore": "../evil"}'])
async def test_an_unusable_config_is_said(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(RegistryUnauthorizedError, match=r"config\.json"):
        await from_docker_config(file, "x.org")


async def test_credential_helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = tmp_path / "docker-credential-fake"
    helper.write_text(
        "#!/bin/sh\nread server\n"
        'case "$1 $server" in\n'
        '  "get x.org") echo \'{"ServerURL": "x.org", "Username": "h", "Secret": "s"}\' ;;\n'
        '  "get t.org") echo \'{"Username": "<token>", "Secret": "refresh"}\' ;;\n'
        '  "get broken.org") echo "locked keychain"; exit 1 ;;\n'
        "  *) echo 'credentials not found in native keychain'; exit 1 ;;\n"
        "esac\n"
    )
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    file = tmp_path / "config.json"
    auths = {"other.org": {"auth": coded("a:b")}}
    file.write_text(json.dumps({"auths": auths, "credHelpers": {"x.org": "fake"}, "credsStore": "fake"}))
    assert await from_docker_config(file, "x.org") == Credentials("h", "s")
    assert await from_docker_config(file, "t.org") == Credentials("", "", "refresh")
    assert await from_docker_config(file, "other.org") == Credentials("a", "b")
    assert await from_docker_config(file, "unknown.org") is None
    with pytest.raises(RegistryUnauthorizedError, match="locked keychain"):
        await from_docker_config(file, "broken.org")
    file.write_text('{"credsStore": "missing"}')
    with pytest.raises(RegistryUnauthorizedError, match="cannot be started"):
        await from_docker_config(file, "x.org")
