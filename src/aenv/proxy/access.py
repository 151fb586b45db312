"""Who may reach what in a sandbox, beyond what envd checks itself. Pure.

envd checks ``X-Access-Token`` on its own port, so the proxy passes it through. The proxy adds two rules: envd's
control endpoints belong to the node alone, and user ports of a sandbox without public traffic need its token.
"""

import hmac
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from aenv.orchestrator.model import Sandbox
from aenv.proxy.routing import ENVD_PORT, Target

TRAFFIC_TOKEN_HEADER = b"e2b-traffic-access-token"

_CONTROL = frozenset({b"init", b"freeze", b"unfreeze", b"fsfreeze", b"fsthaw", b"collapse", b"tunnel"})


def refusal(target: Target, headers: Iterable[tuple[bytes, bytes]], sandbox: Sandbox) -> str | None:
    """Why the request must be answered 403, or None when it may pass."""
    if target.port == ENVD_PORT:
        if is_control_path(target.raw_path):
            return "This endpoint is reserved for the node that runs the sandbox"
        return None
    token = sandbox.traffic_access_token
    if token is None:
        return None
    given = next((value for name, value in headers if name == TRAFFIC_TOKEN_HEADER), None)
    if given is None:
        return f"The sandbox does not allow public traffic: send its token in {TRAFFIC_TOKEN_HEADER.decode()}"
    if not hmac.compare_digest(given, token.encode()):
        return "The traffic access token is not the one of this sandbox"
    return None


@lru_cache(maxsize=1024)
def is_control_path(raw_path: bytes) -> bool:
    """Whether any reading of the path names a control endpoint.

    Deliberately wider than envd's router: double encoding, dot segments, doubled or trailing slashes, path
    parameters and letter case are all seen through, so that no difference in parsing opens a way around.
    """
    path = unquote_to_bytes(unquote_to_bytes(raw_path)).replace(b"\\", b"/").partition(b"?")[0]
    segments: list[bytes] = []
    for segment in path.split(b"/"):
        name = segment.partition(b";")[0].strip().lower()
        if name == b"..":
            del segments[-1:]
        elif name not in (b"", b"."):
            segments.append(name)
    return len(segments) == 1 and segments[0] in _CONTROL
