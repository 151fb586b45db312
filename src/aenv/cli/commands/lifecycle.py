"""``aenv pause``, ``resume``, ``fork``, ``timeout`` and ``rm``."""

from collections.abc import Callable
from typing import Annotated

import typer

from aenv.cli import output, session
from aenv.cli.commands.start import DEFAULT_TIMEOUT
from aenv.cli.help import application, command
from aenv.cli.main import complain
from aenv.client.api import Api
from aenv.errors import AenvError

app = application()


def _each(names: list[str], done: str, work: Callable[[Api, str], object]) -> None:
    """Do ``work`` to every sandbox; what fails does not keep the others from it. The exit code says if any did."""
    api = session.connect()
    failed = False
    for name in names:
        try:
            sandbox_id = session.find(api, name)["sandboxID"]
            work(api, sandbox_id)
        except AenvError as error:
            if len(names) == 1:
                raise
            complain(f"{name}: {error.message}", error.hint)
            failed = True
        else:
            output.say(f"{sandbox_id} {done}")
    if failed:
        raise typer.Exit(1)


@command(
    app,
    "pause",
    """
aenv pause i3zj
aenv pause i3zj --disk-only          # forget its memory; it boots when it is resumed
aenv ls -q --state running | xargs aenv pause
""",
)
def pause(
    sandboxes: session.SandboxesArgument,
    disk_only: Annotated[bool, typer.Option("--disk-only", help="Keep the disk and not the memory.")] = False,
) -> None:
    """Pause sandboxes to disk, with their memory and processes."""
    _each(sandboxes, "paused", lambda api, name: api.pause(name, memory=not disk_only))


@command(app, "resume", "\naenv resume i3zj\naenv resume i3zj --timeout 2h\n")
def resume(
    sandboxes: session.SandboxesArgument,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="How long it lives from now on.")
    ] = DEFAULT_TIMEOUT,
) -> None:
    """Resume paused sandboxes. Their processes go on where they were."""
    seconds = session.seconds(timeout)
    _each(sandboxes, "runs", lambda api, name: api.connect(name, seconds))


@command(
    app,
    "timeout",
    """
aenv timeout i3zj 30m
aenv timeout i3zj 0                  # its time is over now
""",
)
def timeout(
    sandbox: session.SandboxArgument,
    time: Annotated[str, typer.Argument(metavar="TIME", help="From now: 90s, 15m, 2h.", show_default=False)],
) -> None:
    """Set how long a sandbox lives from now on."""
    seconds = session.seconds(time)
    _each([sandbox], f"ends in {output.duration_text(seconds)}", lambda api, name: api.set_timeout(name, seconds))


@command(
    app,
    "rm",
    """
aenv rm i3zj k2pw
aenv rm --all                        # asks first
""",
)
def rm(
    sandboxes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SANDBOX...",
            help="Ids, or beginnings of ids.",
            show_default=False,
            autocompletion=session.complete_sandbox,
        ),
    ] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Every sandbox, running or paused.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete sandboxes with their disks and memory. Forks and snapshots of them stay."""
    names = sandboxes or []
    if all_of_them:
        names = [item["sandboxID"] for item in session.connect().sandboxes()]
        if not names:
            output.say("No sandboxes.")
            return
        if not yes:
            typer.confirm(f"Delete {len(names)} sandboxes?", abort=True, err=True)
    elif not names:
        raise AenvError("Name the sandboxes to delete.", "Or delete all of them with --all.")
    _each(names, "deleted", lambda api, name: api.kill(name))


@command(
    app,
    "fork",
    """
aenv fork i3zj
aenv fork i3zj --count 8 -q          # ids of the children, one a line
""",
)
def fork(
    sandbox: session.SandboxArgument,
    count: Annotated[int, typer.Option("-c", "--count", min=1, help="How many children.")] = 1,
    timeout: Annotated[
        str | None,
        typer.Option(
            "--timeout", metavar="TIME", help="How long children live; as the parent if left out.", show_default=False
        ),
    ] = None,
    quiet: output.QuietOption = False,
    form: output.OutputOption = None,
) -> None:
    """Start copies of a sandbox as it is now: memory, processes and disk.

    The sandbox runs on. A child that cannot be started does not undo the others; the exit code is 1 then.
    """
    api = session.connect()
    sandbox_id = session.find(api, sandbox)["sandboxID"]
    seconds = None if timeout is None else session.seconds(timeout)

    def undo(outcomes: list[dict[str, dict[str, str]]]) -> None:
        for outcome in outcomes:
            if "sandbox" in outcome:
                api.kill(outcome["sandbox"]["sandboxID"])

    outcomes = session.undoable(lambda: api.fork(sandbox_id, count, seconds), undo)
    made = [outcome["sandbox"] for outcome in outcomes if "sandbox" in outcome]
    if quiet:
        for child in made:
            print(child["sandboxID"])
    elif output.wants_json(form):
        output.print_json(outcomes)
    else:
        output.table(["SANDBOX", "FORKED FROM"], ([child["sandboxID"], sandbox_id] for child in made))
    for outcome in outcomes:
        if "error" in outcome:
            complain(outcome["error"]["message"])
    if len(made) < len(outcomes):
        raise typer.Exit(1)
