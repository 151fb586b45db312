"""Records of template builds: what was asked for, what became of it, and the layers kept for the next one. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class BuildStatus(StrEnum):
    """E2B's states of a build. ``READY`` and ``ERROR`` are final."""

    WAITING = "waiting"  # requested; its steps have not come, or it waits for its turn
    BUILDING = "building"
    READY = "ready"
    ERROR = "error"

    @property
    def final(self) -> bool:
        return self in (BuildStatus.READY, BuildStatus.ERROR)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a build failed. ``step`` is ``base``, the number of the step from 1, or ``finalize``."""

    message: str
    step: str | None = None


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """What sandboxes of a finished build start from. Sizes are MiB."""

    snapshot_id: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    envd_version: str
    initramfs_sha256: str
    env_vars: Mapping[str, str] = field(default_factory=dict)
    default_user: str = "user"
    default_workdir: str | None = None  # None: the user's home
    start_cmd: str = ""
    ready_cmd: str = ""


@dataclass(frozen=True, slots=True)
class Build:
    """One build of a template. ``name`` and ``tags`` are what the template gets when it is ready."""

    id: str  # a UUID
    template_id: str
    name: str
    tags: tuple[str, ...]
    status: BuildStatus
    vcpus: int
    memory_mib: int
    created_at: datetime
    updated_at: datetime
    started: bool = False  # its steps have come: it can be started once
    finished_at: datetime | None = None
    failure: Failure | None = None
    min_free_mib: int = 0  # what its disk is to have left after the steps
    image: BuiltImage | None = None  # of a ready build that a tag names; others lose their snapshot


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """The machine as it was after a step. ``id`` is the step's key (``aenv.template.keys``)."""

    id: str
    snapshot_id: str
    initramfs_sha256: str
    used_at: datetime
    env_vars: Mapping[str, str] = field(default_factory=dict)
    user: str = "user"
    workdir: str | None = None
