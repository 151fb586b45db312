"""Which destinations a sandbox may reach. Pure: policy -> networks, decisions and nft text; no I/O.

Order of precedence, as in E2B with the platform's protection in front:

1. protected ranges (host, other guests, private, link-local, …) are dropped, whatever the sandbox asks for;
   only the operator's `always_allow` takes networks out of them;
2. `allow_out` is accepted;
3. `deny_out`, and everything when `allow_internet` is false, is dropped;
4. the rest is accepted.

The host's own addresses need not be private; the root namespace's rules (`ruleset.root_ruleset`) cover them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network, collapse_addresses, ip_network

from aenv.network.errors import InvalidPolicy

EVERYTHING = IPv4Network("0.0.0.0/0")

PROTECTED_RANGES = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",  # this network (RFC 791)
        "10.0.0.0/8",  # private (RFC 1918)
        "100.64.0.0/10",  # carrier-grade NAT (RFC 6598); cloud metadata of some providers
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local (RFC 3927); cloud metadata, and the guest's own link
        "172.16.0.0/12",  # private (RFC 1918)
        "192.0.0.0/24",  # IETF protocol assignments (RFC 6890)
        "192.168.0.0/16",  # private (RFC 1918)
        "198.18.0.0/15",  # benchmarking (RFC 2544)
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and the limited broadcast address
    )
)
"""Special-purpose ranges of the IANA registry that can lead somewhere inside the operator's network.
The documentation ranges (TEST-NET) are not among them: they lead nowhere."""


@dataclass(frozen=True)
class EgressPolicy:
    """What a sandbox asked for; entries are IPv4 networks or single addresses.

    Raises InvalidPolicy for anything else. IPv6 is off in every sandbox: denying an IPv6 network is therefore
    accepted and already true, allowing one is an error.
    """

    allow_internet: bool = True
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.allowed_networks()
        self.denied_networks()

    def allowed_networks(self) -> list[IPv4Network]:
        """Disjoint, sorted networks of `allow_out`."""
        networks = []
        for entry in self.allow_out:
            network = _parse(entry)
            if isinstance(network, IPv6Network):
                raise InvalidPolicy(f"allow_out {entry!r}: sandboxes have no IPv6; name an IPv4 network")
            networks.append(network)
        return list(collapse_addresses(networks))

    def denied_networks(self) -> list[IPv4Network]:
        """Disjoint, sorted networks of `deny_out`, or everything when the internet is not allowed."""
        if not self.allow_internet:
            return [EVERYTHING]
        networks = [_parse(entry) for entry in self.deny_out]
        return list(collapse_addresses(network for network in networks if isinstance(network, IPv4Network)))


DEFAULT_POLICY = EgressPolicy()


def _parse(entry: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(entry.strip(), strict=False)
    except ValueError as error:
        raise InvalidPolicy(
            f"{entry!r} is not an IP address or network: write 203.0.113.7 or 203.0.113.0/24 "
            "(domain names cannot be filtered by address; resolve them first)"
        ) from error


def protected_networks(pool: IPv4Network, exceptions: Iterable[IPv4Network]) -> list[IPv4Network]:
    """Disjoint, sorted networks no sandbox reaches: the protected ranges and the slots' pool, less the exceptions."""
    remaining = list(collapse_addresses((*PROTECTED_RANGES, pool)))
    for exception in exceptions:
        remaining = [piece for network in remaining for piece in _without(network, exception)]
    return sorted(remaining)


def _without(network: IPv4Network, hole: IPv4Network) -> Iterable[IPv4Network]:
    if not network.overlaps(hole):
        return (network,)
    if network.subnet_of(hole):
        return ()
    return network.address_exclude(hole)


def permits(policy: EgressPolicy, protected: Iterable[IPv4Network], destination: IPv4Address) -> bool:
    """The decision the kernel takes for a destination that is not an address of the host."""

    def within(networks: Iterable[IPv4Network]) -> bool:
        return any(destination in network for network in networks)

    if within(protected):
        return False
    return within(policy.allowed_networks()) or not within(policy.denied_networks())


def elements(networks: Iterable[IPv4Network]) -> str:
    """nft text of set elements; empty for no networks (nft has no syntax for an empty list)."""
    return ", ".join(str(network) for network in networks)


def render_update(table: str, policy: EgressPolicy) -> str:
    """nft text that replaces a slot's policy; one transaction, so no packet meets half of it.

    Connections that the guest opened under the old policy are judged by the new one from the next packet on.
    """
    lines = []
    for name, networks in (("allow", policy.allowed_networks()), ("deny", policy.denied_networks())):
        lines.append(f"flush set ip {table} {name}")
        if networks:
            lines.append(f"add element ip {table} {name} {{ {elements(networks)} }}")
    return "\n".join(lines) + "\n"
