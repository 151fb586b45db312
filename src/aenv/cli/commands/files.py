"""``aenv upload`` and ``download``."""

from pathlib import Path

import click

from aenv.cli import options, output, session, transfer
from aenv.cli.help import command


@command(
    "upload",
    """
aenv upload i3zj main.py             # into its working folder, most often a home
aenv upload i3zj src tests /srv/app/ # a folder or several things into a folder
aenv upload i3zj config.toml /etc/app.toml -u root
""",
)
@options.sandbox_argument()
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    metavar="SOURCE... [TARGET]",
    help="Files or folders here, then the path there; its working folder if there is one path only.",
)
@options.user_option
def upload(sandbox: str, paths: tuple[str, ...], user: str | None) -> None:
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
    "download",
    """
aenv download i3zj results.json      # into the current folder
aenv download i3zj /var/log logs
""",
)
@options.sandbox_argument()
@click.argument("source", metavar="SOURCE", help="Path in the sandbox, from its working folder.")
@click.argument("target", default=".", metavar="TARGET", help="Path here.")
@options.user_option
def download(sandbox: str, source: str, target: str, user: str | None) -> None:
    """Copy a file or folder out of a sandbox.

    Into the target if that is a folder, else to it. A download that breaks off leaves nothing.
    """
    api = session.connect()
    client = session.guest(api, session.find(api, sandbox))
    placed = transfer.download(client, source, Path(target), user=user)
    output.say(f"{client.sandbox_id}:{source} -> {placed}")
