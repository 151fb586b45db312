"""Pages of other origins may use the API and the guest daemon, as E2B's may: the SDK runs in browsers, too.

Keys and tokens are headers that a page has to know, never cookies, so any origin is let in. Servers of users in their
sandboxes are left alone: they decide for themselves.
"""

from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv.proxy.app import SandboxProxy
from aenv.proxy.routing import Target

OPEN: dict[str, Any] = {
    "allow_origins": ["*"],
    "allow_methods": ["*"],
    "allow_headers": ["*"],
    "expose_headers": ["X-Next-Token", "X-Total-Running", "X-AgentENV-Sandbox-Id", "Should-Retry", "Retry-After"],
    "max_age": 7200,  # seconds, the most that browsers keep it
}
_TARGET = "aenv.target"


def cors(app: ASGIApp) -> CORSMiddleware:
    return CORSMiddleware(app, **OPEN)


def from_browser(scope: Scope) -> bool:
    """Whether a page of another origin may have sent it."""
    return scope["type"] == "http" and any(name == b"origin" for name, _ in scope["headers"])


class Forwarded:
    """The proxy as an ASGI application: where a request goes is in its scope."""

    def __init__(self, proxy: SandboxProxy) -> None:
        self._proxy = proxy

    @staticmethod
    def scope(scope: Scope, target: Target) -> Scope:
        return {**scope, _TARGET: target}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._proxy(scope[_TARGET], scope, receive, send)
