"""Homes of nodes in the lab, one for each hypervisor: what its tests use, and what is prepared ahead.

Imported by the lab's tests; run in the lab by ``lab.prepare``: ``python -m lab.homes``.
"""

import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from lab.settings import GUEST_CACHE

VMMS = ("qemu", "firecracker")
FIRECRACKER_BIN = "AENV_FIRECRACKER_BIN"
PORT = 8123
PATIENCE = 1800.0  # seconds, for all that a first start does


def home(vmm: str) -> Path:
    """Its node's ``$AENV_HOME``; beside the guest artefacts, so that the base image is linked and not copied."""
    return GUEST_CACHE / "homes" / f"lab-{vmm}"


def missing(vmm: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why no sandbox can run on it in this lab."""
    if vmm == "firecracker" and not environment.get(FIRECRACKER_BIN):
        return f"{FIRECRACKER_BIN} names no Firecracker binary: set it for `make lab`, which copies it into the lab"
    return None


def settings(vmm: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """A node's settings as ``AENV_*`` variables: KVM, and the patience that an emulated processor needs."""
    found = {
        "AENV_HOME": str(home(vmm)),
        "AENV_VMM": vmm,
        "AENV_ACCELERATOR": "kvm",
        "AENV_DEFAULT_VCPUS": "1",
        "AENV_START_TIMEOUT": "600",
        "AENV_BOOT_TIMEOUT": "900",
        "AENV_METRICS_INTERVAL": "0",
    }
    if vmm == "firecracker":
        found["AENV_FIRECRACKER"] = environment.get(FIRECRACKER_BIN, "")
    return found


def link_artifacts(vmm: str) -> None:
    """Let the home have the guest artefacts that are on the disk."""
    folder = home(vmm)
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "artifacts").exists():
        (folder / "artifacts").symlink_to(GUEST_CACHE / "artifacts")


def first_start(vmm: str) -> None:
    """Start a node on the home, which makes its ``base`` template, and stop it. Raises SystemExit."""
    link_artifacts(vmm)
    other = {"AENV_HOST": "127.0.0.1", "AENV_PORT": str(PORT), "AENV_WARM_VMS": "0", "AENV_WARM_SLOTS": "0"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AENV_")}
    server = subprocess.Popen(
        [Path(sys.executable).with_name("aenv-server"), "--stop-sandboxes"],
        env={**environment, **settings(vmm), **other},
    )
    deadline = time.monotonic() + PATIENCE
    while not _healthy():
        if server.poll() is not None:
            sys.exit(f"the node with {vmm} ended with status {server.returncode}")
        if time.monotonic() > deadline:
            server.kill()
            sys.exit(f"the node with {vmm} was not ready after {PATIENCE:.0f} s")
        time.sleep(1.0)
    server.terminate()
    if server.wait(PATIENCE) != 0:
        sys.exit(f"the node with {vmm} stopped with status {server.returncode}")


def _healthy() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=30) as answer:
            return bool(200 <= answer.status < 300)
    except OSError:  # of which urllib's own are
        return False


if __name__ == "__main__":
    for name in sys.argv[1:]:
        first_start(name)
