"""``aenv template ls``, ``watch`` and ``rm``."""

from typing import Annotated

import typer

from aenv.cli import builds, output, session
from aenv.cli.help import command, group
from aenv.cli.main import complain
from aenv.errors import AenvError

app = group(
    "List, watch and delete templates.",
    """
aenv template ls
aenv template watch my-app
aenv template rm my-app
""",
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="TEMPLATE", help="Name or id.", show_default=False, autocompletion=session.complete_template
    ),
]


@command(app, "ls", "\naenv template ls\naenv template ls -o json | jq '.[].names'\n")
def ls(quiet: output.QuietOption = False, form: output.OutputOption = None) -> None:
    """List templates, newest first."""
    found = session.connect().templates()
    if quiet:
        for item in found:
            print(item["templateID"])
        return
    if output.wants_json(form):
        output.print_json(found)
        return
    from rich.markup import escape

    output.table(
        ["TEMPLATE", "ID", "BUILD", "BUILT", "CPU", "MEMORY", "DISK", "STARTED"],
        (
            [
                escape(", ".join(item["names"])),
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
        right=("CPU", "MEMORY", "DISK"),
        empty="No templates.",
    )


@command(app, "watch", "\naenv template watch my-app\naenv template watch my-app --build 0b0f5f0e-...\n")
def watch(
    template: Name,
    build: Annotated[
        str | None, typer.Option("--build", metavar="ID", help="Id of the build; the newest if left out.")
    ] = None,
) -> None:
    """Show the log of a template's build, to its end if it is under way.

    The exit code is 1 if the build failed. Ctrl-C ends the watching and not the build.
    """
    api = session.connect()
    found = api.template(template)
    build_id = build or found["builds"][0]["buildID"]
    followed = builds.Build(found["templateID"], build_id, template, is_new=False)
    printer = builds.Printer()
    for entry in builds.entries(api, followed):
        printer.show(entry)
    output.say(f"Template {template} is ready.")


@command(app, "rm", "\naenv template rm my-app\naenv template rm my-app other-app\n")
def rm(
    templates: Annotated[list[str], typer.Argument(metavar="TEMPLATE...", help="Names or ids.", show_default=False)],
) -> None:
    """Delete templates. Builds of them are cancelled; sandboxes made from them live on."""
    api = session.connect()
    failed = False
    for name in templates:
        try:
            api.delete_template(name)
        except AenvError as error:
            complain(error.message, error.hint)
            failed = True
        else:
            output.say(f"{name} deleted")
    if failed:
        raise typer.Exit(1)
