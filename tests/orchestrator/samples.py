"""Sample records for unit tests."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from aenv.orchestrator.model import Egress, Sandbox, SandboxState, Template
from aenv.snapshot.model import DiskLayer, MemoryBase, Snapshot
from aenv.vmm.protocol import Accelerator, Fingerprint, MachineShape

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FINGERPRINT = Fingerprint("qemu", "10.0.2", Accelerator.TCG, "max", "microvm", "0" * 64)


def sandbox(sandbox_id: str = "i1", **changes: Any) -> Sandbox:
    made = Sandbox(
        id=sandbox_id,
        template_id="t1",
        template_alias="base",
        state=SandboxState.RUNNING,
        started_at=NOW,
        end_at=NOW + timedelta(seconds=60),
        timeout=60,
        auto_pause=True,
        auto_resume=False,
        metadata={},
        env_vars={},
        envd_access_token=None,
        traffic_access_token=None,
        egress=Egress(),
        vcpus=1,
        memory_mib=512,
        disk_mib=4096,
        envd_version="0.6.4",
        snapshot_id="s1",
        disk="l1",
    )
    return replace(made, **changes)


def snapshot(snapshot_id: str = "s1", **changes: Any) -> Snapshot:
    made = Snapshot(
        id=snapshot_id,
        owner=None,
        memory_base="m1",
        delta_bytes=0,
        disk="l0",
        shape=MachineShape(1, 512),
        disk_mib=4096,
        fingerprint=FINGERPRINT,
        guest_token=None,
        created_at=NOW,
    )
    return replace(made, **changes)


def template(template_id: str = "t1", **changes: Any) -> Template:
    made = Template(
        id=template_id,
        build_id="b1",
        aliases=("base",),
        snapshot_id="s1",
        vcpus=1,
        memory_mib=512,
        disk_mib=4096,
        envd_version="0.6.4",
        initramfs_sha256="0" * 64,
        created_at=NOW,
        updated_at=NOW,
    )
    return replace(made, **changes)


def layer(layer_id: str, parent: str | None = None) -> DiskLayer:
    return DiskLayer(layer_id, parent, "raw" if parent is None else "qcow2")


def memory(memory_id: str) -> MemoryBase:
    return MemoryBase(memory_id, 1 << 20)
