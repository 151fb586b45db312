"""Bodies of accounts, observation, secrets and volumes, with E2B's field names (``e2b-openapi.yml``)."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import Field, StrictInt, StringConstraints

from aenv.accounts.volume_files import MAX_ID
from aenv.api.schemas import Text, _Model

Label = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256)]
LevelName = Literal["debug", "info", "warn", "error"]


class Team(_Model):
    team_id: str
    name: str
    api_key: str
    is_default: bool


class Mask(_Model):
    """What is shown of a key: prefix, length of the rest, the rest's two ends."""

    prefix: str
    value_length: int
    masked_value_prefix: str
    masked_value_suffix: str


class NamedCredential(_Model):
    name: Label


class TeamApiKey(_Model):
    id: str
    name: str
    mask: Mask
    created_at: datetime
    created_by: None = None
    last_used: datetime | None = None


class CreatedTeamApiKey(TeamApiKey):
    key: str = Field(description="The whole key; it is not shown again")


class CreatedAccessToken(_Model):
    id: str
    name: str
    token: str = Field(description="The whole token; it is not shown again")
    mask: Mask
    created_at: datetime


class SandboxMetric(_Model):
    """One sample; sizes are bytes."""

    timestamp: datetime = Field(deprecated=True)
    timestamp_unix: int
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int


class SandboxesWithMetrics(_Model):
    sandboxes: dict[str, SandboxMetric]


class LogLine(_Model):
    """``line`` is a JSON object with level, logger and message, as E2B's tools expect."""

    timestamp: datetime
    line: str


class LogEntry(_Model):
    timestamp: datetime
    level: LevelName
    message: str
    fields: dict[str, str]


class SandboxLogs(_Model):
    logs: list[LogLine]
    log_entries: list[LogEntry]


class SandboxLogsV2(_Model):
    logs: list[LogEntry]


class DiskMetrics(_Model):
    mount_point: str
    device: str
    filesystem_type: str
    used_bytes: int
    total_bytes: int


class NodeMetrics(_Model):
    allocated_cpu: int = Field(serialization_alias="allocatedCPU")
    allocated_memory_bytes: int
    paused_allocated_cpu: int = Field(serialization_alias="pausedAllocatedCPU")
    paused_allocated_memory_bytes: int
    cpu_percent: int
    cpu_count: int
    memory_used_bytes: int
    memory_total_bytes: int
    huge_pages_total: int = 0
    huge_pages_used: int = 0
    huge_pages_reserved: int = 0
    huge_page_size_bytes: int = 0
    disks: list[DiskMetrics]


class MachineInfo(_Model):
    cpu_family: str
    cpu_model: str
    cpu_model_name: str
    cpu_architecture: str


class Node(_Model):
    id: str
    service_instance_id: str
    cluster_id: str
    status: Literal["ready"]
    status_changed_at: datetime
    sandbox_count: int
    sandbox_starting_count: int
    sandbox_paused_count: int
    create_successes: int
    create_fails: int
    version: str
    commit: str
    metrics: NodeMetrics
    machine_info: MachineInfo


class NodeDetail(Node):
    cached_builds: list[str] = Field(
        description="Ids of builds that sandboxes can be started from without a download"
    )


class Hypervisor(_Model):
    """What trying one hypervisor on a node has shown."""

    vmm: Literal["firecracker", "qemu"]
    accelerator: Literal["kvm", "pvm", "tcg"]
    works: bool = Field(description="Whether it booted the guest kernel")
    used: bool = Field(description="Whether the node's sandboxes run in it")
    reason: str = Field(description="What happened, a sentence")
    advice: str = Field(description="What to do about it; empty when it works")
    unconfined: list[str] = Field(
        description="What of the confinement of its processes this host does not allow; known of the one in use"
    )


SecretValue = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=64 * 1024)]
SecretMetadata = Annotated[dict[Text, Text], Field(max_length=32)]


class NewSecret(_Model):
    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_-]+$")]
    value: SecretValue
    metadata: SecretMetadata | None = None


class SecretUpdate(_Model):
    value: SecretValue
    metadata: SecretMetadata | None = None


class Secret(_Model):
    """Everything of a secret but its value, which no answer carries."""

    secret_id: str
    name: str
    current_version: int
    metadata: dict[str, str]
    created_at: datetime
    updated_at: datetime


class NewVolume(_Model):
    name: Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_-]+$")]


class Volume(_Model):
    volume_id: str
    name: str


class VolumeEntry(_Model):
    """A file or folder of a volume; sizes are bytes, ``mode`` is the permissions."""

    name: str
    type: Literal["file", "directory", "symlink", "unknown"]
    path: str
    size: int
    mode: int
    uid: int
    gid: int
    atime: datetime
    mtime: datetime
    ctime: datetime
    target: str | None = Field(None, description="Where a symbolic link leads")


class VolumeMetadata(_Model):
    """What is left out stays as it is."""

    uid: Annotated[StrictInt, Field(ge=0, le=MAX_ID)] | None = None
    gid: Annotated[StrictInt, Field(ge=0, le=MAX_ID)] | None = None
    mode: Annotated[StrictInt, Field(ge=0, le=0o7777)] | None = None


class VolumeAndToken(Volume):
    token: str
    domain: str
