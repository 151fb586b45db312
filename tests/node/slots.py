"""Names and addresses of network slots that nothing on this machine uses: not another run, nor what one left."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from ipaddress import IPv4Network
from itertools import count
from string import ascii_lowercase, digits

# AENV_TEST_SLOTS=PREFIX,CIDR gives a run letters (at most five) and addresses of its own, beside other runs.
_base, _, _pool = os.environ.get("AENV_TEST_SLOTS", "aenvt,10.224.0.0/12").partition(",")
POOL = IPv4Network(_pool)
NODE_BITS = 20  # addresses of one node: 2,048 slots
PRODUCT = IPv4Network("10.231.0.0/16")  # what a node uses that was told nothing

_numbers = count()
_taken: list[IPv4Network] = []


def next_prefix() -> str:
    """A prefix of interface names, at most six characters, that no other node of this run has."""
    return f"{_base[:5]}{(ascii_lowercase + digits)[next(_numbers) % 36]}"


def free_network() -> str:
    """Addresses for one more node of this run."""
    used = [*_taken, PRODUCT, *routed()]
    for network in POOL.subnets(new_prefix=max(NODE_BITS, POOL.prefixlen)):
        if not any(network.overlaps(other) for other in used):
            _taken.append(network)
            return str(network)
    raise AssertionError(f"every network of {POOL} is in use: {used}")


def release(network: str) -> None:
    """The node that had those addresses is gone."""
    with contextlib.suppress(ValueError):
        _taken.remove(IPv4Network(network))


def routed() -> Iterator[IPv4Network]:
    """Networks that this machine has routes to."""
    output = subprocess.run(["ip", "-4", "-json", "route", "show", "table", "all"], check=True, capture_output=True)
    for route in json.loads(output.stdout or b"[]"):
        if route["dst"] != "default":
            yield IPv4Network(route["dst"], strict=False)


def links(prefix: str) -> list[str]:
    """Network interfaces in this namespace that a node of that prefix made."""
    output = subprocess.run(["ip", "-json", "link", "show"], check=True, capture_output=True)
    return [link["ifname"] for link in json.loads(output.stdout) if link["ifname"].startswith(f"{prefix}-")]
