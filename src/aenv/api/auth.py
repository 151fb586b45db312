"""API keys and access tokens: ``X-API-Key: KEY`` or ``Authorization: Bearer KEY``.

Checked before anything of the request is parsed, so that strangers learn nothing from error messages. Whether a key
is valid is the caller's business (``api_key_valid``, which compares in constant time).
"""

from collections.abc import Callable, Iterable
from typing import Annotated

from fastapi import Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv.api.errors import Error, respond

OPEN_PATHS = frozenset({"/health", "/openapi.json"})
VOLUME_CONTENT = "/volumecontent/"  # asked with a volume's own token, which ``volume_content`` checks


class ApiKeyGate:
    """Middleware: 401 in E2B's shape unless the request carries a valid key or asks for an open path."""

    def __init__(self, app: ASGIApp, api_key_valid: Callable[[str], bool]) -> None:
        self._app = app
        self._valid = api_key_valid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _open(scope["path"]):
            problem = self._problem(scope["headers"])
            if problem is not None:
                await respond(Error(code=401, message=problem))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _problem(self, headers: list[tuple[bytes, bytes]]) -> str | None:
        keys = presented(headers)
        if not keys:
            if any(_key(name, value) is not None for name, value in headers):
                return "The API key is not valid."
            return "No API key. Send it in the X-API-Key header (E2B SDKs: E2B_API_KEY)."
        return None if any(map(self._valid, keys)) else "The API key is not valid."


def _open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(VOLUME_CONTENT)


def presented(headers: Iterable[tuple[bytes, bytes]]) -> list[str]:
    """The credentials that a request shows, of either kind in either header."""
    keys = (_key(name, value) for name, value in headers)
    # Non-ASCII text would make hmac.compare_digest raise, and is never a key.
    return [key.decode("ascii") for key in keys if key is not None and key.isascii()]


def _key(name: bytes, value: bytes) -> bytes | None:
    if name == b"x-api-key":
        return value
    if name == b"authorization" and value[:7].lower() == b"bearer ":
        return value[7:].strip()
    return None


def documented(
    key: Annotated[str | None, Security(APIKeyHeader(name="X-API-Key", auto_error=False))] = None,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))] = None,
) -> None:
    """Puts the two schemes into the OpenAPI document; the gate above has already decided."""
