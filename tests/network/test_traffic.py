"""Real packets through real slots: who reaches whom."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from aenv.network import conntrack
from aenv.network.policy import EgressPolicy
from tests.network.lab import (
    DROPPED,
    PORT,
    PRIVATE_SERVER,
    SERVER,
    SERVER_GATEWAY,
    TIMEOUT,
    Guest,
    Lab,
    in_namespace,
    pings,
    sh,
)

pytestmark = pytest.mark.asyncio


async def start_guest(lab: Lab, always_allow: tuple[str, ...] = ()) -> Guest:
    pool = lab.pool(lab.settings(always_allow=always_allow))
    await pool.start()
    return lab.guest(await pool.acquire())


async def test_host_reaches_every_port_of_the_guest(lab: Lab) -> None:
    guest = await start_guest(lab)
    for port in (PORT, 22, 49983):
        echo = lab.echo(guest.netns, guest.slot.guest_address, port)
        with socket.create_connection((guest.slot.host_address, port), TIMEOUT) as connection:
            connection.sendall(b"hello")
            assert connection.recv(16) == b"hello"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(TIMEOUT)
            udp.sendto(b"hello", (guest.slot.host_address, port))
            assert udp.recv(16) == b"hello"
        assert len(set(echo.peers)) == 1


async def test_host_connection_works_with_the_strictest_policy(lab: Lab) -> None:
    guest = await start_guest(lab)
    await lab.pools[0].apply_policy(guest.slot, EgressPolicy(allow_internet=False, deny_out=("0.0.0.0/0",)))
    lab.echo(guest.netns, guest.slot.guest_address)
    with socket.create_connection((guest.slot.host_address, PORT), TIMEOUT) as connection:
        connection.sendall(b"x" * 1000)
        assert connection.recv(2000)


async def test_internet_is_reached_behind_the_hosts_address(lab: Lab) -> None:
    guest = await start_guest(lab)
    server = lab.echo(lab.internet, SERVER)
    assert guest.reaches(SERVER)
    assert set(server.peers) == {SERVER_GATEWAY}
    assert pings(guest.netns, SERVER)


async def test_host_services_are_out_of_reach(lab: Lab) -> None:
    guest = await start_guest(lab)
    lab.echo("", "0.0.0.0", 7001)
    peer = str(lab.settings().pool.network_address)
    for address in (SERVER_GATEWAY, peer, guest.slot.host_address, guest.slot.gateway_address, "127.0.0.1"):
        assert guest.is_cut_off(address, 7001), address
    assert not pings(guest.netns, SERVER_GATEWAY, DROPPED)


async def test_operator_may_expose_one_address_of_the_host(lab: Lab) -> None:
    guest = await start_guest(lab, always_allow=(f"{SERVER_GATEWAY}/32",))
    lab.echo("", "0.0.0.0", 7001)
    assert guest.reaches(SERVER_GATEWAY, 7001)
    assert guest.is_cut_off(str(lab.settings().pool.network_address), 7001)


async def test_guests_do_not_reach_each_other(lab: Lab) -> None:
    one = await start_guest(lab, always_allow=("10.0.0.0/10",))
    two = lab.guest(await lab.pools[0].acquire())
    lab.echo(two.netns, two.slot.guest_address)
    await lab.pools[0].apply_policy(one.slot, EgressPolicy(allow_out=("0.0.0.0/0",)))
    assert one.is_cut_off(two.slot.host_address)


async def test_guests_of_two_nodes_do_not_reach_each_other(lab: Lab) -> None:
    other = lab.settings("b")
    # Even an operator's exception does not open another node's guests: their node's own rules protect them.
    one = await start_guest(lab, always_allow=(other.pool_cidr,))
    pool = lab.pool(other)
    await pool.start()
    two = lab.guest(await pool.acquire())
    lab.echo(two.netns, two.slot.guest_address)
    assert one.is_cut_off(two.slot.host_address)
    server = lab.echo(lab.internet, SERVER)
    assert one.reaches(SERVER) and two.reaches(SERVER)
    assert set(server.peers) == {SERVER_GATEWAY}


async def test_private_ranges_are_dropped_unless_the_operator_excepts_them(lab: Lab) -> None:
    guest = await start_guest(lab)
    lab.echo(lab.internet, PRIVATE_SERVER)
    await lab.pools[0].apply_policy(guest.slot, EgressPolicy(allow_out=(PRIVATE_SERVER, "10.0.0.0/8")))
    assert guest.is_cut_off(PRIVATE_SERVER)


async def test_operators_exception_still_obeys_the_sandboxs_policy(lab: Lab) -> None:
    guest = await start_guest(lab, always_allow=(PRIVATE_SERVER,))
    lab.echo(lab.internet, PRIVATE_SERVER)
    pool = lab.pools[0]
    assert guest.reaches(PRIVATE_SERVER)
    await pool.apply_policy(guest.slot, EgressPolicy(allow_internet=False))
    assert guest.is_cut_off(PRIVATE_SERVER)
    await pool.apply_policy(guest.slot, EgressPolicy(allow_internet=False, allow_out=(PRIVATE_SERVER,)))
    assert guest.reaches(PRIVATE_SERVER)


async def test_policy_precedence(lab: Lab) -> None:
    guest = await start_guest(lab)
    lab.echo(lab.internet, SERVER)
    pool = lab.pools[0]
    for policy, reachable in (
        (EgressPolicy(allow_internet=False), False),
        (EgressPolicy(allow_internet=False, allow_out=(SERVER,)), True),
        (EgressPolicy(deny_out=("198.51.100.0/24",)), False),
        (EgressPolicy(deny_out=("198.51.100.0/24",), allow_out=("198.51.100.8/29",)), True),
        (EgressPolicy(deny_out=("203.0.113.0/24",)), True),
        (EgressPolicy(deny_out=("0.0.0.0/0",)), False),
        (EgressPolicy(), True),
    ):
        await pool.apply_policy(guest.slot, policy)
        assert guest.reaches(SERVER) if reachable else guest.is_cut_off(SERVER), policy


async def test_a_stricter_policy_cuts_open_connections(lab: Lab) -> None:
    guest = await start_guest(lab)
    lab.echo(lab.internet, SERVER)
    with guest.tcp(SERVER) as connection:
        connection.sendall(b"one")
        assert connection.recv(16) == b"one"
        await lab.pools[0].apply_policy(guest.slot, EgressPolicy(allow_internet=False))
        connection.sendall(b"two")
        connection.settimeout(DROPPED)
        with pytest.raises(TimeoutError):
            connection.recv(16)


async def test_spoofed_sources_are_dropped(lab: Lab) -> None:
    guest = await start_guest(lab)
    server = lab.echo(lab.internet, SERVER)
    guest.run("ip addr add 203.0.113.5/32 dev eth0")
    assert not guest.udp_echo(SERVER, PORT, DROPPED, source="203.0.113.5")
    assert server.peers == []
    assert guest.udp_echo(SERVER, PORT, TIMEOUT, source=guest.slot.guest_address)


async def test_ipv6_and_the_namespace_itself_are_closed(lab: Lab) -> None:
    guest = await start_guest(lab)
    lab.echo(lab.internet, SERVER)
    assert "inet6" not in sh(f"ip netns exec {guest.slot.netns} ip addr; ip addr show {guest.slot.netns}")

    def from_the_vmm() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.settimeout(DROPPED)
            sock.connect((SERVER, PORT))

    with pytest.raises(OSError):
        in_namespace(guest.slot.netns, from_the_vmm)


async def test_the_internet_cannot_open_connections_to_a_guest(lab: Lab) -> None:
    guest = await start_guest(lab)
    lab.echo(guest.netns, guest.slot.guest_address)
    sh(f"ip netns exec {lab.internet} ip route add {lab.settings().pool_cidr} via {SERVER_GATEWAY}")

    def from_outside() -> None:
        socket.create_connection((guest.slot.host_address, PORT), DROPPED).close()

    with pytest.raises(OSError):
        in_namespace(lab.internet, from_outside)


async def test_host_does_not_become_a_router(lab: Lab) -> None:
    """Forwarding on the uplink serves the slots only."""
    await start_guest(lab)
    other = f"lan{lab.number}"
    sh(f"ip netns add {other}; ip link add {other} type veth peer name eth0 netns {other}")
    try:
        sh(f"ip addr add 203.0.113.1/24 dev {other}; ip link set {other} up")
        sh(
            f"ip netns exec {other} sh -ec 'ip addr add 203.0.113.9/24 dev eth0; ip link set eth0 up; "
            f"ip route add default via 203.0.113.1'"
        )
        sh(f"ip netns exec {lab.internet} ip route add 203.0.113.0/24 via {SERVER_GATEWAY}")
        assert not pings(lab.internet, "203.0.113.9", DROPPED)
    finally:
        sh(f"ip link del {other}; ip netns del {other}")


async def test_first_packet_needs_no_arp(lab: Lab) -> None:
    guest = await start_guest(lab)
    neighbours = sh(f"ip netns exec {guest.slot.netns} ip neigh show dev tap0")
    assert f"{guest.slot.guest_address} lladdr {guest.slot.guest_mac} PERMANENT" in neighbours


@pytest.mark.parametrize("one_by_one", [False, True])
async def test_connections_of_a_released_slot_are_forgotten(
    lab: Lab, one_by_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both from and to the guest; an old kernel's way, too."""
    if one_by_one:
        monkeypatch.setattr(conntrack, "forget", conntrack.forget_one_by_one)
    guest = await start_guest(lab)
    lab.echo(lab.internet, SERVER)
    lab.echo(guest.netns, guest.slot.guest_address)
    assert guest.reaches(SERVER)
    socket.create_connection((guest.slot.host_address, PORT), TIMEOUT).close()

    def remembered() -> int:
        entries = Path("/proc/net/nf_conntrack").read_text().splitlines()
        return sum(f"={guest.slot.host_address} " in entry for entry in entries)

    assert remembered() >= 3
    await lab.pools[0].release(guest.slot)
    assert remembered() == 0


async def test_a_late_packet_of_a_remote_does_not_reach_the_guest(lab: Lab) -> None:
    """As if the root's connection table still knew a flow of the slot's previous owner."""
    guest = await start_guest(lab)
    echo = lab.echo(guest.netns, guest.slot.guest_address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.bind((SERVER_GATEWAY, 0))  # any source but the slot's peer
        udp.sendto(b"late", (guest.slot.host_address, PORT))
        udp.settimeout(DROPPED)
        with pytest.raises(OSError):
            udp.recv(16)
    assert echo.peers == []
