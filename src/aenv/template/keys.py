"""Keys of cached layers: digests of everything that a layer's contents follow from. Pure.

A step's key is a digest of its parent's key and of the step, so a change in one step changes every key after it.
Memory and CPUs are not in it: a layer that was made with other ones is booted from its disk.
"""

import hashlib
import json
from dataclasses import asdict

from aenv.template.steps import Step
from aenv.vmm.protocol import Fingerprint, MachineShape

VERSION = 1  # raise it when the engine makes something else of the same step


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps([VERSION, *parts], sort_keys=True, default=str).encode()).hexdigest()


def of_image(identity: str, disk_mib: int) -> str:
    """The key of an image's root filesystem; ``identity`` changes with the image's contents."""
    return _digest("image", identity, disk_mib)


def of_snapshot(snapshot_id: str) -> str:
    """The key of another template's build."""
    return _digest("snapshot", snapshot_id)


def of_dockerfile(origin: str) -> str:
    """The key of what a Dockerfile's steps begin with: they run as other users than an SDK's."""
    return _digest("dockerfile", origin)


def of_step(parent: str, step: Step) -> str:
    return _digest("step", parent, type(step.action).__name__, asdict(step.action))


def of_boot(parent: str, shape: MachineShape, fingerprint: Fingerprint, initramfs_sha256: str) -> str:
    """The key of a machine that was booted from a layer's disk."""
    return _digest("boot", parent, asdict(shape), asdict(fingerprint), initramfs_sha256)


def of_final(
    parent: str,
    shape: MachineShape,
    fingerprint: Fingerprint,
    initramfs_sha256: str,
    start: str,
    ready: str,
    min_free_mib: int,
) -> str:
    """The key of a finished build: of the machine whose start command has been run."""
    return _digest("final", parent, asdict(shape), asdict(fingerprint), initramfs_sha256, start, ready, min_free_mib)
