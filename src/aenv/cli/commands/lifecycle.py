"""``aenv pause``, ``resume``, ``fork``, ``timeout`` and ``rm``."""

from collections.abc import Callable, Sequence

import click

from aenv.cli import options, output, session
from aenv.cli.help import command
from aenv.cli.table import Column
from aenv.client.api import Api


def _each(names: Sequence[str], done: str, work: Callable[[Api, str], object], already: str | None = None) -> None:
    """Do ``work`` to every sandbox, but to those that are in the state ``already``."""
    api = session.connect()

    def one(name: str) -> str:
        sandbox = session.find(api, name)
        if sandbox["state"] != already:
            work(api, sandbox["sandboxID"])
        return f"{sandbox['sandboxID']} {done}"

    session.each(names, one)


@command(
    "pause",
    """
aenv pause i3zj
aenv pause i3zj --disk-only          # forget its memory; it boots when it is resumed
aenv ls -q --state running | xargs aenv pause
""",
)
@options.sandbox_argument(nargs=-1, required=True)
@click.option("--disk-only", is_flag=True, help="Keep the disk and not the memory.")
def pause(sandboxes: tuple[str, ...], disk_only: bool) -> None:
    """Pause sandboxes to disk, with their memory and processes."""
    _each(sandboxes, "paused", lambda api, name: api.pause(name, memory=not disk_only), already="paused")


@command("resume", "\naenv resume i3zj\naenv resume i3zj --timeout 2h\n")
@options.sandbox_argument(nargs=-1, required=True)
@options.timeout_option("How long it lives from now on.")
def resume(sandboxes: tuple[str, ...], timeout: int) -> None:
    """Resume paused sandboxes. Their processes go on where they were."""
    done = f"runs, for {output.duration_text(timeout)} unless `aenv timeout` says otherwise"
    _each(sandboxes, done, lambda api, name: api.connect(name, timeout))


@command(
    "timeout",
    """
aenv timeout i3zj 30m
aenv timeout i3zj 0                  # its time is over now
""",
)
@options.sandbox_argument()
@click.argument("time", type=options.DURATION, metavar="TIME", help="From now: 90s, 15m, 2h.")
def timeout(sandbox: str, time: int) -> None:
    """Set how long a sandbox lives from now on."""
    _each([sandbox], f"ends in {output.duration_text(time)}", lambda api, name: api.set_timeout(name, time))


@command(
    "rm",
    """
aenv rm i3zj k2pw
aenv rm --all                        # asks first
""",
)
@options.sandbox_argument(nargs=-1, required=False)
@click.option("--all", "all_of_them", is_flag=True, help="Every sandbox, running or paused.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def rm(sandboxes: tuple[str, ...], all_of_them: bool, yes: bool) -> None:
    """Delete sandboxes with their disks and memory. Forks and snapshots of them stay."""
    names: Sequence[str] = sandboxes
    if all_of_them:
        if sandboxes:
            raise click.UsageError("--all is for every sandbox: name none.")
        names = [item["sandboxID"] for item in session.connect().sandboxes()]
        if not names:
            output.say("No sandboxes.")
            return
        if not yes:
            click.confirm(f"Delete {len(names)} sandbox{'es' if len(names) > 1 else ''}?", abort=True, err=True)
    elif not names:
        raise click.UsageError("Name the sandboxes to delete, or use --all.")
    _each(names, "deleted", lambda api, name: api.kill(name))


@command(
    "fork",
    """
aenv fork i3zj
aenv fork i3zj --count 8 -q          # ids of the children, one a line
""",
)
@options.sandbox_argument()
@click.option("-c", "--count", type=click.IntRange(min=1), metavar="N", default=1, help="How many children.")
@options.timeout_option("How long children live; as the parent if left out.", default=None)
@options.quiet_option
@options.output_option
def fork(sandbox: str, count: int, timeout: int | None, quiet: bool, form: str | None) -> None:
    """Start copies of a sandbox as it is now: memory, processes and disk.

    The sandbox runs on. A child that cannot be started does not undo the others; the exit code is 1 then.
    """
    api = session.connect()
    sandbox_id = session.find(api, sandbox)["sandboxID"]

    def undo(outcomes: list[dict[str, dict[str, str]]]) -> None:
        for outcome in outcomes:
            if "sandbox" in outcome:
                api.kill(outcome["sandbox"]["sandboxID"])

    with session.undoable(lambda: api.fork(sandbox_id, count, timeout), undo) as outcomes:
        made = [outcome["sandbox"] for outcome in outcomes if "sandbox" in outcome]
        if quiet:
            for child in made:
                print(child["sandboxID"])
        elif output.wants_json(form):
            output.print_json(outcomes)
        elif made:
            columns = [Column("SANDBOX"), Column("FORKED FROM")]
            output.table(columns, ([child["sandboxID"], sandbox_id] for child in made))
    for outcome in outcomes:
        if "error" in outcome:
            output.complain(outcome["error"]["message"])
    if len(made) < len(outcomes):
        raise click.exceptions.Exit(1)
