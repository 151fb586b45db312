"""The client's connection, with a response's head and the beginning of its body in one segment.

ASGI servers write the head when they are told of it, by a system call of its own: the client wakes up for it, often
on the processor that was about to write the body, and once more for that. Most answers are complete by then.
"""

import asyncio
from typing import Any

_STATUS_LINE = b"HTTP/1.1 "


class HeadJoiner:
    """A transport that holds a head back until the next write, but not beyond this round of the event loop.

    What merely looks like a head is held in the same way, which changes nothing for whoever reads it.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._head = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.writelines((head, data))
        elif data.startswith(_STATUS_LINE):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)
