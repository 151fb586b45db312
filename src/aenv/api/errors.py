"""The one place that knows HTTP status codes: typed errors become E2B's body ``{code, message, error_code}``."""

import uuid
from collections.abc import Mapping
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv.errors import (
    AenvError,
    CapacityError,
    ConflictError,
    CorruptFileError,
    GuestUnresponsiveError,
    IncompatibleSnapshotError,
    InvalidRequestError,
    NotFoundError,
    ReusedKeyError,
    SandboxStartError,
    SandboxUnreachableError,
    SourceError,
    UnresponsiveSnapshotError,
    VmmError,
)
from aenv.image.errors import ImageNotFoundError, RegistryUnreachableError

_log = structlog.get_logger(__name__)


class UnsupportedError(InvalidRequestError):
    """A part of E2B's API that this server does not have. Never ignored: the caller would rely on it."""


class MissingFeatureError(UnsupportedError):
    """A whole feature that this server does not have, rather than one value of a call that it serves."""


class UnauthorizedError(AenvError):
    """The token that was shown does not open what is asked for."""


class Error(BaseModel):
    """E2B's error body. ``code`` repeats the HTTP status; ``error_code`` is for programs."""

    code: int
    message: str
    error_code: str | None = None


# Most specific first: (type, status, error_code). Of E2B are ``sandbox_capacity_unavailable``,
# ``sandbox_create_failed``, ``sandbox_snapshot_guest_agent_unresponsive`` and ``internal_server_error``; it calls the
# set open.
_TABLE: tuple[tuple[type[AenvError], int, str | None], ...] = (
    (UnauthorizedError, 401, None),
    (MissingFeatureError, 501, "not_supported"),
    (UnsupportedError, 400, "not_supported"),
    (InvalidRequestError, 400, None),
    (ImageNotFoundError, 400, "image_not_found"),
    (RegistryUnreachableError, 500, "image_registry_unreachable"),
    (NotFoundError, 404, None),
    (ReusedKeyError, 422, "idempotency_key_reused"),
    (UnresponsiveSnapshotError, 409, "sandbox_snapshot_guest_agent_unresponsive"),
    (ConflictError, 409, None),
    (IncompatibleSnapshotError, 409, "snapshot_incompatible"),
    (CapacityError, 503, "sandbox_capacity_unavailable"),
    (SandboxStartError, 500, "sandbox_create_failed"),
    (GuestUnresponsiveError, 503, "sandbox_guest_agent_unresponsive"),
    (SandboxUnreachableError, 502, "sandbox_unreachable"),
    (VmmError, 500, "vmm_error"),
    (CorruptFileError, 500, "corrupt_file"),
    (SourceError, 503, "source_unavailable"),
    (AenvError, 500, None),
)

# E2B's SDK repeats 429, 502, 503 and 504 up to three times unless ``Should-Retry`` says otherwise, and waits for
# ``Retry-After`` whole seconds (e2b 2.63, ``retry.py``). A refused creation changed nothing, so it may be repeated;
# an unreachable sandbox is not helped by repeating a control call.
_RETRY_HEADERS: Mapping[int, Mapping[str, str]] = {
    502: {"Should-Retry": "false"},
    503: {"Should-Retry": "true", "Retry-After": "1"},
}


def describe(error: Exception) -> Error:
    """The body for an error. One that is not ours says nothing but a request id, under which it is logged."""
    for kind, status, error_code in _TABLE:
        if isinstance(error, kind):
            return Error(code=status, message=str(error), error_code=error_code)
    request_id = uuid.uuid4().hex
    _log.error("request failed", request_id=request_id, exc_info=error)
    return Error(
        code=500,
        message=f"Internal error; the server's log has the details under request id {request_id}.",
        error_code="internal_server_error",
    )


def respond(error: Error, headers: Mapping[str, str] | None = None) -> JSONResponse:
    # What a message quotes may be half of a surrogate pair, which no answer can carry.
    error = error.model_copy(update={"message": error.message.encode("utf-8", "replace").decode()})
    merged = {**_RETRY_HEADERS.get(error.code, {}), **(headers or {})}
    return JSONResponse(error.model_dump(exclude_none=True), status_code=error.code, headers=merged)


def validation_message(errors: list[Any]) -> str:
    """One line that names each wrong field, from pydantic's error list."""
    lines = []
    for entry in errors[:5]:
        place = [str(part) for part in entry["loc"]]
        where = ".".join(place[1:]) or place[0] if place else "request"
        message = entry["msg"].removeprefix("Value error, ")
        lines.append("body: invalid JSON" if entry["type"] == "json_invalid" else f"{where}: {message}")
    if len(errors) > 5:
        lines.append(f"and {len(errors) - 5} more")
    return "Invalid request: " + "; ".join(lines)


def install(app: FastAPI) -> None:
    """Make every error of ``app`` come out in E2B's shape."""

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, error: RequestValidationError) -> JSONResponse:
        return respond(Error(code=400, message=validation_message(list(error.errors()))))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{message}: {request.method} {request.url.path}"
        return respond(Error(code=error.status_code, message=message), error.headers)

    @app.exception_handler(AenvError)
    async def _typed(request: Request, error: AenvError) -> JSONResponse:
        return respond(describe(error))

    app.add_middleware(_Boundary)


class _Boundary:
    """Turns what nobody expected into a 500 here, so that the server neither answers in its own words nor logs it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            body = describe(error)
            if not started:
                await respond(body)(scope, receive, send)
