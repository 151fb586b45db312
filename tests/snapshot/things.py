"""Manifests and layers for tests."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from aenv.snapshot.manifest import LayerRef, Manifest, Volume
from aenv.snapshot.repository import Repository
from aenv.snapshot.shared import file_digest
from aenv.vmm.protocol import Accelerator, Fingerprint, MachineShape

FINGERPRINT = Fingerprint("qemu", "10.0.2", Accelerator.TCG, "max", "microvm", "ab" * 32)
WHEN = datetime(2030, 1, 1, tzinfo=UTC)


def make_file(path: Path, content: bytes | int) -> LayerRef:
    """A file of that content, or of that many random bytes, and what it is as a layer."""
    path.write_bytes(os.urandom(content) if isinstance(content, int) else content)
    return LayerRef(file_digest(path), path.stat().st_size)


def manifest(
    snapshot_id: str,
    disk: Sequence[LayerRef],
    memory: Sequence[LayerRef] = (),
    state: LayerRef | None = None,
    created_at: datetime = WHEN,
) -> Manifest:
    return Manifest(
        id=snapshot_id,
        created_at=created_at,
        parent=None,
        disk=Volume(4 << 30, tuple(disk)),
        memory=Volume(512 << 20, tuple(memory)) if state else None,
        state=state,
        shape=MachineShape(1, 512),
        disk_mib=4096,
        fingerprint=FINGERPRINT,
        guest_token="token",
        attributes={"env_vars": {"A": "é"}, "start_cmd": None},
    )


def commit_files(repository: Repository, snapshot_id: str, files: Sequence[Path], owner: str = "node") -> Manifest:
    """What a node does: claim, store, commit, release."""
    refs = [LayerRef(file_digest(path), path.stat().st_size) for path in files]
    value = manifest(snapshot_id, refs)
    with repository.claim(value.digests(), owner) as claim:
        for ref, path in zip(refs, files, strict=True):
            repository.put_layer(path, ref.digest)
        repository.commit(value, claim=claim)
    return value
