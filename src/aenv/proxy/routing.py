"""Which sandbox a request belongs to, if any. Pure: bytes in, decision out.

Four forms, the first that matches wins:

1. headers ``e2b-sandbox-id`` (+ ``e2b-sandbox-port``), as E2B's SDKs send to ``E2B_SANDBOX_URL``;
2. headers ``x-agentenv-sandbox-id`` (+ ``x-agentenv-sandbox-port``);
3. host ``{port}-{sandboxID}.{domain}``;
4. path ``/proxy/{sandboxID}/{port}/...``, for clients that can set neither.

The port defaults to envd's in the header forms. Sandbox ids are ``[A-Za-z0-9_]+``; SDKs before 1.0 append
``-{clientID}``, which is cut off.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

ENVD_PORT = 49983

_ID = re.compile(rb"([A-Za-z0-9_]{1,64})(?:-[A-Za-z0-9_]{1,64})?\Z")
_HOST_LABEL = re.compile(rb"([0-9]{1,5})-([a-z0-9_]{1,64})(-[a-z0-9_]{1,64})?\Z")
_MIN_FOREIGN_ID = 16
_PATH_PREFIX = b"/proxy/"


@dataclass(frozen=True, slots=True)
class Target:
    """Where a request goes. ``raw_path`` is what the guest sees; ``prefix`` is what was cut off before it."""

    sandbox_id: str
    port: int
    raw_path: bytes
    prefix: bytes = b""


@dataclass(frozen=True, slots=True)
class Unroutable:
    """The request names a sandbox in a way that no sandbox can have; ``bad_port`` tells which half is wrong."""

    sandbox_id: str
    bad_port: bool


def sandbox_id(text: bytes) -> str | None:
    """The id without an old SDK's ``-clientID``, or None when no sandbox can have this id."""
    match = _ID.match(text)
    return match[1].decode("ascii") if match else None


def port_number(text: bytes) -> int | None:
    if not text.isdigit() or len(text) > 5:
        return None
    port = int(text)
    return port if 0 < port < 65536 else None


class Router:
    """Routing decisions for one configured ``domain`` (a port in it is ignored, as in the Host header)."""

    def __init__(self, domain: str) -> None:
        name = domain.partition(":")[0].strip(".").lower().encode("idna" if not domain.isascii() else "ascii")
        self._domains = frozenset({name, b"localhost"})

    def match(self, headers: Iterable[tuple[bytes, bytes]], raw_path: bytes) -> Target | Unroutable | None:
        """Decide from ASGI headers (lower-case names) and the undecoded path; None means: not for a sandbox."""
        host = e2b_id = e2b_port = aenv_id = aenv_port = None
        for name, value in headers:
            if name == b"host":
                host = value
            elif name == b"e2b-sandbox-id":
                e2b_id = value if e2b_id is None else e2b_id
            elif name == b"e2b-sandbox-port":
                e2b_port = value if e2b_port is None else e2b_port
            elif name == b"x-agentenv-sandbox-id":
                aenv_id = value if aenv_id is None else aenv_id
            elif name == b"x-agentenv-sandbox-port":
                aenv_port = value if aenv_port is None else aenv_port
        if e2b_id is not None:
            return _target(e2b_id, e2b_port, raw_path)
        if aenv_id is not None:
            return _target(aenv_id, aenv_port, raw_path)
        if host is not None and host[:1].isdigit():
            by_host = self._by_host(host, raw_path)
            if by_host is not None:
                return by_host
        if raw_path.startswith(_PATH_PREFIX):
            return _by_path(raw_path)
        return None

    def _by_host(self, host: bytes, raw_path: bytes) -> Target | Unroutable | None:
        label, _, domain = host.partition(b":")[0].lower().partition(b".")
        match = _HOST_LABEL.match(label)
        if match is None or not domain:
            return None
        # Under a domain that is not ours (a wildcard behind another proxy) the label must look like one of our
        # ids: development hosts such as 8000-user-repo.gitpod.io must still reach the API.
        foreign = domain.rstrip(b".") not in self._domains
        if foreign and (match[3] is not None or len(match[2]) < _MIN_FOREIGN_ID):
            return None
        return _target(match[2], match[1], raw_path)


def _by_path(raw_path: bytes) -> Target | Unroutable | None:
    parts = raw_path[len(_PATH_PREFIX) :].split(b"/", 2)
    if len(parts) < 2:
        return None
    prefix = _PATH_PREFIX + parts[0] + b"/" + parts[1]
    return _target(parts[0], parts[1], b"/" + parts[2] if len(parts) == 3 else b"/", prefix)


def _target(raw_id: bytes, raw_port: bytes | None, raw_path: bytes, prefix: bytes = b"") -> Target | Unroutable:
    identity = sandbox_id(raw_id)
    if identity is None:
        return Unroutable(raw_id[:64].decode("latin-1"), bad_port=False)
    port = ENVD_PORT if raw_port is None else port_number(raw_port)
    if port is None:
        return Unroutable(identity, bad_port=True)
    return Target(identity, port, raw_path or b"/", prefix)
