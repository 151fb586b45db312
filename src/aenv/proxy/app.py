"""The data plane as an ASGI application: decides, asks the orchestrator, forwards.

``SandboxProxy.match`` is called for every request the server gets, so it does no more than look at the headers.
"""

from aenv.orchestrator.interface import Orchestrator
from aenv.orchestrator.model import SandboxFilter
from aenv.proxy import replies, signed
from aenv.proxy.access import refusal
from aenv.proxy.forward import Receive, Scope, Send, forward
from aenv.proxy.masking import masked
from aenv.proxy.pool import Pools
from aenv.proxy.replies import Reply
from aenv.proxy.routing import ENVD_PORT, Router, Target, Unroutable
from aenv.proxy.websocket import tunnel

_RUNNING = SandboxFilter(states=frozenset({"running"}))
_PAGE = 1000


class SandboxProxy:
    """Routes requests into sandboxes. One per event loop."""

    def __init__(self, orchestrator: Orchestrator, domain: str) -> None:
        self._orchestrator = orchestrator
        self._router = Router(domain)
        self._pools = Pools()

    def match(self, scope: Scope) -> Target | Unroutable | None:
        """Where an ``http`` or ``websocket`` scope goes; None means that it is not for a sandbox."""
        return self._router.match(scope["headers"], scope.get("raw_path") or scope["path"].encode())

    async def match_signed(self, scope: Scope) -> Target | None:
        """The running sandbox whose token signed a file URL that names none; None for all other requests."""
        request = signed.parse(scope["method"], scope.get("raw_path") or b"", scope["query_string"])
        token = None
        while request is not None:
            page = await self._orchestrator.list(_RUNNING, _PAGE, token)
            for sandbox in page.items:
                if sandbox.envd_access_token and request.signed_with(sandbox.envd_access_token):
                    return Target(sandbox.id, ENVD_PORT, scope["raw_path"])
            token = page.next_token
            if token is None:
                break
        return None

    async def __call__(self, target: Target | Unroutable, scope: Scope, receive: Receive, send: Send) -> None:
        reply = await self._carry(target, scope, receive, send)
        if reply is not None:
            await _answer(reply, scope, send)

    def drop(self, sandbox_id: str) -> None:
        """Cut every connection to a sandbox: it was paused or killed, and its VM will never answer them."""
        self._pools.drop(sandbox_id)

    def close(self) -> None:
        self._pools.close()

    async def _carry(self, target: Target | Unroutable, scope: Scope, receive: Receive, send: Send) -> Reply | None:
        if isinstance(target, Unroutable):
            return replies.unroutable(target)
        try:
            upstream = await self._orchestrator.upstream(target.sandbox_id)
        except Exception as error:
            return replies.for_orchestrator_error(target.sandbox_id, error)
        denied = refusal(target, scope["headers"], upstream.sandbox)
        if denied is not None:
            return replies.forbidden(target, denied)
        if upstream.sandbox.host_mask is not None and target.port != ENVD_PORT:
            scope = {**scope, "headers": masked(scope["headers"], upstream.sandbox.host_mask, target.port)}
        pool = self._pools.get(upstream)
        if scope["type"] == "websocket":
            return await tunnel(pool, target, scope, receive, send)
        return await forward(pool, target, scope, receive, send)


async def _answer(reply: Reply, scope: Scope, send: Send) -> None:
    websocket = scope["type"] == "websocket"
    kind = "websocket.http.response" if websocket else "http.response"
    if websocket and kind not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1011, "reason": reply.message[:120]})
        return
    accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    headers, body = reply.render(as_html=not websocket and accept.startswith(b"text/html"))
    await send({"type": f"{kind}.start", "status": reply.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": body})
