"""The proxy's own answers, in the shapes E2B's SDKs recognise.

The SDK reads ``message`` of a 502: ``was not found`` becomes SandboxNotRunningException, ``port is not open``
becomes SandboxUnreachableException with the sandbox known to run, anything else SandboxUnreachableException with
its state unknown (e2b 2.63, ``exceptions.format_sandbox_unavailable_exception``). ``code`` must equal the HTTP
status: the RPC client prefers it.
"""

import html
import json
import uuid
from dataclasses import dataclass, field
from typing import Any

import structlog

from aenv.errors import AenvError, CapacityError, ConflictError, NotFoundError
from aenv.proxy.routing import Target, Unroutable
from aenv.proxy.upstream import ConnectError, UpstreamError

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP answer made by the proxy itself."""

    status: int
    sandbox_id: str
    message: str
    port: int | None = None
    headers: tuple[tuple[bytes, bytes], ...] = field(default=())

    def render(self, *, as_html: bool) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Headers and body; HTML for browsers, else JSON."""
        if as_html:
            kind = b"text/html; charset=utf-8"
            text = html.escape(self.message)
            where = html.escape(self.sandbox_id + (f", port {self.port}" if self.port else ""))
            body = _PAGE.format(status=self.status, message=text, where=where).encode()
        else:
            kind = b"application/json"
            content: dict[str, Any] = {"sandboxId": self.sandbox_id, "message": self.message}
            if self.port is not None:
                content["port"] = self.port
            body = json.dumps({**content, "code": self.status}).encode()
        length = str(len(body)).encode()
        return [(b"content-type", kind), (b"content-length", length), *self.headers], body


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{status} {message}</title></head>
<body style="font-family: system-ui; max-width: 40em; margin: 4em auto">
<h1>{message}</h1><p>Sandbox {where}</p></body></html>
"""


def not_found(sandbox_id: str, detail: str = "") -> Reply:
    return Reply(502, sandbox_id, "The sandbox was not found" + detail)


def forbidden(target: Target, message: str) -> Reply:
    return Reply(403, target.sandbox_id, message, target.port)


def unroutable(request: Unroutable) -> Reply:
    if request.bad_port:
        return Reply(400, request.sandbox_id, "The sandbox port must be a number from 1 to 65535")
    return not_found(request.sandbox_id)


def for_orchestrator_error(sandbox_id: str, error: Exception) -> Reply:
    """The answer when the orchestrator did not give an address."""
    if isinstance(error, NotFoundError):
        return not_found(sandbox_id)
    if isinstance(error, ConflictError):
        # The SDK has one exception for "killed, paused or timed out", and these are the words it looks for.
        return not_found(
            sandbox_id, " among the running ones: it is paused and does not resume on traffic; connect to it first"
        )
    if isinstance(error, CapacityError):
        return Reply(503, sandbox_id, str(error), headers=((b"retry-after", b"1"),))
    if isinstance(error, AenvError):
        _log.warning("sandbox not reachable", sandbox_id=sandbox_id, error=str(error))
        return Reply(502, sandbox_id, f"The sandbox could not be reached. {error}")
    return internal(sandbox_id, error)


def for_upstream_error(target: Target, error: UpstreamError) -> Reply:
    """The answer when the guest could not be talked to, before any of its response was passed on."""
    if isinstance(error, ConnectError) and error.refused:
        return Reply(502, target.sandbox_id, "The sandbox is running but port is not open", target.port)
    return Reply(
        502, target.sandbox_id, f"The connection to the sandbox ended without a response: {error}", target.port
    )


def internal(sandbox_id: str, error: Exception) -> Reply:
    request_id = uuid.uuid4().hex
    _log.error("proxy request failed", sandbox_id=sandbox_id, request_id=request_id, exc_info=error)
    return Reply(
        500,
        sandbox_id,
        f"Internal error; the server's log has the details under request id {request_id}",
        headers=((b"x-request-id", request_id.encode()),),
    )
