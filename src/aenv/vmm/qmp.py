"""A QMP client (QEMU's ``docs/interop/qmp-spec.rst``): newline-delimited JSON over a unix socket.

``Parser`` is pure. ``QmpClient`` is an ``asyncio.Protocol`` rather than a stream, because commands are pipelined on
the path of every restore and each stream layer costs an extra turn of the event loop.
"""

import asyncio
import itertools
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from aenv.errors import VmmError

Message = dict[str, Any]
DEFAULT_TIMEOUT = 20.0  # seconds; a healthy QEMU answers within milliseconds, a busy host within a second
MAX_LINE = 1 << 24  # bytes; far above any answer that we ask for


class QmpCommandError(VmmError):
    """QEMU refused a command; ``qmp_class`` and ``description`` are its own words."""

    def __init__(self, command: str, qmp_class: str, description: str) -> None:
        super().__init__(f"QEMU refused {command}: {description} ({qmp_class}).")
        self.command = command
        self.qmp_class = qmp_class
        self.description = description


class Parser:
    """Splits a byte stream into QMP messages. Raises VmmError on anything that is not a line with an object."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            raise VmmError(f"QMP message is longer than {MAX_LINE} bytes.")
        messages = []
        for line in lines:
            if not line.strip():
                continue
            try:
                message = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise VmmError(f"QMP message is not JSON: {line[:80]!r}.") from error
            if not isinstance(message, dict):
                raise VmmError(f"QMP message is not an object: {line[:80]!r}.")
            messages.append(message)
        return messages


def encode(command: str, arguments: Message | None, ident: int) -> bytes:
    """One command as it goes over the wire."""
    message: Message = {"execute": command, "id": ident}
    if arguments:
        message["arguments"] = arguments
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class QmpClient(asyncio.Protocol):
    """One connection. Every command has a deadline; when the connection is lost all pending ones fail."""

    def __init__(self) -> None:
        self._parser = Parser()
        self._transport: asyncio.Transport | None = None
        self._ids = itertools.count(1)
        self._pending: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._greeting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._listeners: list[Callable[[str, Message], None]] = []
        self._lost: str | None = None

    @classmethod
    async def connect(cls, path: Path, timeout: float = DEFAULT_TIMEOUT) -> "QmpClient":
        """Connect and finish the handshake. The socket must be listening already."""
        loop = asyncio.get_running_loop()
        try:
            _, client = await loop.create_unix_connection(cls, str(path))
        except OSError as error:
            raise VmmError(f"QEMU's control socket {path} cannot be reached: {error}.") from error
        return await client._ready(timeout)

    @classmethod
    async def over(cls, connection: socket.socket, timeout: float = DEFAULT_TIMEOUT) -> "QmpClient":
        """Finish the handshake over a socket that is connected; it is the client's from now on."""
        _, client = await asyncio.get_running_loop().create_unix_connection(cls, sock=connection)
        return await client._ready(timeout)

    async def _ready(self, timeout: float) -> "QmpClient":
        try:
            # Pipelined with the greeting: QEMU reads nothing before it has sent that.
            ready = self.send("qmp_capabilities")
            await self._within(self._greeting, "the QMP greeting", timeout)
            await self._within(ready, "qmp_capabilities", timeout)
        except BaseException:
            self.close()
            raise
        return self

    @property
    def connected(self) -> bool:
        return self._lost is None

    def send(self, command: str, arguments: Message | None = None) -> "asyncio.Future[Any]":
        """Put a command on the wire; the future is its return value. Await it through ``execute`` or ``result``."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        # A command whose reply nobody waits for (cont) must not warn when the process dies first.
        future.add_done_callback(_consume)
        if self._lost is not None or self._transport is None:
            future.set_exception(VmmError(f"QEMU is gone ({self._lost}): {command} was not sent."))
            return future
        ident = next(self._ids)
        self._pending[ident] = (command, future)
        self._transport.write(encode(command, arguments, ident))
        return future

    async def result(self, future: "asyncio.Future[Any]", what: str, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """The value of a pipelined command, waiting at most ``timeout`` seconds."""
        return await self._within(future, what, timeout)

    async def execute(self, command: str, arguments: Message | None = None, timeout: float = DEFAULT_TIMEOUT) -> Any:
        """Run one command and return its value; QmpCommandError when refused, VmmError when gone or too slow."""
        return await self._within(self.send(command, arguments), command, timeout)

    def subscribe(self, listener: Callable[[str, Message], None]) -> Callable[[], None]:
        """Call ``listener(event name, data)`` for each event; returns what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def expect(self, name: str, matches: Callable[[Message], bool]) -> "asyncio.Future[Message]":
        """A future for the next event of that name whose data match; fails when the connection is lost."""
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            future.set_exception(VmmError(f"QEMU is gone ({self._lost})."))
        ident = next(self._ids)

        def listener(event: str, data: Message) -> None:
            if event == name and not future.done() and matches(data):
                future.set_result(data)

        unsubscribe = self.subscribe(listener)
        self._pending[ident] = (f"event {name}", future)

        def forget(_: object) -> None:
            unsubscribe()
            self._pending.pop(ident, None)

        future.add_done_callback(forget)
        future.add_done_callback(_consume)
        return future

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._fail("connection closed")

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._parser.feed(data)
        except VmmError as error:
            self._fail(error.message)
            if self._transport is not None:
                self._transport.abort()
            return
        for message in messages:
            self._dispatch(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(str(exc) if exc else "its control socket closed")

    def _dispatch(self, message: Message) -> None:
        if "event" in message:
            for listener in list(self._listeners):
                listener(str(message["event"]), message.get("data") or {})
        elif "QMP" in message:
            if not self._greeting.done():
                self._greeting.set_result(message)
        elif (entry := self._pending.pop(message.get("id", 0), None)) and not entry[1].done():
            command, future = entry
            if "error" in message:
                error = message["error"]
                future.set_exception(QmpCommandError(command, str(error.get("class")), str(error.get("desc"))))
            else:
                future.set_result(message.get("return"))

    def _fail(self, reason: str) -> None:
        if self._lost is not None:
            return
        self._lost = reason
        pending, self._pending = self._pending, {}
        for command, future in pending.values():
            if not future.done():
                future.set_exception(VmmError(f"QEMU is gone ({reason}) while {command} was under way."))
        if not self._greeting.done():
            self._greeting.set_exception(VmmError(f"QEMU is gone ({reason}) before its QMP greeting."))
            self._greeting.exception()

    async def _within(self, future: "asyncio.Future[Any]", what: str, timeout: float) -> Any:
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError as error:
            raise VmmError(f"QEMU did not answer {what} within {timeout:g} s.") from error


def _consume(future: "asyncio.Future[Any]") -> None:
    if not future.cancelled():
        future.exception()
