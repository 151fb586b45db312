"""A lab of real namespaces and packets: guests behind their slots' taps, a server that stands for the internet.

Nothing leaves the machine: the "internet" is a namespace behind a veth pair.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from aenv.network import namespace
from aenv.network.addressing import GUEST_PREFIX_LENGTH
from aenv.network.pool import SlotPool
from aenv.network.settings import NetworkSettings
from aenv.network.slot import NetworkSlot

T = TypeVar("T")
SERVER = "198.51.100.10"
"""The internet (TEST-NET-2)."""
SERVER_GATEWAY = "198.51.100.1"
"""The host's own, public-looking address on that link."""
PRIVATE_SERVER = "10.99.99.10"
PORT = 7000
TIMEOUT = 5.0
"""Seconds for what must work, on a busy machine too."""
DROPPED = 0.4
"""Seconds of silence after which a packet counts as dropped."""
_serial = itertools.count(os.getpid() % 1000 * 10)


def sh(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def in_namespace(name: str, work: Callable[[], T]) -> T:
    """Run work in a thread that lives in the namespace and ends there."""

    def job() -> T:
        home = namespace.HomeNamespace()
        try:
            with namespace.entered(home, name):
                return work()
        finally:
            home.close()

    with ThreadPoolExecutor(1) as executor:
        return executor.submit(job).result()


def open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH22x", name.encode(), 0x0002 | 0x1000))
    os.set_blocking(fd, False)
    return fd


def pings(netns: str, address: str, timeout: float = TIMEOUT) -> bool:
    """Whether one ICMP echo request from the namespace is answered."""
    with in_namespace(netns, lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)) as icmp:
        icmp.settimeout(timeout)
        with contextlib.suppress(OSError):
            icmp.sendto(bytes.fromhex("0800f7fd00020000"), (address, 0))  # id 2, sequence 0, checksum
            return any(icmp.recv(256)[20] == 0 for _ in range(2))  # type 0: echo reply
    return False


class Echo:
    """A TCP and UDP echo server in a namespace ('' is the root); remembers the peers it saw."""

    def __init__(self, netns: str, address: str, port: int = PORT) -> None:
        def open_sockets() -> tuple[socket.socket, socket.socket]:
            tcp = socket.create_server((address, port))
            udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            udp.bind((address, port))
            return tcp, udp

        self.tcp, self.udp = in_namespace(netns, open_sockets) if netns else open_sockets()
        self.peers: list[str] = []
        self._stop = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        connections: list[socket.socket] = []
        while not self._stop:
            for ready in select.select([self.tcp, self.udp, *connections], [], [], 0.02)[0]:
                if ready is self.tcp:
                    connection, peer = self.tcp.accept()
                    self.peers.append(peer[0])
                    connections.append(connection)
                elif ready is self.udp:
                    data, peer = self.udp.recvfrom(2048)
                    self.peers.append(peer[0])
                    self.udp.sendto(data, peer)
                else:
                    data = b""
                    with contextlib.suppress(OSError):
                        data = ready.recv(2048)
                    if data:
                        ready.sendall(data)
                    else:
                        connections.remove(ready)
                        ready.close()
        for connection in connections:
            connection.close()

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        self.tcp.close()
        self.udp.close()


class Guest:
    """Stands for a virtual machine: a namespace whose `eth0` is a tap, its frames carried to and from `tap0`."""

    def __init__(self, slot: NetworkSlot) -> None:
        self.slot = slot
        self.netns = f"guest-{slot.netns}"
        sh(f"ip netns add {self.netns}")
        self._vmm_fd = in_namespace(slot.netns, lambda: open_tap(slot.tap))
        self._eth_fd = in_namespace(self.netns, lambda: open_tap("eth0"))
        self.run(
            f"ip link set lo up; ip link set eth0 address {slot.guest_mac} up;"
            f"ip addr add {slot.guest_address}/{GUEST_PREFIX_LENGTH} dev eth0;"
            f"ip route add default via {slot.gateway_address}"
        )
        self._stop = False
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self._thread.start()

    def run(self, command: str) -> str:
        return sh(f"ip netns exec {self.netns} sh -ec '{command}'")

    def _carry(self) -> None:
        other = {self._vmm_fd: self._eth_fd, self._eth_fd: self._vmm_fd}
        while not self._stop:
            for fd in select.select(list(other), [], [], 0.02)[0]:
                with contextlib.suppress(OSError):
                    os.write(other[fd], os.read(fd, 65536))

    def tcp(self, address: str, port: int = PORT, timeout: float = TIMEOUT) -> socket.socket:
        """A TCP connection from the guest. Raises OSError (TimeoutError when dropped)."""
        return in_namespace(self.netns, lambda: socket.create_connection((address, port), timeout))

    def reaches(self, address: str, port: int = PORT) -> bool:
        """Whether both a TCP and a UDP echo work."""
        return self._tcp_echo(address, port, TIMEOUT) and self.udp_echo(address, port, TIMEOUT)

    def is_cut_off(self, address: str, port: int = PORT) -> bool:
        """Whether neither a TCP nor a UDP echo works."""
        return not self._tcp_echo(address, port, DROPPED) and not self.udp_echo(address, port, DROPPED)

    def _tcp_echo(self, address: str, port: int, timeout: float) -> bool:
        try:
            with self.tcp(address, port, timeout) as connection:
                connection.sendall(b"tcp")
                return connection.recv(16) == b"tcp"
        except OSError:
            return False

    def udp_echo(self, address: str, port: int, timeout: float, source: str = "") -> bool:
        def work() -> socket.socket:
            return socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

        with in_namespace(self.netns, work) as udp:
            udp.settimeout(timeout)
            try:
                udp.bind((source, 0))
                udp.sendto(b"udp", (address, port))
                return udp.recv(16) == b"udp"
            except OSError:
                return False

    def close(self) -> None:
        self._stop = True
        self._thread.join()
        os.close(self._vmm_fd)
        os.close(self._eth_fd)
        sh(f"ip netns del {self.netns}")


class Lab:
    """The internet, guests and pools of one test; everything goes when the test ends."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.number = next(_serial)
        self.uplink = f"tin{self.number}"
        self.internet = f"internet{self.number}"
        self.stack = contextlib.ExitStack()
        self.pools: list[SlotPool] = []

    def open(self) -> None:
        self.stack.callback(sh, f"ip netns del {self.internet}")
        sh(f"ip netns add {self.internet}")
        sh(f"ip link add {self.uplink} type veth peer name eth0 netns {self.internet}")
        self.stack.callback(sh, f"ip link del {self.uplink}")
        sh(f"ip addr add {SERVER_GATEWAY}/24 dev {self.uplink}; ip link set {self.uplink} up")
        sh(f"ip route add {PRIVATE_SERVER}/32 via {SERVER} dev {self.uplink}")
        inside = f"ip netns exec {self.internet} "
        sh(f"{inside} ip addr add {SERVER}/24 dev eth0; {inside} ip addr add {PRIVATE_SERVER}/32 dev eth0")
        sh(f"{inside} ip link set eth0 up; {inside} ip link set lo up")

    def settings(self, letter: str = "a", always_allow: tuple[str, ...] = (), size: int = 24) -> NetworkSettings:
        third = self.number % 100 * 2 + (letter != "a")
        return NetworkSettings(
            prefix=f"t{letter}{self.number}",
            pool_cidr=f"10.249.{third}.0/{size}",
            always_allow=always_allow,
            uplinks=(self.uplink,),
            runtime_dir=self.runtime_dir,
        )

    def pool(self, settings: NetworkSettings | None = None, warm: int = 0) -> SlotPool:
        pool = SlotPool(settings or self.settings(), warm)
        self.pools.append(pool)
        return pool

    def guest(self, slot: NetworkSlot) -> Guest:
        guest = Guest(slot)
        self.stack.callback(guest.close)
        return guest

    def echo(self, netns: str, address: str, port: int = PORT) -> Echo:
        echo = Echo(netns, address, port)
        self.stack.callback(echo.close)
        return echo

    async def close(self) -> None:
        self.stack.close()
        for pool in self.pools:
            for index in list(pool._active):
                await pool.release(pool._active[index])
            await pool.close(remove_root_table=True)
