"""Pure arithmetic: slot index <-> names and addresses."""

from __future__ import annotations

from ipaddress import IPv4Address

from aenv.network.settings import NetworkSettings
from aenv.network.slot import NetworkSlot

TAP = "tap0"
UPLINK = "uplink"
"""The namespace's end of the veth pair."""
GUEST_ADDRESS = "169.254.0.21"
GATEWAY_ADDRESS = "169.254.0.22"
GUEST_PREFIX_LENGTH = 30
GUEST_MAC = "02:fc:00:00:00:05"
GATEWAY_MAC = "02:fc:00:00:00:06"
"""Of the tap: constant as well, so that the neighbour cache inside a snapshot is right in every slot."""
VETH_PREFIX_LENGTH = 31
"""RFC 3021 point-to-point: two addresses per slot and no broadcast address, so a /16 holds 32768 slots."""


def capacity(settings: NetworkSettings) -> int:
    """How many slots the pool can hold."""
    return settings.pool.num_addresses // 2


def slot_name(settings: NetworkSettings, index: int) -> str:
    return f"{settings.prefix}-{index}"


def slot_index(settings: NetworkSettings, name: str) -> int | None:
    """The index in a name that `slot_name` made; None for any other name (such as another prefix's)."""
    prefix, separator, digits = name.partition("-")
    if prefix != settings.prefix or not separator or not (digits.isascii() and digits.isdecimal()):
        return None
    index = int(digits)
    return index if slot_name(settings, index) == name else None


def peer_address(settings: NetworkSettings, index: int) -> IPv4Address:
    """Address of the root namespace's end of the slot's veth: the source of the host's connections to it."""
    if not 0 <= index < capacity(settings):
        raise ValueError(f"slot index {index} is outside the pool {settings.pool_cidr}")
    return settings.pool.network_address + 2 * index


def slot_at(settings: NetworkSettings, index: int) -> NetworkSlot:
    """The slot of an index. Raises ValueError when the pool has no such index."""
    return NetworkSlot(
        index=index,
        netns=slot_name(settings, index),
        tap=TAP,
        host_address=str(peer_address(settings, index) + 1),
        guest_address=GUEST_ADDRESS,
        gateway_address=GATEWAY_ADDRESS,
        guest_mac=GUEST_MAC,
    )
