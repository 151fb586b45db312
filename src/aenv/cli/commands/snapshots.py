"""``aenv snapshot create``, ``ls`` and ``rm``."""

import click

from aenv.cli import help, options, output, session
from aenv.cli.help import command
from aenv.cli.table import Column
from aenv.client.api import Api, Json

group = help.group(
    "snapshot",
    "Make, list and delete snapshots. A snapshot is used wherever a template is.",
    """
aenv snapshot create i3zj --name checkpoint
aenv start checkpoint
aenv snapshot rm checkpoint
""",
)

COLUMNS = (
    Column("SNAPSHOT", cut=True),
    Column("ID"),
    Column("SAVED", right=True),
    Column("CPU", right=True, spare=1),
    Column("MEMORY", right=True, spare=1),
    Column("DISK", right=True, spare=1),
)


@command(
    "create",
    """
aenv snapshot create i3zj
aenv snapshot create i3zj --name run:step-100
aenv snapshot create i3zj --disk-only
""",
    of=group,
)
@options.sandbox_argument()
@click.option("-n", "--name", metavar="NAME", help="Name, or name:tag, to start from.")
@click.option("--disk-only", is_flag=True, help="Without memory: sandboxes from it boot.")
@options.quiet_option
@options.output_option
def create(sandbox: str, name: str | None, disk_only: bool, quiet: bool, form: str | None) -> None:
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


@command("ls", "\naenv snapshot ls\naenv snapshot ls --sandbox i3zj\n", of=group)
@click.option("-s", "--sandbox", metavar="SANDBOX", help="Only those of this sandbox.")
@options.quiet_option
@options.output_option
def ls(sandbox: str | None, quiet: bool, form: str | None) -> None:
    """List snapshots, newest first."""
    api = session.connect()
    found = api.snapshots(session.find(api, sandbox)["sandboxID"] if sandbox else None)
    if quiet:
        for item in found:
            print(item["snapshotID"])
        return
    if output.wants_json(form):
        output.print_json(found)
        return
    output.table(
        COLUMNS,
        (
            [
                ", ".join(item["names"]) or "-",
                item["snapshotID"],
                f"{output.age(item['updatedAt'])} ago",
                str(item["cpuCount"]),
                output.bytes_text(item["memoryMB"] << 20),
                output.bytes_text(item["diskSizeMB"] << 20),
            ]
            for item in found
        ),
        empty="No snapshots. `aenv snapshot create SANDBOX` makes one.",
    )


@command("rm", "\naenv snapshot rm checkpoint\n", of=group)
@click.argument("snapshots", nargs=-1, required=True, metavar="SNAPSHOT...", help="Names or ids.")
def rm(snapshots: tuple[str, ...]) -> None:
    """Delete snapshots. Sandboxes made from them live on."""
    api = session.connect()
    session.each(snapshots, lambda name: _delete(api, name))


def _delete(api: Api, name: str) -> str:
    with session.naming("snapshot", name):
        api.delete_snapshot(name)
    return f"{name} deleted"
