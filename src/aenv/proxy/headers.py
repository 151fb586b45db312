"""What the guest sees of a request's head, and the client of a response's. Pure.

End-to-end headers pass byte for byte and in order, duplicates included. Hop-by-hop ones (RFC 9110 section 7.6.1)
and those that only speak to this proxy are removed; framing is rebuilt for the next hop.
"""

from collections.abc import Sequence
from enum import Enum, auto

from aenv.proxy.access import TRAFFIC_TOKEN_HEADER

Headers = Sequence[tuple[bytes, bytes]]

_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_OURS = frozenset(
    {
        b"e2b-sandbox-id",
        b"e2b-sandbox-port",
        b"x-agentenv-sandbox-id",
        b"x-agentenv-sandbox-port",
        TRAFFIC_TOKEN_HEADER,
    }
)
# ``expect`` is answered by this hop's server; forwarding headers are rewritten below.
_REQUEST_DROP = _HOP | _OURS | {b"expect", b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host"}
# A client may not name these in ``Connection`` to have them removed: that is how requests are smuggled.
_KEPT_ANYWAY = frozenset({b"host", b"content-length", b"keep-alive", b"close", b"upgrade", b""})


class Body(Enum):
    """How the request's body is framed."""

    NONE = auto()
    LENGTH = auto()
    CHUNKED = auto()


class UnsupportedFramingError(Exception):
    """The request uses a transfer coding other than ``chunked``."""


def request_head(
    method: bytes,
    raw_path: bytes,
    query: bytes,
    headers: Headers,
    *,
    client: str | None,
    scheme: str,
    prefix: bytes = b"",
) -> tuple[bytes, Body]:
    """The head to send to the guest (HTTP/1.1, with its empty line) and how the body follows it.

    Raises UnsupportedFramingError.
    """
    passed, body = forwarded_headers(headers, client=client, scheme=scheme, prefix=prefix)
    parts = [method, b" ", raw_path, b"?" if query else b"", query, b" HTTP/1.1\r\n"]
    for name, value in passed:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"transfer-encoding: chunked\r\n\r\n" if body is Body.CHUNKED else b"\r\n")
    return b"".join(parts), body


def forwarded_headers(
    headers: Headers, *, client: str | None, scheme: str, prefix: bytes = b""
) -> tuple[list[tuple[bytes, bytes]], Body]:
    """The request's headers for the guest, with ``X-Forwarded-*`` added, without framing of a chunked body."""
    body = Body.NONE
    drop: frozenset[bytes] = _REQUEST_DROP
    passed: list[tuple[bytes, bytes]] = []
    via: list[bytes] = []
    proto = scheme.encode("ascii")
    outer_host = host = None
    for item in headers:
        name, value = item
        if name not in drop:
            passed.append(item)
            if name == b"content-length":
                if body is Body.NONE and value != b"0":
                    body = Body.LENGTH
            elif name == b"host":
                host = value
        elif name == b"connection":
            nominated = {token.strip().lower() for token in value.split(b",")} - _KEPT_ANYWAY
            if nominated:
                drop = drop | nominated
                passed = [kept for kept in passed if kept[0] not in nominated]
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise UnsupportedFramingError
            body = Body.CHUNKED
        elif name == b"x-forwarded-for":
            via.append(value)
        elif name == b"x-forwarded-proto":
            proto = value
        elif name == b"x-forwarded-host":
            outer_host = value
    if body is Body.CHUNKED:
        passed = [item for item in passed if item[0] != b"content-length"]
    if client is not None:
        via.append(client.encode("ascii", "replace"))
    if via:
        passed.append((b"x-forwarded-for", b", ".join(via)))
    passed.append((b"x-forwarded-proto", proto))
    if outer_host is not None or host is not None:
        passed.append((b"x-forwarded-host", outer_host or host or b""))
    if prefix:
        passed.append((b"x-forwarded-prefix", prefix))
    return passed, body


def response_headers(status: int, headers: Headers, *, head: bool) -> list[tuple[bytes, bytes]]:
    """The response's headers for the client. Names must be lower case."""
    # A 304 may state the length of the body it does not have, which ASGI servers take for a promise.
    bodyless = status in (204, 304) and not head
    nominated: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            nominated |= {token.strip().lower() for token in value.split(b",")} - _KEPT_ANYWAY
    return [
        item
        for item in headers
        if item[0] not in _HOP and item[0] not in nominated and not (bodyless and item[0] == b"content-length")
    ]
