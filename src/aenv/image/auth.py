"""Registry authentication: reads a challenge, gets a token. Anonymous, Basic and Bearer.

Sources: RFC 9110 section 11.6.1 (challenges), the distribution project's token and OAuth2 specifications.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from aenv.image.credentials import Credentials
from aenv.image.errors import RegistryUnauthorizedError, RegistryUnreachableError

_PARAMETER = re.compile(r'([A-Za-z0-9_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_SCHEME = re.compile(r"(?:^|,)\s*(Basic|Bearer)(?=[\s,]|$)", re.IGNORECASE)
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_DEFAULT_LIFE_S = 60.0  # of a token that does not say, by the specification
_MARGIN_S = 10.0  # a token this close to its end is not used any more
_MAX_ANSWER = 1 << 20
_CLIENT_ID = "aenv"


@dataclass(frozen=True, slots=True)
class Challenge:
    """One scheme of a ``WWW-Authenticate`` header, in lower case, with its parameters."""

    scheme: str
    parameters: Mapping[str, str] = field(default_factory=dict)


def parse_challenges(header: str) -> list[Challenge]:
    """The Basic and Bearer challenges of a header, in its order; other schemes are skipped."""
    masked = _QUOTED.sub(lambda match: '"' + "x" * (len(match[0]) - 2) + '"', header)  # commas inside quotes
    starts = list(_SCHEME.finditer(masked))
    found = []
    for at, start in enumerate(starts):
        end = starts[at + 1].start() if at + 1 < len(starts) else len(header)
        parameters = {
            match[1].lower(): re.sub(r"\\(.)", r"\1", match[2]) if match[2] is not None else match[3]
            for match in _PARAMETER.finditer(header, start.end(), end)
        }
        found.append(Challenge(start[1].lower(), parameters))
    return found


async def read_limited(response: aiohttp.ClientResponse, limit: int, *, cut: bool = False) -> bytes:
    """A body of at most ``limit`` bytes. A longer one is cut, or raises RegistryUnreachableError."""
    body = bytearray()
    async for data in response.content.iter_any():
        body += data
        if len(body) > limit:
            if cut:
                break
            raise RegistryUnreachableError(f"{response.url.host} sends a document larger than {limit} bytes.")
    return bytes(body[:limit])


class Authenticator:
    """Answers the challenges of one registry for one set of credentials; remembers what it got."""

    def __init__(self, session: aiohttp.ClientSession, registry: str, credentials: Credentials | None) -> None:
        self._session = session
        self._registry = registry
        self._credentials = credentials
        self._tokens: dict[str, tuple[str, float]] = {}
        self._basic = False

    def header(self, scope: str) -> dict[str, str]:
        """What to send without having been asked: what worked before, else nothing."""
        token, expires = self._tokens.get(scope, ("", 0.0))
        if token and time.monotonic() < expires:
            return {"Authorization": f"Bearer {token}"}
        if self._basic and self._credentials:
            return {"Authorization": self._credentials.basic}
        return {}

    async def answer(self, response: aiohttp.ClientResponse, scope: str) -> dict[str, str]:
        """The header for a second attempt after a 401. Raises RegistryUnauthorizedError where there is none."""
        challenges = parse_challenges(", ".join(response.headers.getall("WWW-Authenticate", [])))
        refused = response.request_info.headers.get("Authorization", "")
        for challenge in challenges:
            if challenge.scheme == "bearer" and "realm" in challenge.parameters:
                self._tokens.pop(scope, None)
                await self._fetch(challenge, scope, response.url.scheme)
                return self.header(scope)
            if challenge.scheme == "basic" and self._credentials and not refused.startswith("Basic "):
                self._basic = True
                return self.header(scope)
        raise self.refusal()

    def refusal(self) -> RegistryUnauthorizedError:
        if self._credentials is None:
            return RegistryUnauthorizedError(
                f"{self._registry} does not give this image to anonymous users.",
                "Check the name; if the image is private, pass credentials or run `docker login` for this registry.",
            )
        return RegistryUnauthorizedError(
            f"{self._registry} refuses the credentials of {self._credentials.username or 'the identity token'!r}.",
            "Check user name and password (or token), and that the account may pull this image.",
        )

    async def _fetch(self, challenge: Challenge, scope: str, registry_scheme: str) -> None:
        realm, credentials = challenge.parameters["realm"], self._credentials
        scheme = urlsplit(realm).scheme
        if scheme not in ("http", "https") or (scheme == "http" and registry_scheme == "https" and credentials):
            raise RegistryUnauthorizedError(
                f"{self._registry} sends its users to {realm!r} for a token, which would expose their password.",
                "Tell the registry's operator to use https there.",
            )
        query = {"service": challenge.parameters.get("service", ""), "scope": scope}
        try:
            if credentials and credentials.identity_token:
                form = {"grant_type": "refresh_token", "refresh_token": credentials.identity_token}
                request = self._session.post(realm, data={**query, **form, "client_id": _CLIENT_ID})
            elif credentials:
                headers = {"Authorization": credentials.basic}
                account = {**query, "account": credentials.username}
                request = self._session.get(realm, params=account, headers=headers)
            else:
                request = self._session.get(realm, params=query)
            async with request as response:
                if response.status in (400, 401, 403):
                    raise self.refusal()
                if response.status != 200:
                    raise RegistryUnreachableError(
                        f"The token server of {self._registry} answers with status {response.status}.",
                        "Try again later.",
                    )
                body: Any = json.loads(await read_limited(response, _MAX_ANSWER))
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RegistryUnreachableError(
                f"The token server of {self._registry} ({realm}) does not answer: {error or type(error).__name__}.",
                "Check the network and the registry's configuration.",
            ) from error
        token = (body.get("token") or body.get("access_token")) if isinstance(body, dict) else None
        if not isinstance(token, str) or not token or not token.isprintable():
            raise RegistryUnreachableError(f"The token server of {self._registry} sent no token.")
        life = body.get("expires_in")
        seconds = float(life) if isinstance(life, int | float) and life > 0 else _DEFAULT_LIFE_S
        self._tokens[scope] = (token, time.monotonic() + max(seconds - _MARGIN_S, 1.0))
