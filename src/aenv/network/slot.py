"""What a sandbox gets: a network namespace with a tap, reachable from the host at one address."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

NETNS_DIR = Path("/run/netns")
"""Where iproute2 keeps named namespaces, so that `ip netns exec <slot.netns> …` works on ours."""


@dataclass(frozen=True)
class NetworkSlot:
    """One slot. Equal for the same index and settings, so it can be rebuilt from a journalled index."""

    index: int
    netns: str
    """Name of the namespace (and of the host's end of its veth pair), `<prefix>-<index>`."""
    tap: str
    """Tap device inside the namespace; persistent, one queue, virtio-net header capable."""
    host_address: str
    """IPv4 address at which processes of the host reach every TCP and UDP port of the guest."""
    guest_address: str
    """The guest's address; the same in every slot, so that a snapshot restores into any of them."""
    gateway_address: str
    guest_mac: str

    @property
    def netns_path(self) -> Path:
        """File to `setns` to; a VMM must open the tap from inside this namespace."""
        return NETNS_DIR / self.netns
