"""``aenv build``."""

import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click

from aenv.cli import builds, options, output, session, stages
from aenv.cli.commands.pull import report, start_commands, template_options
from aenv.cli.context import Archive, Context, inline
from aenv.cli.help import command
from aenv.client.api import Api, Json
from aenv.client.sandbox import BLOCK, SandboxClient
from aenv.client.transport import Transport
from aenv.errors import AenvError, InvalidRequestError
from aenv.template import dockerfile, dockerfile_plan
from aenv.template.dockerfile_model import CopyFiles, Plan, Stage, Step
from aenv.template.ready import port_check
from aenv.template.steps import Env, Run, User, Workdir


@command(
    "build",
    """
aenv build Dockerfile --name my-app
aenv build . -n my-app:v2 --build-arg VERSION=2 --mem 2048
aenv build -f deploy/Dockerfile . -n my-app
aenv build deploy/Dockerfile -n my-app --context . --target runtime
""",
)
@click.argument("file", default=".", metavar="DOCKERFILE", help="The Dockerfile, or the folder that it is in.")
@click.option("-f", "--file", "named", metavar="DOCKERFILE", help="The Dockerfile; the argument is its context then.")
@click.option("--context", metavar="DIR", help="Where COPY copies from; the Dockerfile's folder if left out.")
@click.option(
    "--build-arg",
    type=options.VARIABLE,
    multiple=True,
    metavar="NAME=VALUE",
    help="Value of an ARG; the name alone takes the value from here.",
)
@click.option("--target", metavar="STAGE", help="Build up to this stage.")
@click.option("--image", metavar="REF", help="Begin with this image instead of the target's FROM.")
@template_options
@click.option("--no-start", is_flag=True, help="Do not run ENTRYPOINT and CMD.")
@options.output_option
def build(
    file: str,
    named: str | None,
    context: str | None,
    build_arg: tuple[tuple[str, str], ...],
    target: str | None,
    image: str | None,
    name: str | None,
    start: str | None,
    ready: str | None,
    ready_port: int | None,
    cpu: int | None,
    memory: int | None,
    fresh: bool,
    no_start: bool,
    form: str | None,
) -> None:
    """Make a template from a Dockerfile.

    Every step runs in a microVM of the server and is cached there. ENTRYPOINT and CMD, or the image's where the
    Dockerfile has none, run at the end, and sandboxes find them running; ready is when the first port of EXPOSE is
    open, unless --ready or --ready-port say otherwise.
    """
    if named is not None:
        file, context = named, context or file
    path = Path(file) / "Dockerfile" if Path(file).is_dir() else Path(file)
    try:
        text = path.read_text()
    except OSError as error:
        raise AenvError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        plan = dockerfile_plan.plan(dockerfile.parse(text), dict(build_arg), target)
    except dockerfile.DockerfileError as error:
        raise AenvError(f"{path}: {error.message}", error.hint) from error
    if image is not None:
        plan.target.image = image
    commands = start_commands(start, ready, ready_port)
    if start is None and not no_start:
        if plan.target.has_entrypoint:
            commands["startCmd"] = plan.target.start_command
        else:
            commands["imageCommand"] = plan.target.start_command
        if "readyCmd" not in commands and plan.target.ports and plan.target.start_command:
            commands["readyCmd"] = port_check(plan.target.ports[0])
    for warning in plan.warnings:
        output.say(f"{path}: {warning}")
    api = session.connect()
    work = _Build(api, path, Context(Path(context) if context else path.parent, path), plan, fresh)
    made = work.run(name or path.resolve().parent.name.lower(), commands, cpu, memory)
    report(made, form)


class _Build:
    def __init__(self, api: Api, path: Path, context: Context, plan: Plan, fresh: bool) -> None:
        self._api = api
        self._path = path
        self._context = context
        self._plan = plan
        self._fresh = fresh
        # What stages and images have given so far, by (stage or image, sources).
        self._taken: dict[tuple[int | str, tuple[str, ...]], Archive] = {}

    def run(self, name: str, commands: Mapping[str, str], cpu: int | None, memory: int | None) -> builds.Build:
        self._take_from_images()
        for stage in self._plan.needed():
            if stage is not self._plan.target:
                self._take_from(stage)
        build = builds.request(self._api, name, cpu=cpu, memory=memory)
        self._steps(build, self._plan.target, dict(commands))
        return build

    # -- other stages

    def _copies(self) -> Iterator[CopyFiles]:
        for stage in self._plan.needed():
            for step in stage.steps:
                if isinstance(step.action, CopyFiles):
                    yield step.action

    def _take_from_images(self) -> None:
        for name in dict.fromkeys(copy.image for copy in self._copies() if copy.image):
            wanted = {copy.sources for copy in self._copies() if copy.image == name}
            with self._helper(f"image {name}") as (build, printer):
                builds.run(self._api, build, {"fromImage": name, "force": self._fresh}, printer.show)
                self._take(build, name, wanted)

    def _take_from(self, stage: Stage) -> None:
        wanted = {copy.sources for copy in self._copies() if copy.stage == stage.index}
        with self._helper(f"stage {stage.name or stage.index}") as (build, _):
            self._steps(build, stage, {})
            self._take(build, stage.index, wanted)

    @contextmanager
    def _helper(self, what: str) -> Iterator[tuple[builds.Build, builds.Printer]]:
        """A template that exists until its files are taken."""
        printer = builds.Printer()
        printer.heading(f"── {what}")
        build = builds.request(self._api, f"build-stage-{secrets.token_hex(6)}")
        try:
            yield build, printer
        finally:
            builds.discard(self._api, build)

    def _take(self, build: builds.Build, key: int | str, wanted: set[tuple[str, ...]]) -> None:
        with stages.sandbox_of(self._api, build.template_id) as client:
            for sources in sorted(wanted):
                self._taken[key, sources] = self._pack(client, key, sources)

    def _pack(self, client: SandboxClient, key: int | str, sources: tuple[str, ...]) -> Archive:
        try:
            return stages.pack(client, sources)
        except InvalidRequestError as error:
            for stage in self._plan.needed():
                for step in stage.steps:
                    copy = step.action
                    if isinstance(copy, CopyFiles) and copy.sources == sources and key in (copy.stage, copy.image):
                        raise AenvError(f"{self._path}: line {step.line}: {step.source}: {error.message}.") from error
            raise

    # -- one stage

    def _steps(self, build: builds.Build, stage: Stage, body: Json) -> None:
        headings, raw = {}, []
        with ExitStack() as stack:
            try:
                for number, step in enumerate(stage.steps, 1):
                    headings[str(number)] = f"[{number}/{len(stage.steps)}] {step.source}"
                    raw.append(self._raw(build, step, stack))
            except BaseException:
                builds.discard(self._api, build)
                raise
            body = {"fromImage": stage.image, "steps": raw, "dockerfile": True, "force": self._fresh, **body}
            try:
                builds.run(self._api, build, body, builds.Printer(headings).show)
            except builds.BuildFailedError as error:
                raise self._explained(error, stage.steps) from error

    def _explained(self, error: builds.BuildFailedError, steps: list[Step]) -> AenvError:
        """With the line of the Dockerfile that failed."""
        if error.step is None or not error.step.isdecimal():
            return AenvError(error.message)
        step = steps[int(error.step) - 1]
        message = error.message
        if isinstance(step.action, Run):
            command = step.action.command
            shown = command if len(command) <= 500 else f"{command[:500]}…"
            message = message.removeprefix(f"failed to run command '{shown}': ")
        return AenvError(f"{self._path}: line {step.line}: {step.source}: {message}")

    def _raw(self, build: builds.Build, step: Step, stack: ExitStack) -> Json:
        """A step as the API takes it; files are uploaded."""
        match step.action:
            case Run(command, user):
                return {"type": "RUN", "args": [command, *([user] if user else [])]}
            case Env(variables):
                return {"type": "ENV", "args": [text for pair in variables for text in pair]}
            case Workdir(path):
                return {"type": "WORKDIR", "args": [path]}
            case User(name):
                return {"type": "USER", "args": [name]}
            case CopyFiles() as copy:
                try:
                    archive = self._archive(copy)
                except InvalidRequestError as error:
                    raise AenvError(
                        f"{self._path}: line {step.line}: {step.source}: {error.message}", error.hint
                    ) from error
                if copy.stage is None and copy.image is None:
                    stack.callback(archive.file.close)
                self._upload(build, archive)
                arguments = [archive.source, copy.destination, copy.owner, copy.mode]
                return {"type": "COPY", "args": arguments, "filesHash": archive.digest}

    def _archive(self, copy: CopyFiles) -> Archive:
        if copy.stage is not None or copy.image is not None:
            key: int | str | None = copy.stage if copy.stage is not None else copy.image
            assert key is not None
            return self._taken[key, copy.sources]
        if copy.inline:
            return inline(copy.inline)
        if copy.urls:
            return stages.download(copy.urls, copy.checksum)
        return self._context.pack(copy.sources, unpack=copy.unpack)

    def _upload(self, build: builds.Build, archive: Archive) -> None:
        link = self._api.upload_link(build.template_id, archive.digest)
        if link["present"]:
            return
        origin, _, target = link["url"].partition("://")[2].partition("/")
        scheme = link["url"].partition("://")[0]
        archive.file.seek(0)
        blocks = iter(lambda: archive.file.read(BLOCK), b"")
        headers = {"Content-Length": str(archive.size)}
        Transport(f"{scheme}://{origin}", {}).stream("PUT", f"/{target}", data=blocks, headers=headers).close()
