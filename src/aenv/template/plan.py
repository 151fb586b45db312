"""What a build is to do, and from which point of the layer cache it can go on. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from aenv.orchestrator.model import SavedSnapshot, Template
from aenv.template import keys
from aenv.template.steps import Copy, Run, Step
from aenv.vmm.protocol import MachineShape


@dataclass(frozen=True, slots=True)
class RegistryLogin:
    """Credentials for the base image's registry. Never stored, never printed."""

    username: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """A build's work. Exactly one of ``image`` and ``template`` is set; ``force`` ignores everything cached.

    ``template`` may be a saved snapshot: whatever sandboxes start from. ``dockerfile``: the steps are one's, see
    ``context.of_dockerfile``. ``image_command``: run the image's ENTRYPOINT with these words, or with its CMD if they
    are empty; None: run neither.
    """

    shape: MachineShape
    steps: Sequence[Step]
    image: str | None = None
    login: RegistryLogin | None = None
    template: Template | SavedSnapshot | None = None
    start_cmd: str = ""
    ready_cmd: str = ""
    min_free_mib: int = 0  # of the disk after the steps
    force: bool = False
    dockerfile: bool = False
    image_command: str | None = None


def is_captured(step: Step) -> bool:
    """Whether the machine is kept after the step. The other kinds take no time worth saving."""
    return isinstance(step.action, (Run, Copy))


def step_keys(origin: str, steps: Sequence[Step]) -> list[str]:
    """The key of each step's result; ``origin`` is the key of what the build starts from."""
    found = []
    key = origin
    for step in steps:
        key = keys.of_step(key, step)
        found.append(key)
    return found


def reusable(steps: Sequence[Step], *, force: bool) -> int:
    """How many leading steps may be taken from the cache at all: up to the first that is forced."""
    if force:
        return 0
    return next((index for index, step in enumerate(steps) if step.force), len(steps))


def resume_at(steps: Sequence[Step], chain: Sequence[str], cached: Collection[str], *, force: bool) -> int:
    """How many leading steps are done by the deepest cached layer; 0 to start at the origin."""
    for count in range(reusable(steps, force=force), 0, -1):
        if is_captured(steps[count - 1]) and chain[count - 1] in cached:
            return count
    return 0
