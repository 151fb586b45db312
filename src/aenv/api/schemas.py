"""Request and response bodies, with E2B's field names (``e2b-openapi.yml``; v2 bodies as e2b 2.63 sends them)."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
)
from pydantic.alias_generators import to_camel

from aenv.api.errors import Error


def _alias(name: str) -> str:
    """``sandbox_id`` -> ``sandboxID``, ``memory_mb`` -> ``memoryMB``, everything else camelCase."""
    camel = to_camel(name)
    for ending in ("Id", "Mb"):
        if camel.endswith(ending):
            return camel[:-2] + ending.upper()
    return camel


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=_alias, populate_by_name=True, serialize_by_alias=True)


def _unicode(text: str) -> str:
    """JSON can spell half of a surrogate pair; as a key of an object pydantic lets it pass."""
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("is not Unicode text")
    return text


State = Literal["running", "paused"]
PauseMode = Literal["full", "filesystem"]
Text = Annotated[str, StringConstraints(strict=True), AfterValidator(_unicode)]
Name = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=256)]


class AutoResume(_Model):
    enabled: StrictBool = False


class NetworkRequest(BaseModel):
    """``network`` of a new sandbox. Members that are not served are kept, to be refused by name."""

    model_config = ConfigDict(extra="allow")

    allow_public_traffic: StrictBool | None = Field(None, alias="allowPublicTraffic", description="Default: true")
    allow_out: list[Text] | None = Field(None, alias="allowOut")
    deny_out: list[Text] | None = Field(None, alias="denyOut")
    mask_request_host: Text | None = Field(
        None,
        alias="maskRequestHost",
        description="Host header that servers in the sandbox see; ${PORT} in it stands for the port",
    )


class NetworkUpdate(BaseModel):
    """Body of PUT /sandboxes/{id}/network: the whole policy, what is left out is cleared."""

    model_config = ConfigDict(extra="allow")

    allow_out: list[Text] | None = Field(None, alias="allowOut")
    deny_out: list[Text] | None = Field(None, alias="denyOut")
    allow_internet_access: StrictBool | None = Field(
        None, validation_alias=AliasChoices("allow_internet_access", "allowInternetAccess")
    )


class SandboxRequest(_Model):
    """What is asked of a sandbox, whatever it is made from."""

    timeout: StrictInt | None = Field(None, description="Time to live, seconds")
    auto_pause: StrictBool | None = Field(None, description="Pause at the end of life (default), else delete")
    auto_pause_memory: StrictBool | None = Field(
        None, description="False: the pause at the end of life keeps the disk only"
    )
    auto_resume: AutoResume | None = None
    secure: StrictBool | None = Field(None, description="Ignored by v2, which always secures envd")
    allow_internet_access: StrictBool | None = Field(
        None, validation_alias=AliasChoices("allow_internet_access", "allowInternetAccess")
    )
    network: NetworkRequest | None = None
    metadata: dict[Text, Text] = Field(default_factory=dict)
    env_vars: dict[Text, Text] = Field(default_factory=dict)
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[Any] | None = None
    custom_extension_params: dict[str, Any] | None = None


class NewSandbox(SandboxRequest):
    """Body of POST /sandboxes and POST /v2/sandboxes; they differ in the default of ``timeout`` (15 s, 300 s)."""

    template_id: Name


class ConnectRequest(_Model):
    """Body of POST /sandboxes/{id}/connect."""

    timeout: StrictInt
    memory: StrictBool | None = None


class ConnectRequestV2(_Model):
    timeout: StrictInt = 300
    memory: StrictBool | None = None


class ResumeRequest(_Model):
    timeout: StrictInt = 15
    auto_pause: StrictBool | None = None
    memory: StrictBool | None = None


class PauseRequest(_Model):
    memory: StrictBool | None = Field(None, description="False: keep the disk only; resuming boots")
    require_healthy_guest: StrictBool | None = Field(None, description="Refuse with 503 when envd does not answer")


class SnapshotRequest(_Model):
    """Body of POST /sandboxes/{id}/snapshots."""

    name: Annotated[str, StringConstraints(strict=True, min_length=1)] | None = Field(
        None, description="name, namespace/name or name:tag"
    )
    memory: StrictBool | None = Field(None, description="False: save the disk only; sandboxes made from it boot")


class TimeoutRequest(_Model):
    timeout: StrictInt


class RefreshRequest(_Model):
    duration: StrictInt = 15


class ForkRequest(_Model):
    timeout: StrictInt | None = None
    count: StrictInt = 1


class Sandbox(_Model):
    """What creating, connecting and forking return."""

    template_id: str
    sandbox_id: str
    client_id: str = Field(deprecated=True)
    alias: str | None = None
    envd_version: str
    envd_access_token: str | None = None
    traffic_access_token: str | None = None
    domain: str | None = None


class ListedSandbox(_Model):
    template_id: str
    sandbox_id: str
    client_id: str = Field(deprecated=True)
    alias: str | None = None
    started_at: datetime
    end_at: datetime
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    metadata: dict[str, str]
    state: State
    envd_version: str
    envd_unresponsive_at_pause: bool | None = Field(
        None, description="True: it can be resumed with memory: false only"
    )
    parent_id: str | None = Field(None, description="The sandbox it was forked from; not in E2B's API")


class Lifecycle(_Model):
    auto_resume: bool
    on_timeout: Literal["pause", "kill"]


class Network(_Model):
    allow_public_traffic: bool
    allow_out: list[str] | None = None
    deny_out: list[str] | None = None
    mask_request_host: str | None = None


class SandboxDetail(ListedSandbox):
    envd_access_token: str | None = None
    allow_internet_access: bool | None = None
    domain: str | None = None
    network: Network
    lifecycle: Lifecycle
    pause_mode: PauseMode | None = None


class ForkResult(BaseModel):
    """One requested child: exactly one of the two is set."""

    sandbox: Sandbox | None = None
    error: Error | None = None


class Snapshot(_Model):
    snapshot_id: str
    names: list[str]
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    created_at: datetime
    updated_at: datetime
