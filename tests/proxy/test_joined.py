"""A response's head leaves with the beginning of its body, or alone when the body is late."""

import asyncio
from collections.abc import Iterable
from typing import cast

from aenv.proxy.joined import HeadJoiner

HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"


class _Transport:
    """Notes each system call's worth of bytes."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.sent.append(data)

    def writelines(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def _joined() -> tuple[_Transport, HeadJoiner]:
    transport = _Transport()
    return transport, HeadJoiner(cast(asyncio.Transport, transport))


async def test_head_and_body_leave_together() -> None:
    transport, joined = _joined()
    for _ in range(2):
        joined.write(HEAD)
        joined.write(b"body")
    assert transport.sent == [HEAD + b"body"] * 2
    await asyncio.sleep(0)
    assert len(transport.sent) == 2, "nothing is sent twice"


async def test_a_head_does_not_wait_for_a_late_body() -> None:
    transport, joined = _joined()
    joined.write(HEAD)
    assert transport.sent == []
    await asyncio.sleep(0)
    assert transport.sent == [HEAD]
    joined.write(b"body")
    assert transport.sent == [HEAD, b"body"]


async def test_a_head_without_a_body_is_sent_before_the_end() -> None:
    transport, joined = _joined()
    joined.write(HEAD)
    joined.close()
    assert transport.sent == [HEAD] and transport.closed


async def test_a_connection_that_is_lost_is_left_alone() -> None:
    transport, joined = _joined()
    joined.write(HEAD)
    transport.closed = True
    await asyncio.sleep(0)
    assert transport.sent == []


async def test_the_rest_is_the_transports() -> None:
    transport, joined = _joined()
    assert joined.is_closing() is False
    joined.write(b"a chunk")
    assert transport.sent == [b"a chunk"]
