"""``aenv upload`` and ``download``."""

from pathlib import Path
from typing import Annotated

import typer

from aenv.cli import output, session, transfer
from aenv.cli.commands.start import UserOption
from aenv.cli.help import application, command

app = application()


@command(
    app,
    "upload",
    """
aenv upload i3zj main.py             # into its working folder, most often a home
aenv upload i3zj src tests /srv/app/ # a folder or several things into a folder
aenv upload i3zj config.toml /etc/app.toml -u root
""",
)
def upload(
    sandbox: session.SandboxArgument,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... [TARGET]",
            help="Files or folders here, then the path there; its working folder if there is one path only.",
            show_default=False,
        ),
    ],
    user: UserOption = None,
) -> None:
    """Copy files or folders into a sandbox.

    Into the target if that is a folder or ends with /, else to it. What is there is replaced; folders are merged.
    """
    api = session.connect()
    client = session.guest(api, session.find(api, sandbox))
    sources, target = (paths, "") if len(paths) == 1 else (paths[:-1], paths[-1])
    if len(sources) > 1 and not target.endswith("/"):
        target += "/"
    for source in sources:
        placed = transfer.upload(client, Path(source), target, user=user)
        output.say(f"{source} -> {client.sandbox_id}:{placed}")


@command(
    app,
    "download",
    """
aenv download i3zj results.json      # into the current folder
aenv download i3zj /var/log logs
""",
)
def download(
    sandbox: session.SandboxArgument,
    source: Annotated[str, typer.Argument(help="Path in the sandbox, from its working folder.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="Path here.")] = Path(),
    user: UserOption = None,
) -> None:
    """Copy a file or folder out of a sandbox.

    Into the target if that is a folder, else to it. A download that breaks off leaves nothing.
    """
    api = session.connect()
    client = session.guest(api, session.find(api, sandbox))
    placed = transfer.download(client, source, target, user=user)
    output.say(f"{client.sandbox_id}:{source} -> {placed}")
