"""Fixtures: a lab of real namespaces for one test, and what its pools leave on the machine."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from tests.network.lab import Lab, sh


@pytest_asyncio.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    if os.geteuid() != 0:
        pytest.skip("needs root: makes network namespaces")
    lab = Lab(tmp_path)
    try:
        lab.open()
        yield lab
    finally:
        await lab.close()


@pytest.fixture
def footprint(lab: Lab) -> Callable[[], tuple[str, ...]]:
    """What this lab's pools left on the machine: its links, namespaces, tables and forwarding."""

    def measure() -> tuple[str, ...]:
        marks = (f"ta{lab.number}", f"tb{lab.number}")
        everything = sh("ip -br link; ls /run/netns; nft list tables ip; grep netns /proc/self/mountinfo; true")
        forwarding = Path(f"/proc/sys/net/ipv4/conf/{lab.uplink}/forwarding").read_text().strip()
        return (
            *(line for line in everything.splitlines() if any(mark in line for mark in marks)),
            forwarding,
        )

    return measure
