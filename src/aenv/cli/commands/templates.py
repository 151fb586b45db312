"""``aenv template ls``, ``watch`` and ``rm``."""

import click

from aenv.cli import builds, help, options, output, session
from aenv.cli.help import command
from aenv.cli.table import Column
from aenv.client.api import Api
from aenv.errors import AenvError

group = help.group(
    "template",
    "List, watch and delete templates.",
    """
aenv template ls
aenv template watch my-app
aenv template rm my-app
""",
)

COLUMNS = (
    Column("TEMPLATE", cut=True),
    Column("ID"),
    Column("BUILD"),
    Column("BUILT", right=True),
    Column("CPU", right=True, spare=1),
    Column("MEMORY", right=True, spare=1),
    Column("DISK", right=True, spare=2),
    Column("STARTED", right=True),
)


@command("ls", "\naenv template ls\naenv template ls -o json | jq '.[].names'\n", of=group)
@options.quiet_option
@options.output_option
def ls(quiet: bool, form: str | None) -> None:
    """List templates, newest first."""
    found = session.connect().templates()
    if quiet:
        for item in found:
            print(item["templateID"])
        return
    if output.wants_json(form):
        output.print_json(found)
        return
    output.table(
        COLUMNS,
        (
            [
                ", ".join(item["names"]),
                item["templateID"],
                output.state(item["buildStatus"]),
                f"{output.age(item['updatedAt'])} ago",
                str(item["cpuCount"]),
                output.bytes_text(item["memoryMB"] << 20),
                output.bytes_text(item["diskSizeMB"] << 20) if item["diskSizeMB"] else "",
                f"{item['spawnCount']} times" if item["spawnCount"] != 1 else "once",
            ]
            for item in found
        ),
        empty="No templates.",
    )


@command("watch", "\naenv template watch my-app\naenv template watch my-app --build 0b0f5f0e-...\n", of=group)
@options.template_argument(help="Name or id.")
@click.option("--build", metavar="ID", help="Id of the build; the newest if left out.")
def watch(template: str, build: str | None) -> None:
    """Show the log of a template's build, to its end if it is under way.

    The exit code is 1 if the build failed. Ctrl-C ends the watching and not the build.
    """
    api = session.connect()
    with session.naming("template", template):
        found = api.template(template)
    if build is None and not found["builds"]:
        raise AenvError(f"The server keeps no build of {template!r}.")
    build_id = build or found["builds"][0]["buildID"]
    followed = builds.Build(found["templateID"], build_id, template, is_new=False)
    printer = builds.Printer()
    for entry in builds.entries(api, followed):
        printer.show(entry)
    output.say(f"Template {template} is ready.")


@command("rm", "\naenv template rm my-app\naenv template rm my-app other-app\n", of=group)
@click.argument("templates", nargs=-1, required=True, metavar="TEMPLATE...", help="Names or ids.")
def rm(templates: tuple[str, ...]) -> None:
    """Delete templates. Builds of them are cancelled; sandboxes made from them live on."""
    api = session.connect()
    session.each(templates, lambda name: _delete(api, name))


def _delete(api: Api, name: str) -> str:
    with session.naming("template", name):
        api.delete_template(name)
    return f"{name} deleted"
