"""The control socket: one JSON object per line, each answered by one. Only the owner of the socket can connect."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

import structlog

from aenv import errors
from aenv.errors import AenvError

log = structlog.get_logger()

LONGEST = 4 << 20  # bytes of a line

Call = Callable[[dict[str, Any]], dict[str, Any]]


def listen(listener: socket.socket, call: Call) -> None:
    """Serve connections, a thread each, for ever."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_talk, args=(connection, call), daemon=True, name="control").start()


def _talk(connection: socket.socket, call: Call) -> None:
    with connection, contextlib.suppress(OSError), connection.makefile("rwb") as stream:
        while line := stream.readline(LONGEST):
            stream.write(json.dumps(answer(line, call)).encode() + b"\n")
            stream.flush()


def answer(line: bytes, call: Call) -> dict[str, Any]:
    """The answer to one line: ``{"ok": …}``, or ``{"error": {type, message, hint}}``."""
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("not an object")
    except ValueError as error:
        return _error("InvalidRequestError", f"The request is no JSON object: {error}.", "")
    try:
        return {"ok": call(request)}
    except AenvError as error:
        return _error(type(error).__name__, error.message, error.hint)
    except Exception as error:
        log.exception("a control request failed", op=request.get("op"))
        return _error("AenvError", f"The layer server failed: {error!r}.", "See its log.")


def result(line: bytes) -> dict[str, Any]:
    """What an answer says. Raises the error in it, as the type it had."""
    value: dict[str, Any] = json.loads(line)
    if "ok" in value:
        ok: dict[str, Any] = value["ok"]
        return ok
    error = value["error"]
    kind = getattr(errors, error["type"], AenvError)
    known = isinstance(kind, type) and issubclass(kind, AenvError) and kind.__init__ is AenvError.__init__
    raise (kind if known else AenvError)(error["message"], error["hint"])


def _error(kind: str, message: str, hint: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "hint": hint}}
