"""Forgets the connections of a slot that is gone.

The kernel remembers an established TCP connection for five days; a node that makes thousands of sandboxes an
hour would fill its connection table with those of dead ones.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from ipaddress import IPv4Address

from pyroute2 import NFCTSocket
from pyroute2.netlink.nfnetlink.nfctsocket import NFCTAttrTuple

_NETLINK_NETFILTER = 12
_CT_DELETE = (1 << 8) | 2  # NFNL_SUBSYS_CTNETLINK, IPCTNL_MSG_CT_DELETE
_NLM_F_REQUEST, _NLM_F_ACK, _NLA_F_NESTED = 1, 4, 0x8000
_CTA_TUPLE_ORIG, _CTA_FILTER = 1, 25
_CTA_TUPLE_IP = 1
_CTA_IP_V4_SRC, _CTA_IP_V4_DST = 1, 2
_CTA_FILTER_ORIG_FLAGS = 1
_BY_SOURCE, _BY_DESTINATION = 1, 2


def forget(address: IPv4Address) -> None:
    """Remove every connection of this namespace from or to the address.

    One request to the kernel from Linux 6.8 on; before that a dump and a removal for each. Raises OSError.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER) as channel:
            channel.bind((0, 0))
            _flush(channel, _CTA_IP_V4_SRC, _BY_SOURCE, address)
            _flush(channel, _CTA_IP_V4_DST, _BY_DESTINATION, address)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        forget_one_by_one(address)


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + bytes(-len(payload) % 4)


def _flush(channel: socket.socket, kind: int, flag: int, address: IPv4Address) -> None:
    ip = _attribute(_CTA_TUPLE_IP | _NLA_F_NESTED, _attribute(kind, address.packed))
    body = struct.pack("!BBH", socket.AF_INET, 0, 0)
    body += _attribute(_CTA_TUPLE_ORIG | _NLA_F_NESTED, ip)
    body += _attribute(_CTA_FILTER | _NLA_F_NESTED, _attribute(_CTA_FILTER_ORIG_FLAGS, struct.pack("=I", flag)))
    channel.send(struct.pack("=IHHII", 16 + len(body), _CT_DELETE, _NLM_F_REQUEST | _NLM_F_ACK, 1, 0) + body)
    # The answer is always an NLMSG_ERROR: 16 bytes of header, then the negative errno, 0 for success.
    (code,) = struct.unpack_from("=i", channel.recv(4096), 16)
    if code not in (0, -errno.ENOENT):
        raise OSError(-code, f"forget connections of {address}: {os.strerror(-code)}")


def forget_one_by_one(address: IPv4Address) -> None:
    """The same for kernels that cannot remove by a filter."""
    wanted = str(address)
    with NFCTSocket() as connections:
        found = []
        for entry in connections.dump():
            original = NFCTAttrTuple.from_netlink(socket.AF_INET, entry.get_attr("CTA_TUPLE_ORIG"))
            if wanted in (original.saddr, original.daddr):
                found.append(original)
        for original in found:
            try:
                connections.entry("del", tuple_orig=original)
            except OSError as error:
                if error.errno != errno.ENOENT:  # it may end by itself meanwhile
                    raise
