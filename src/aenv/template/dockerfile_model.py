"""A Dockerfile as builds: stages of steps. Values only; ``aenv.template.dockerfile_plan`` makes them."""

from dataclasses import dataclass, field, replace

from aenv.template.steps import Env, Run, User, Workdir

DEFAULT_SHELL = ("/bin/sh", "-c")


@dataclass(frozen=True, slots=True)
class InlineFile:
    name: str
    content: str


@dataclass(frozen=True, slots=True)
class CopyFiles:
    """``COPY`` or ``ADD``. Exactly one of ``sources``, ``inline`` and ``urls`` has entries, or the two last.

    ``stage`` is the index of the stage or ``image`` the image that the files come from; None of both: the context.
    ``destination`` is for ``aenv.template.expand``. ``unpack``: local tar archives are unpacked.
    """

    sources: tuple[str, ...]
    destination: str
    owner: str
    mode: str
    stage: int | None = None
    image: str | None = None
    inline: tuple[InlineFile, ...] = ()
    urls: tuple[str, ...] = ()
    unpack: bool = False
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """``line`` and ``source`` are the instruction's."""

    line: int
    source: str
    action: Run | Env | Workdir | User | CopyFiles


@dataclass(slots=True)
class Stage:
    """One FROM. ``image`` is what its steps, those of earlier stages included, start from."""

    index: int
    name: str
    line: int
    image: str
    steps: list[Step] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)  # whose values are known here
    shell: tuple[str, ...] = DEFAULT_SHELL
    entrypoint: str = ""
    entrypoint_alone: bool = False  # written for a shell, which gives it no arguments
    command: str = ""
    own_command: bool = False  # not that of the stage it begins with
    has_entrypoint: bool = False  # the image's is not used, also where this one is empty
    ports: list[int] = field(default_factory=list)

    @property
    def start_command(self) -> str:
        """ENTRYPOINT with CMD as its arguments, as a shell command; empty without either."""
        return self.entrypoint if self.entrypoint_alone else " ".join(filter(None, (self.entrypoint, self.command)))

    def child(self, index: int, name: str, line: int) -> "Stage":
        """A stage that begins where this one ends."""
        return replace(
            self,
            index=index,
            name=name,
            line=line,
            steps=list(self.steps),
            env=dict(self.env),
            ports=list(self.ports),
            own_command=False,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    stages: tuple[Stage, ...]
    target: Stage
    warnings: tuple[str, ...]

    def needed(self) -> list[Stage]:
        """The stages to build, the target last; each after those that it copies from."""
        order: list[int] = []

        def visit(index: int) -> None:
            for step in self.stages[index].steps:
                if isinstance(step.action, CopyFiles) and step.action.stage is not None:
                    visit(step.action.stage)
            if index not in order:
                order.append(index)

        visit(self.target.index)
        return [self.stages[index] for index in order]
