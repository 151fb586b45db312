"""nft text of the two rulesets: one table per slot's namespace, one of constant size in the root namespace. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

from aenv.network.addressing import GUEST_ADDRESS, TAP, UPLINK
from aenv.network.policy import elements, protected_networks

SLOT_TABLE = "aenv"
ROOT_TABLE_PREFIX = "aenv_net_"
"""Root tables of all nodes on this machine start so: they find each other's claims on uplinks."""


def root_table(prefix: str) -> str:
    return ROOT_TABLE_PREFIX + prefix


def _set(name: str, kind: str, content: str) -> str:
    flags = " flags interval;" if kind == "ipv4_addr" else ""
    return f"set {name} {{ type {kind};{flags}" + (f" elements = {{ {content} }}" if content else "") + " }"


def slot_ruleset(
    host_address: IPv4Address, peer: IPv4Address, pool: IPv4Network, exceptions: Iterable[IPv4Network]
) -> str:
    """The table of one slot's namespace, with the default policy.

    `host_address` and `peer` are the namespace's and the root's end of the veth pair.
    """
    protected = elements(protected_networks(pool, exceptions))
    # The policy looks at the destination of the connection's first packet (`ct original`), in both directions:
    # so a stricter policy also cuts what is already open, its replies included, and no rule needs a twin.
    # `ct status dnat` holds for connections from the host only: the guest's own are never DNATed.
    # The VMM runs in the namespace and needs no network: `output` keeps one that a guest took over inside the rules.
    # Only the peer's packets are DNATed: a late packet of a remote to this slot's previous owner is not.
    return f"""\
table ip {SLOT_TABLE} {{
  {_set("protected", "ipv4_addr", protected)}
  {_set("allow", "ipv4_addr", "")}
  {_set("deny", "ipv4_addr", "")}
  chain antispoof {{
    type filter hook prerouting priority raw; policy accept;
    iifname "{TAP}" ip saddr != {GUEST_ADDRESS} drop
  }}
  chain inbound {{
    type nat hook prerouting priority dstnat; policy accept;
    iifname "{UPLINK}" ip saddr {peer} ip daddr {host_address} meta l4proto {{ tcp, udp }} dnat to {GUEST_ADDRESS}
  }}
  chain outbound {{
    type nat hook postrouting priority srcnat; policy accept;
    oifname "{UPLINK}" snat to {host_address}
  }}
  chain input {{
    type filter hook input priority filter; policy drop;
    ct state established,related accept
    iifname "{UPLINK}" icmp type echo-request accept
  }}
  chain output {{
    type filter hook output priority filter; policy drop;
    ct state established,related accept
    oifname "{TAP}" accept
  }}
  chain forward {{
    type filter hook forward priority filter; policy drop;
    ct state invalid,untracked drop
    ct status dnat accept
    iifname "{UPLINK}" ct direction original drop
    ct original ip daddr @protected drop
    ct original ip daddr @allow accept
    ct original ip daddr @deny drop
    accept
  }}
}}
"""


def root_ruleset(prefix: str, pool: IPv4Network, exceptions: Iterable[IPv4Network], opened: Iterable[str]) -> str:
    """The table of the root namespace; replaces an earlier one in the same transaction, so no gap opens.

    `opened` are the uplinks whose forwarding is on because of AgentENV: they must not turn the host into a
    router for anything but the slots.
    """
    table, slots = root_table(prefix), f'"{prefix}-*"'
    exempt = list(exceptions)
    # The guard runs before any DNAT of the host (a container's published port, say), which would otherwise turn
    # a packet to the host into a forwarded one.
    return f"""\
table ip {table} {{ }}
delete table ip {table}
table ip {table} {{
  {_set("exceptions", "ipv4_addr", elements(exempt))}
  {_set("opened", "ifname", ", ".join(f'"{name}"' for name in sorted(opened)))}
  chain guard {{
    type filter hook prerouting priority mangle; policy accept;
    iifname {slots} jump guard_slots
  }}
  chain guard_slots {{
    ip saddr != {pool} drop
    ct state established,related ct direction reply accept
    ip daddr {pool} drop
    fib daddr type != unicast ip daddr != @exceptions drop
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname {slots} jump from_slots
    oifname {slots} jump to_slots
    iifname @opened ct state != {{ established, related }} drop
  }}
  chain from_slots {{
    oifname {slots} drop
    ct state invalid drop
    tcp flags syn tcp option maxseg size set rt mtu
    accept
  }}
  chain to_slots {{
    ct state established,related ct direction reply accept
    drop
  }}
  chain outbound {{
    type nat hook postrouting priority srcnat; policy accept;
    ip saddr {pool} oifname != {slots} masquerade
  }}
}}
"""


def remove_table(table: str) -> str:
    """nft text that removes a table and does not fail when there is none."""
    return f"table ip {table} {{ }}\ndelete table ip {table}\n"
