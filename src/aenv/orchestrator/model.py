"""What a sandbox is: plain values shared by the lifecycle, the store and the API. No I/O."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class SandboxState(StrEnum):
    """Life of a sandbox. Only ``RUNNING`` and ``PAUSED`` are stable; the others are journalled transitions.

    A transition is written to the store before its first side effect, so that a restart knows what to
    finish or undo (see ``aenv.orchestrator.recovery``).
    """

    STARTING = "starting"  # create or fork child: no VM of its own yet, undone by deleting
    RUNNING = "running"
    PAUSING = "pausing"  # VM stopped or being captured; undone by letting it run on
    PAUSED = "paused"
    RESUMING = "resuming"  # undone by going back to the snapshot
    DELETING = "deleting"  # always finished, never undone

    @property
    def public(self) -> str:
        """The state as E2B's API knows it: ``running`` or ``paused``."""
        return "paused" if self in (SandboxState.PAUSED, SandboxState.RESUMING) else "running"


@dataclass(frozen=True, slots=True)
class Egress:
    """Where a sandbox may send traffic. Entries are CIDR blocks or IP addresses; allowed ones win."""

    allow_internet: bool | None = None
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a caller asks for when creating a sandbox. ``timeout`` is in seconds."""

    template: str
    timeout: int
    auto_pause: bool = True
    auto_pause_memory: bool = True  # False: at its end only its disk is kept
    auto_resume: bool = False
    metadata: Mapping[str, str] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    secure: bool = False
    egress: Egress = Egress()
    allow_public_traffic: bool = True
    host_mask: str | None = None  # the Host that its servers see; ${PORT} in it stands for the port
    idempotency_key: str | None = None  # repeating the request under it makes no second sandbox


@dataclass(frozen=True, slots=True)
class Drive:
    """An image whose files, those in ``folder`` if that is set, are to be at ``mount_path``, which is absolute."""

    image: str
    mount_path: str
    folder: str = ""
    read_only: bool = True
    disk_mib: int = 0  # room for it


@dataclass(frozen=True, slots=True)
class ColdMachine:
    """The machine that boots an image, as asked for; None is the node's default. Sizes are MiB."""

    vcpus: int | None = None
    memory_mib: int | None = None
    disk_mib: int | None = None
    boot_arguments: tuple[str, ...] = ()
    drives: tuple[Drive, ...] = ()


@dataclass(frozen=True, slots=True)
class Sandbox:
    """One sandbox as the store records it. Times are timezone-aware UTC; sizes are MiB."""

    id: str
    template_id: str
    template_alias: str | None
    state: SandboxState
    started_at: datetime
    end_at: datetime
    timeout: int
    auto_pause: bool
    auto_resume: bool
    metadata: Mapping[str, str]
    env_vars: Mapping[str, str]
    envd_access_token: str | None  # set when the sandbox is ``secure``
    traffic_access_token: str | None  # set when public traffic is not allowed
    egress: Egress
    vcpus: int
    memory_mib: int
    disk_mib: int
    envd_version: str
    parent_id: str | None = None  # the sandbox this one was forked from
    snapshot_id: str | None = None  # what it was started or last resumed from, or is paused in
    captured_id: str | None = None  # the last snapshot of it while it ran on, since then
    disk: str | None = None  # id of its writable disk layer
    memory_base: str | None = None  # the memory file its VM maps; what it captures is relative to that. None: booted
    vm_id: str | None = None  # set while a VM process belongs to it
    slot: int | None = None  # network slot index while a VM process belongs to it
    default_user: str = "user"  # of its commands and files, from its template
    default_workdir: str | None = None  # None: the user's home
    auto_pause_memory: bool = True  # whether the pause at its end keeps memory
    memory_kept: bool = True  # whether its last pause did; if not, it boots when it is resumed
    host_mask: str | None = None  # the Host that its servers see; ${PORT} in it stands for the port
    agent_silent: bool = False  # whether the guest agent did not answer at its last pause
    request: str | None = None  # which made it, where that may be repeated (``repeats.marker``)
    boot_arguments: tuple[str, ...] = ()  # more kernel parameters, ``name`` or ``name=value``, whenever it boots


@dataclass(frozen=True, slots=True)
class SandboxFilter:
    """Which sandboxes a listing wants. Empty ``states`` means all public states; metadata must match exactly."""

    states: frozenset[str] = frozenset()  # of "running", "paused"
    metadata: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    started_after: datetime | None = None  # that moment included
    newest_first: bool = True


@dataclass(frozen=True, slots=True)
class SandboxPage:
    """One page of a listing; ``next_token`` is opaque and None on the last page."""

    items: tuple[Sandbox, ...]
    next_token: str | None
    running: int = 0  # running ones that the filter lets through, on any page


@dataclass(frozen=True, slots=True)
class ForkOutcome:
    """What became of one requested child: exactly one of the two is set."""

    sandbox: Sandbox | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class TagTarget:
    """Which build a tag of a template names, and since when."""

    build_id: str
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Template:
    """A committed template: a snapshot that sandboxes start from. Sizes are MiB."""

    id: str
    build_id: str
    aliases: tuple[str, ...]
    snapshot_id: str
    vcpus: int
    memory_mib: int
    disk_mib: int
    envd_version: str
    initramfs_sha256: str  # what its guest runs as PID 1; a node with another one rebuilds its base template
    created_at: datetime
    updated_at: datetime
    spawn_count: int = 0
    last_spawned_at: datetime | None = None
    start_cmd: str = ""
    ready_cmd: str = ""
    env_vars: Mapping[str, str] = field(default_factory=dict)  # of every process of its sandboxes
    default_user: str = "user"
    default_workdir: str | None = None  # None: the user's home
    public: bool = True
    # The fields above are those of the build tagged ``default``, or of the latest. Empty: the only build there is.
    tags: Mapping[str, TagTarget] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A snapshot that a user keeps: usable wherever a template is, whatever becomes of its sandbox. Sizes are MiB.

    ``name`` and ``tag`` together are unique; saving under them again gives this record another content.
    """

    id: str
    name: str | None
    tag: str
    snapshot_id: str
    sandbox_id: str  # the sandbox it is of
    vcpus: int
    memory_mib: int
    disk_mib: int
    envd_version: str
    created_at: datetime
    updated_at: datetime
    env_vars: Mapping[str, str] = field(default_factory=dict)  # of every process of its sandboxes
    default_user: str = "user"
    default_workdir: str | None = None  # None: the user's home
    imported: bool = False  # from the repository, where another node put it


@dataclass(frozen=True, slots=True)
class Published:
    """A name in the repository that this node gave: ``id`` is ``name:tag``."""

    id: str
    snapshot_id: str
    repository: str  # which one


@dataclass(frozen=True, slots=True)
class SavedSnapshotPage:
    """One page of a listing; ``next_token`` is opaque and None on the last page."""

    items: tuple[SavedSnapshot, ...]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where the proxy finds a running sandbox's guest."""

    sandbox: Sandbox
    host: str  # address at which the node reaches the guest, any port
    generation: int  # grows with every resume: connections of an older generation must not be reused
