"""How much of a request body the API is willing to read. The proxy has no such limit, nor have files of volumes."""

from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from aenv.api.auth import VOLUME_CONTENT
from aenv.api.errors import Error, respond

MAX_BODY = 4 * 1024 * 1024  # bytes


class _TooLargeError(Exception):
    pass


class BodyLimit:
    """Middleware: 413 for bodies over ``MAX_BODY``, announced or not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"] == "PUT" and scope["path"].startswith(VOLUME_CONTENT)):
            await self._app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if not announced.isdigit() or int(announced) > MAX_BODY:
            await _refuse(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY:
                raise _TooLargeError
            return message

        async def unless_too_large(message: Message) -> None:
            # FastAPI answers 400 to whatever goes wrong while it reads a body; that answer is replaced below.
            if seen <= MAX_BODY:
                await send(message)

        with suppress(_TooLargeError):
            await self._app(scope, counted, unless_too_large)
        if seen > MAX_BODY:
            await _refuse(scope, receive, send)


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    message = f"The request body is larger than {MAX_BODY // 2**20} MiB."
    await respond(Error(code=413, message=message), {"connection": "close"})(scope, receive, send)
