"""Names of what layers make of each other, by which conversions are shared. Pure.

An image's layers, from the bottom up, are a chain; each beginning of it is a file system, which every image that
begins alike has too. The OCI image-spec (``config.md``, "ChainID") names them by the digests of the layers'
uncompressed bytes; here also the disk's size and this program's way of converting are in the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from aenv.image.prepare import VERSION as PREPARED

CONVERTED = 1
"""Raise it when a change makes another file system of the same layers: conversions are cached under it."""
DRIVES = 1
"""The same for what makes a drive."""
MAX_STEPS = 200
"""Layers of a stack (255 are possible) that an image's layers become, one each; further ones go into the last."""


def steps(ids: Sequence[str]) -> list[tuple[str, range]]:
    """Chain ids of the file systems to be made, and which layers each adds to the one before it."""
    found: list[tuple[str, range]] = []
    chain = ""
    for number, each in enumerate(ids):
        chain = _hash(f"{chain} {each}") if chain else each
        if number < MAX_STEPS:
            found.append((chain, range(number, number + 1)))
        else:
            found[-1] = (chain, range(found[-1][1].start, number + 1))
    return found


def layer_id(diff_id: str | None, digest: str, *, whiteouts: bool = True) -> str:
    """What stands for a layer in a chain: only what is verified, whatever its image says about it.

    ``digest`` is that of the stored bytes.
    """
    if not whiteouts:
        return _hash(f"no whiteouts {digest}")
    return diff_id if diff_id is not None and diff_id.startswith("sha256:") else digest


def blank_key(size_mib: int) -> str:
    """Of the file system with nothing in it."""
    return f"blank-{size_mib}-c{CONVERTED}"


def chain_key(chain: str, size_mib: int) -> str:
    return f"{chain.partition(':')[2]}-{size_mib}-c{CONVERTED}"


def prepared_key(chain: str, size_mib: int, user: str, path: str) -> str:
    """Of a chain's file system with what the platform adds for an image with this User and PATH."""
    name = _hash(f"{chain}\0{user}\0{path}").partition(":")[2]
    return f"{name}-{size_mib}-c{CONVERTED}-p{PREPARED}"


def attached_key(below: str, chain: str, size_mib: int, path: str, folder: str) -> str:
    """Of a file system, whose topmost layer has the digest ``below``, with a drive in it."""
    name = _hash(f"{below}\0{chain}\0{path}\0{folder}").partition(":")[2]
    return f"{name}-{size_mib}-c{CONVERTED}-d{DRIVES}"


def _hash(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"
