"""Bodies of templates, builds and tags, with E2B's field names (``e2b-openapi.yml``; as e2b 2.63 sends them)."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from aenv.api.schemas import Text, _Model

Status = Literal["building", "waiting", "ready", "error"]
Level = Literal["debug", "info", "warn", "error"]
Tag = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=128)]
TemplateName = Annotated[str, StringConstraints(strict=True, min_length=1, max_length=257)]


class NewTemplate(_Model):
    """Body of POST /v3/templates. ``name`` may carry a tag."""

    name: TemplateName | None = None
    alias: TemplateName | None = Field(None, deprecated=True)
    tags: list[Tag] = Field(default_factory=list, max_length=100)
    cpu_count: StrictInt | None = None
    memory_mb: StrictInt | None = None
    min_free_disk_mb: StrictInt | None = Field(
        None,
        alias="minFreeDiskMb",  # spelled so, unlike memoryMB
        description="Disk space left after the steps: the disk grows for it, as far as it can",
    )


class NewTemplateV2(_Model):
    alias: TemplateName
    cpu_count: StrictInt | None = None
    memory_mb: StrictInt | None = None


class RequestedTemplate(_Model):
    template_id: str
    build_id: str
    public: bool
    names: list[str]
    aliases: list[str] = Field(deprecated=True)
    tags: list[str]


class FileUpload(_Model):
    present: bool
    url: str


class TemplateStep(_Model):
    type: Text
    args: list[Text] = Field(default_factory=list)
    files_hash: Text | None = None
    force: StrictBool = False


class BuildStart(_Model):
    """Body of POST /v2/templates/{id}/builds/{id}."""

    from_image: Text | None = None
    from_template: Text | None = None
    from_image_registry: dict[str, Any] | None = None
    steps: list[TemplateStep] = Field(default_factory=list)
    start_cmd: Text | None = None
    ready_cmd: Text | None = None
    force: StrictBool = False
    dockerfile: StrictBool = Field(
        False,
        description="The steps are a Dockerfile's: they begin as the image's own user in its own folder, root and / "
        "without; sandboxes run as user in its home where neither names others. Not in E2B's API",
    )
    image_command: Text | None = Field(
        None,
        description="Without a startCmd: run the image's ENTRYPOINT with these shell words; with its CMD if they are "
        "empty, and go on where that fails. Left out: run neither. Not in E2B's API",
    )


class BuildLogEntry(_Model):
    timestamp: datetime
    level: Level
    message: str
    step: str | None = None


class BuildReason(_Model):
    message: str
    step: str | None = None
    log_entries: list[BuildLogEntry]


class BuildInfo(_Model):
    template_id: str
    build_id: str
    status: Status
    logs: list[str] = Field(deprecated=True)
    log_entries: list[BuildLogEntry]
    reason: BuildReason | None = None


class BuildLogs(_Model):
    logs: list[BuildLogEntry]


class Template(_Model):
    template_id: str
    build_id: str
    cpu_count: int
    memory_mb: int
    disk_size_mb: int
    public: bool
    aliases: list[str] = Field(deprecated=True)
    names: list[str]
    created_at: datetime
    updated_at: datetime
    created_by: None
    last_spawned_at: datetime | None
    spawn_count: int
    build_count: int
    envd_version: str
    build_status: Status


class TemplateBuild(_Model):
    build_id: str
    status: Status
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None = None
    cpu_count: int
    memory_mb: int
    disk_size_mb: int | None = None
    envd_version: str | None = None


class TemplateWithBuilds(_Model):
    template_id: str
    public: bool
    aliases: list[str] = Field(deprecated=True)
    names: list[str]
    created_at: datetime
    updated_at: datetime
    last_spawned_at: datetime | None
    spawn_count: int
    builds: list[TemplateBuild]


class TemplateAlias(_Model):
    template_id: str
    public: bool


class TemplateUpdate(_Model):
    public: StrictBool | None = None


class UpdatedTemplate(_Model):
    names: list[str]


class TagAssignment(_Model):
    target: TemplateName
    tags: list[Tag] = Field(min_length=1, max_length=100)


class AssignedTags(_Model):
    tags: list[str]
    build_id: str


class TagRemoval(_Model):
    name: TemplateName
    tags: list[Tag] = Field(min_length=1, max_length=100)


class TemplateTag(_Model):
    tag: str
    build_id: str
    created_at: datetime
