"""``aenv snapshot create``, ``ls`` and ``rm``."""

from typing import Annotated

import typer

from aenv.cli import output, session
from aenv.cli.help import command, group
from aenv.cli.main import complain
from aenv.client.api import Json
from aenv.errors import AenvError

app = group(
    "Make, list and delete snapshots. A snapshot is used wherever a template is.",
    """
aenv snapshot create i3zj --name checkpoint
aenv start checkpoint
aenv snapshot rm checkpoint
""",
)


@command(
    app,
    "create",
    """
aenv snapshot create i3zj
aenv snapshot create i3zj --name run:step-100
aenv snapshot create i3zj --disk-only
""",
)
def create(
    sandbox: session.SandboxArgument,
    name: Annotated[
        str | None, typer.Option("-n", "--name", help="Name, or name:tag, to start from.", show_default=False)
    ] = None,
    disk_only: Annotated[bool, typer.Option("--disk-only", help="Without memory: sandboxes from it boot.")] = False,
    quiet: output.QuietOption = False,
    form: output.OutputOption = None,
) -> None:
    """Save a sandbox as it is now. It runs on, and the snapshot outlives it."""
    api = session.connect()
    sandbox_id = session.find(api, sandbox)["sandboxID"]

    def undo(made: Json) -> None:
        # Under a name that existed, the content before cannot be brought back; what remains is complete.
        if name is None:
            api.delete_snapshot(made["snapshotID"])

    made = session.undoable(lambda: api.create_snapshot(sandbox_id, name, memory=not disk_only), undo)
    if quiet:
        print(made["snapshotID"])
    elif output.wants_json(form):
        output.print_json(made)
    else:
        known_as = (made["names"] or [made["snapshotID"]])[0]
        print(f"Snapshot {known_as} saved: aenv start {known_as}")


@command(app, "ls", "\naenv snapshot ls\naenv snapshot ls --sandbox i3zj\n")
def ls(
    sandbox: Annotated[
        str | None, typer.Option("-s", "--sandbox", help="Only those of this sandbox.", show_default=False)
    ] = None,
    quiet: output.QuietOption = False,
    form: output.OutputOption = None,
) -> None:
    """List snapshots, newest first."""
    found = session.connect().snapshots(sandbox)
    if quiet:
        for item in found:
            print(item["snapshotID"])
        return
    if output.wants_json(form):
        output.print_json(found)
        return
    from rich.markup import escape

    output.table(
        ["SNAPSHOT", "ID", "SAVED", "CPU", "MEMORY", "DISK"],
        (
            [
                escape(", ".join(item["names"])) or "[dim]-[/]",
                item["snapshotID"],
                f"{output.age(item['updatedAt'])} ago",
                str(item["cpuCount"]),
                output.bytes_text(item["memoryMB"] << 20),
                output.bytes_text(item["diskSizeMB"] << 20),
            ]
            for item in found
        ),
        right=("CPU", "MEMORY", "DISK"),
        empty="No snapshots. `aenv snapshot create SANDBOX` makes one.",
    )


@command(app, "rm", "\naenv snapshot rm checkpoint\n")
def rm(
    snapshots: Annotated[list[str], typer.Argument(metavar="SNAPSHOT...", help="Names or ids.", show_default=False)],
) -> None:
    """Delete snapshots. Sandboxes made from them live on."""
    api = session.connect()
    failed = False
    for name in snapshots:
        try:
            api.delete_snapshot(name)
        except AenvError as error:
            complain(error.message, error.hint)
            failed = True
        else:
            output.say(f"{name} deleted")
    if failed:
        raise typer.Exit(1)
