"""Operator's settings of the network layer."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path

from aenv.network.errors import NetworkUnavailable

IFNAME_MAX = 15
"""Longest interface name the kernel accepts (IFNAMSIZ - 1)."""


@dataclass(frozen=True)
class NetworkSettings:
    """Two nodes coexist on one machine when their prefixes differ and their pools do not overlap.

    Raises NetworkUnavailable for values that cannot work.
    """

    prefix: str = "aenv"
    """Starts the name of every namespace and link of this node. No '-': it separates the index, and keeps
    the wildcard `<prefix>-*` of one node from matching the names of another."""
    pool_cidr: str = "10.231.0.0/16"
    """Two addresses (a /31) per slot come from here. Used on this host only, never seen outside it."""
    mtu: int = 1500
    """Of tap and veth, in bytes. Guests assume 1500; smaller uplinks are handled by MSS clamping."""
    always_allow: tuple[str, ...] = ()
    """Networks or addresses exempt from the built-in protection (host, private and link-local ranges), such as
    a resolver or package mirror in a private network. A sandbox's own policy still applies to them."""
    uplinks: tuple[str, ...] = ()
    """Interfaces that lead out of the host; empty means those that carry a default route at start."""
    runtime_dir: Path = Path("/run/aenv")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]{0,9}", self.prefix):
            raise NetworkUnavailable(
                f"network prefix {self.prefix!r}: use 1 to 10 lower-case letters and digits, a letter first"
            )
        try:
            pool = ipaddress.IPv4Network(self.pool_cidr)
            exceptions = tuple(ipaddress.IPv4Network(entry) for entry in self.always_allow)
        except ValueError as error:
            raise NetworkUnavailable(f"network settings: {error}; write IPv4 networks as 10.0.0.0/8") from error
        if pool.prefixlen > 30:
            raise NetworkUnavailable(f"network pool {pool} is too small: a slot needs a /31, the pool at least a /30")
        longest = f"{self.prefix}-{pool.num_addresses // 2 - 1}"
        if len(longest) > IFNAME_MAX:
            raise NetworkUnavailable(
                f"interface name {longest!r} exceeds {IFNAME_MAX} characters: shorten the prefix or the pool"
            )
        if any(exception.overlaps(pool) for exception in exceptions):
            raise NetworkUnavailable(f"always_allow overlaps the pool {pool}: that would join guests to each other")
        if not 576 <= self.mtu <= 65520:
            raise NetworkUnavailable(f"network mtu {self.mtu}: must be within 576 and 65520 bytes")

    @property
    def pool(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(self.pool_cidr)

    @property
    def exceptions(self) -> tuple[ipaddress.IPv4Network, ...]:
        return tuple(ipaddress.IPv4Network(entry) for entry in self.always_allow)
