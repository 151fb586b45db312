"""The Connect protocol's frames and envd's process events in their JSON form. Pure.

https://connectrpc.com/docs/protocol/#streaming-rpcs: each message is one flag byte, a big-endian length, and the
message; flag bit 1 marks the end of the stream, whose message may carry an error.
"""

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from aenv.errors import AenvError

HEADER = struct.Struct(">BI")
END_OF_STREAM = 0x02


class CommandRefusedError(AenvError):
    """envd did not start the command: the user, the folder or the program does not exist in the guest."""


@dataclass(frozen=True, slots=True)
class Started:
    pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes as they came; a chunk may end within a line or a character."""

    stream: str  # "stdout", "stderr" or "pty"
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """``status`` is in words: ``exit status 1``, ``signal: killed``; the code is -1 after a signal."""

    exit_code: int
    status: str


Event = Started | Output | Ended


def pack(message: object) -> bytes:
    """One frame."""
    data = json.dumps(message, separators=(",", ":")).encode()
    return HEADER.pack(0, len(data)) + data


def headers(*, user: str | None, token: str | None, streaming: bool = True) -> dict[str, str]:
    """Of a call to envd. ``user`` None is the sandbox's default."""
    made = {
        "Content-Type": "application/connect+json" if streaming else "application/json",
        "Connect-Protocol-Version": "1",
    }
    if user is not None:
        made["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()
    if token:
        made["X-Access-Token"] = token
    return made


def events(flags: int, message: dict[str, Any]) -> Iterator[Event]:
    """What one frame of ``Start`` or ``Connect`` says; keepalives say nothing. Raises CommandRefusedError."""
    if flags & END_OF_STREAM:
        if error := message.get("error"):
            raise CommandRefusedError(str(error.get("message") or error.get("code") or "the stream ended early"))
        return
    event = message.get("event", {})
    if "start" in event:
        yield Started(int(event["start"].get("pid", 0)))
    for name, text in event.get("data", {}).items():
        yield Output(name, base64.b64decode(text))
    if (end := event.get("end")) is not None:
        code = int(end.get("exitCode", 0))
        yield Ended(code, end.get("status") or f"exit status {code}")


class Frames:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
        """Flags and message of each frame that is complete now."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            flags, size = HEADER.unpack_from(self._buffer)
            if len(self._buffer) < HEADER.size + size:
                return
            message = bytes(self._buffer[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            yield flags, json.loads(message) if message else {}
