"""``aenv snapshot create``, ``ls``, ``publish`` and ``rm``."""

import sys

import click

from aenv.cli import help, options, output, session
from aenv.cli.help import command
from aenv.cli.table import Column
from aenv.client.api import Api, Json
from aenv.errors import AenvError

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

    with session.undoable(lambda: api.create_snapshot(sandbox_id, name, memory=not disk_only), undo) as made:
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


@command(
    "publish",
    """
aenv snapshot publish checkpoint registry.example.org/team/app:1
aenv snapshot publish checkpoint registry.example.org/team/app:1 --username me --password-stdin < token
aenv start --cold registry.example.org/team/app:1
""",
    of=group,
)
@click.argument("snapshot", metavar="SNAPSHOT", help="Name or id.")
@click.argument("image", metavar="IMAGE", help="Where to: registry/repository:tag.")
@click.option("--username", metavar="NAME", help="For the registry; the node's own credentials if left out.")
@click.option("--password-stdin", is_flag=True, help="Read the registry's password from standard input.")
@click.option("--with-env", is_flag=True, help="With its environment variables, which may be secrets.")
@options.output_option
def publish(
    snapshot: str, image: str, username: str | None, password_stdin: bool, with_env: bool, form: str | None
) -> None:
    """Push a snapshot's root file system to a registry, as an image that starts on demand.

    What the registry has already is not sent again. Memory and running programs are not part of it.
    """
    if (username is None) == password_stdin:
        raise AenvError("--username and --password-stdin go together.")
    body: Json = {"image": image, "environment": with_env}
    if username is not None:
        body |= {"username": username, "password": sys.stdin.read().strip()}
    with session.naming("snapshot", snapshot):
        done = session.connect().publish_snapshot(snapshot, body)
    if output.wants_json(form):
        output.print_json(done)
        return
    sent = f"{done['pushedLayers']} of {done['layers']} layers sent, {output.bytes_text(done['pushedBytes'])}"
    print(f"{done['image']} published ({sent}): aenv start --cold {done['image']}")


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
