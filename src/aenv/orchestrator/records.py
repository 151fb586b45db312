"""New records: sandboxes as they are before they start, and their disk layers. No I/O."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from aenv.orchestrator import catalog, repeats
from aenv.orchestrator.model import Sandbox, SandboxSpec, SandboxState, SavedSnapshot, Template
from aenv.snapshot.model import DiskLayer, Snapshot

_ID_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789"
_ID_LENGTH = 20  # as E2B's: lower case, so that it is a DNS label

Origin = Template | SavedSnapshot


@dataclass(frozen=True, slots=True)
class ImageOrigin:
    """What a sandbox that boots an image takes from it and from its machine. Sizes are MiB."""

    id: str  # the reference, as it was written
    vcpus: int
    memory_mib: int
    disk_mib: int
    envd_version: str
    env_vars: Mapping[str, str]
    default_user: str
    default_workdir: str | None
    boot_arguments: tuple[str, ...] = ()


def new_sandbox_id() -> str:
    return "i" + "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH - 1))


def new_layer(parent: str) -> DiskLayer:
    return DiskLayer(id=secrets.token_hex(10), parent=parent, format="qcow2")


def new_token() -> str:
    return secrets.token_urlsafe(32)


@dataclass(frozen=True, slots=True)
class Child:
    """A sandbox that is to be started, and its empty disk layer."""

    sandbox: Sandbox
    layer: DiskLayer


def on_new_layer(sandbox: Sandbox, snapshot: Snapshot) -> Child:
    layer = new_layer(snapshot.disk)
    return Child(replace(sandbox, disk=layer.id), layer)


def _alias(origin: Origin | ImageOrigin) -> str | None:
    if isinstance(origin, Template):
        return origin.aliases[0] if origin.aliases else None
    if isinstance(origin, ImageOrigin):
        return None
    return None if origin.name is None else catalog.written(origin.name, origin.tag)


def created(spec: SandboxSpec, origin: Origin | ImageOrigin, snapshot: Snapshot, now: datetime) -> Child:
    """What ``spec`` asks for, from a template, a saved snapshot or an image."""
    sandbox = Sandbox(
        id=new_sandbox_id(),
        template_id=origin.id,
        template_alias=_alias(origin),
        state=SandboxState.STARTING,
        started_at=now,
        end_at=now + timedelta(seconds=spec.timeout),
        timeout=spec.timeout,
        auto_pause=spec.auto_pause,
        auto_resume=spec.auto_resume,
        metadata=dict(spec.metadata),
        env_vars={**origin.env_vars, **spec.env_vars},
        envd_access_token=new_token() if spec.secure else None,
        traffic_access_token=None if spec.allow_public_traffic else new_token(),
        egress=spec.egress,
        vcpus=origin.vcpus,
        memory_mib=origin.memory_mib,
        disk_mib=origin.disk_mib,
        envd_version=origin.envd_version,
        snapshot_id=snapshot.id,
        auto_pause_memory=spec.auto_pause_memory,
        default_user=origin.default_user,
        default_workdir=origin.default_workdir,
        host_mask=spec.host_mask,
        request=repeats.marker(spec),
        boot_arguments=origin.boot_arguments if isinstance(origin, ImageOrigin) else (),
    )
    return on_new_layer(sandbox, snapshot)


def forked(parent: Sandbox, snapshot: Snapshot, timeout: int | None, now: datetime) -> Child:
    """A child with its parent's past and settings, and tokens of its own."""
    lifetime = parent.timeout if timeout is None else timeout
    sandbox = replace(
        parent,
        id=new_sandbox_id(),
        state=SandboxState.STARTING,
        started_at=now,
        end_at=now + timedelta(seconds=lifetime),
        timeout=lifetime,
        envd_access_token=new_token() if parent.envd_access_token else None,
        traffic_access_token=new_token() if parent.traffic_access_token else None,
        parent_id=parent.id,
        snapshot_id=snapshot.id,
        captured_id=None,
        vm_id=None,
        slot=None,
        memory_base=None,
        memory_kept=True,
        request=None,
    )
    return on_new_layer(sandbox, snapshot)


def rolled_back(sandbox: Sandbox, snapshot: Snapshot) -> Sandbox:
    """Paused again in ``snapshot``, its own; the disk layer written since is garbage."""
    return replace(
        sandbox,
        state=SandboxState.PAUSED,
        disk=snapshot.disk,
        captured_id=None,
        vm_id=None,
        slot=None,
        memory_base=None,
        memory_kept=snapshot.has_memory,
    )
