"""The Host header that a sandbox's servers see, where its creator chose one. Pure.

Servers that only answer to names they know, such as development servers, are reached under any name this way.
"""

from collections.abc import Iterable

PORT = "${PORT}"


def masked(headers: Iterable[tuple[bytes, bytes]], mask: str, port: int) -> list[tuple[bytes, bytes]]:
    """``headers`` with the mask for a host; the one that was asked for goes on as ``X-Forwarded-Host``."""
    passed = list(headers)
    outer = next((value for name, value in passed if name == b"x-forwarded-host"), None)
    if outer is None:
        passed += [(b"x-forwarded-host", value) for name, value in passed if name == b"host"][:1]
    host = mask.replace(PORT, str(port)).encode("ascii")
    return [(b"host", host), *(item for item in passed if item[0] != b"host")]
