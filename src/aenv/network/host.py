"""Builds and removes slots: the netlink work, done by the one thread that made the object."""

from __future__ import annotations

import contextlib
import errno
import logging
import secrets
from collections.abc import Collection, Iterator
from ipaddress import IPv4Address, IPv4Network
from typing import Any

from pyroute2 import IPRoute, NetlinkError

from aenv.network import addressing, conntrack, namespace, nftables, ruleset
from aenv.network.errors import NetworkConflict, NetworkUnavailable
from aenv.network.policy import EgressPolicy, render_update
from aenv.network.settings import NetworkSettings
from aenv.network.slot import NetworkSlot

log = logging.getLogger(__name__)

_NUD_PERMANENT = 0x80
_TABLE_MAIN = 254


@contextlib.contextmanager
def _tolerating(code: int) -> Iterator[None]:
    try:
        yield
    except NetlinkError as error:
        if error.code != code:
            raise


class HostNetwork:
    """One netlink socket of the root namespace and what it does for slots. Not shared between threads."""

    def __init__(self, settings: NetworkSettings) -> None:
        self.settings = settings
        self._home = namespace.HomeNamespace()
        self._root: Any = IPRoute()

    def close(self) -> None:
        self._root.close()
        self._home.close()

    @contextlib.contextmanager
    def job(self) -> Iterator[None]:
        """Surrounds each piece of work: starts in the root namespace, translates a missing privilege."""
        try:
            self._home.return_home()
            yield
        except (OSError, NetlinkError) as error:
            code = error.code if isinstance(error, NetlinkError) else error.errno
            if code in (errno.EPERM, errno.EACCES):
                raise NetworkUnavailable(
                    f"no permission ({error}): the node needs root, or CAP_NET_ADMIN and CAP_SYS_ADMIN"
                ) from error
            raise

    # Slots

    def create(self, index: int) -> NetworkSlot:
        """Make the slot with the default policy. On failure nothing of it remains."""
        slot = addressing.slot_at(self.settings, index)
        peer = addressing.peer_address(self.settings, index)
        try:
            with namespace.created(self._home, slot.netns):
                self._furnish(slot, peer)
            link = namespace.interface_index(slot.netns)
            self._root.addr("add", index=link, address=str(peer), prefixlen=addressing.VETH_PREFIX_LENGTH)
            namespace.write_sysctl(f"ipv4/conf/{slot.netns}/forwarding", 1)
            namespace.write_sysctl(f"ipv6/conf/{slot.netns}/disable_ipv6", 1)
            self._root.link("set", index=link, state="up")
        except NetworkConflict:
            raise
        except BaseException:
            self.destroy([index])
            raise
        return slot

    def _furnish(self, slot: NetworkSlot, peer: IPv4Address) -> None:
        """Everything inside the namespace, rules before links come up."""
        settings = self.settings
        namespace.write_sysctl("ipv4/ip_forward", 1)
        for scope in ("all", "default"):
            namespace.write_sysctl(f"ipv6/conf/{scope}/disable_ipv6", 1)
        own = IPv4Address(slot.host_address)
        nftables.apply(ruleset.slot_ruleset(own, peer, settings.pool, settings.exceptions))
        namespace.create_tap(slot.tap)
        inner: Any = IPRoute()
        try:
            inner.link(
                "add",
                ifname=addressing.UPLINK,
                kind="veth",
                mtu=settings.mtu,
                num_tx_queues=1,  # else one per processor of the host; the tap has one, too
                num_rx_queues=1,
                peer={
                    "ifname": slot.netns,
                    "net_ns_fd": self._home.fd,
                    "mtu": settings.mtu,
                    "num_tx_queues": 1,
                    "num_rx_queues": 1,
                },
            )
            uplink, tap = (namespace.interface_index(name) for name in (addressing.UPLINK, slot.tap))
            inner.addr("add", index=uplink, address=slot.host_address, prefixlen=addressing.VETH_PREFIX_LENGTH)
            inner.addr("add", index=tap, address=slot.gateway_address, prefixlen=addressing.GUEST_PREFIX_LENGTH)
            inner.link("set", index=1, state="up")
            inner.link("set", index=uplink, state="up")
            inner.link("set", index=tap, address=addressing.GATEWAY_MAC, mtu=settings.mtu, state="up")
            # Known beforehand: the first packet to a restored guest need not wait for it to answer ARP.
            inner.neigh("add", dst=slot.guest_address, lladdr=slot.guest_mac, ifindex=tap, state=_NUD_PERMANENT)
            inner.route("add", dst="0.0.0.0/0", gateway=str(peer))
        finally:
            inner.close()

    def destroy(self, indexes: Collection[int]) -> dict[int, Exception]:
        """Remove what exists of slots, cutting their traffic first. Returns what could not be removed, and why.

        Removing a link waits for the kernel's grace periods (15-30 ms), for many links at once as long as for one.
        """
        slots = [addressing.slot_at(self.settings, index) for index in indexes]
        links = [link for slot in slots if (link := namespace.interface_index(slot.netns)) is not None]
        # Not left to the end of the namespace: a virtual machine that still runs in it would keep it alive.
        self._delete_links(links)
        failures: dict[int, Exception] = {}
        for slot in slots:
            try:
                namespace.remove(slot.netns)
                conntrack.forget(IPv4Address(slot.host_address))
                if namespace.interface_index(slot.netns) is not None:
                    raise OSError(errno.EBUSY, f"link {slot.netns} is still there")
            except OSError as error:
                failures[slot.index] = error
        return failures

    def _delete_links(self, links: list[int]) -> None:
        if len(links) > 1:
            group = 1 + secrets.randbelow(2**31 - 1)
            for link in links:
                with _tolerating(errno.ENODEV):
                    self._root.link("set", index=link, group=group)
            with _tolerating(errno.ENODEV):
                self._root.link("del", group=group)
        elif links:
            with _tolerating(errno.ENODEV):
                self._root.link("del", index=links[0])

    def apply_policy(self, slot: NetworkSlot, policy: EgressPolicy) -> None:
        with namespace.entered(self._home, slot.netns):
            nftables.apply(render_update(ruleset.SLOT_TABLE, policy))

    def existing(self) -> set[int]:
        """Indexes of which anything exists, as a namespace's name or as a link."""
        found = set(namespace.names())
        found.update(link.get_attr("IFLA_IFNAME") for link in self._root.get_links())
        indexes = (addressing.slot_index(self.settings, name) for name in found)
        limit = addressing.capacity(self.settings)
        return {index for index in indexes if index is not None and index < limit}

    # Root namespace

    def check_pool(self) -> None:
        """Raises NetworkConflict when the pool's addresses are already used by something else on this host."""
        pool = self.settings.pool
        for route in self._root.get_routes(family=2):
            destination, oif = route.get_attr("RTA_DST"), route.get_attr("RTA_OIF")
            if destination is None or not IPv4Network(f"{destination}/{route['dst_len']}").subnet_of(pool):
                continue
            name = self._link_name(oif)
            if addressing.slot_index(self.settings, name) is None:
                raise NetworkConflict(
                    f"pool {pool} overlaps {destination}/{route['dst_len']} on {name}: "
                    "choose another slot_cidr (each node of a machine needs its own)"
                )

    def install_root_table(self) -> None:
        """Install or refresh the root table and the forwarding of the uplinks it needs."""
        uplinks = self.settings.uplinks or self._default_route_links()
        claimed = self._claims(ruleset.ROOT_TABLE_PREFIX)
        opened = {
            name for name in uplinks if name in claimed or not namespace.read_sysctl(f"ipv4/conf/{name}/forwarding")
        }
        settings = self.settings
        nftables.apply(ruleset.root_ruleset(settings.prefix, settings.pool, settings.exceptions, opened))
        # After the rules: the host must not route for anybody else, not even for a moment.
        for name in sorted(opened):
            namespace.write_sysctl(f"ipv4/conf/{name}/forwarding", 1)
        if not uplinks:
            log.warning("no default route: sandboxes reach nothing outside this host (network.uplinks names one)")

    def remove_root_table(self) -> None:
        """Undo `install_root_table`, except for uplinks that another node on this machine needs too."""
        table = ruleset.root_table(self.settings.prefix)
        for name in nftables.set_elements(table, "opened"):
            if name not in self._claims(ruleset.ROOT_TABLE_PREFIX, besides=table):
                namespace.write_sysctl(f"ipv4/conf/{name}/forwarding", 0)
        nftables.apply(ruleset.remove_table(table))

    @staticmethod
    def _claims(prefix: str, besides: str = "") -> set[str]:
        tables = [table for table in nftables.tables() if table.startswith(prefix) and table != besides]
        return {name for table in tables for name in nftables.set_elements(table, "opened")}

    def _default_route_links(self) -> tuple[str, ...]:
        routes = self._root.get_default_routes(family=2, table=_TABLE_MAIN)
        indexes = {route.get_attr("RTA_OIF") for route in routes} - {None}
        return tuple(sorted(self._link_name(index) for index in indexes))

    def _link_name(self, index: int | None) -> str:
        links = self._root.get_links(index) if index else []
        return str(links[0].get_attr("IFLA_IFNAME")) if links else "no link"
