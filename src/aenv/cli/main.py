"""``aenv``: the command line. This module names the commands; ``aenv.cli.commands`` has them."""

import os
import signal
import sys

import click

from aenv import __version__
from aenv.cli.help import WIDTH, LazyGroup
from aenv.cli.output import complain
from aenv.errors import AenvError

_AT = "aenv.cli.commands."

SECTIONS = (
    (
        "Sandboxes:",
        (
            ("start", _AT + "start:start", "Start a sandbox and open a shell in it"),
            ("connect", _AT + "start:connect", "Open a shell in a sandbox; a paused one is resumed"),
            ("exec", _AT + "execute:execute", "Run a command in a sandbox"),
            ("ls", _AT + "listing:ls", "List sandboxes"),
            ("info", _AT + "listing:info", "Show everything about a sandbox"),
            ("tree", _AT + "listing:tree", "Show which sandbox was forked from which"),
            ("pause", _AT + "lifecycle:pause", "Pause sandboxes to disk"),
            ("resume", _AT + "lifecycle:resume", "Resume paused sandboxes"),
            ("fork", _AT + "lifecycle:fork", "Start copies of a sandbox as it is now"),
            ("timeout", _AT + "lifecycle:timeout", "Set how long a sandbox lives from now on"),
            ("rm", _AT + "lifecycle:rm", "Delete sandboxes"),
        ),
    ),
    (
        "Files and ports:",
        (
            ("upload", _AT + "files:upload", "Copy files or folders into a sandbox"),
            ("download", _AT + "files:download", "Copy a file or folder out of a sandbox"),
            ("port-forward", _AT + "ports:port_forward", "Reach a server in a sandbox under a local port"),
        ),
    ),
    (
        "Watching:",
        (
            ("logs", _AT + "logs:logs", "Show what happened to a sandbox, and its console"),
            ("metrics", _AT + "metrics:metrics", "Show processor, memory and disk use"),
        ),
    ),
    (
        "Templates and snapshots:",
        (
            ("pull", _AT + "pull:pull", "Make a template from a container image"),
            ("build", _AT + "build:build", "Make a template from a Dockerfile"),
            ("template", _AT + "templates:group", "List, watch and delete templates"),
            ("snapshot", _AT + "snapshots:group", "Make, list and delete snapshots"),
            ("image", _AT + "images:group", "List and remove cached container images"),
        ),
    ),
    (
        "Server and setup:",
        (
            ("auth", _AT + "auth:group", "Log in to a server, show or forget the login"),
            ("doctor", _AT + "doctor:doctor", "Check the connection, the server and this machine"),
            ("node", _AT + "nodes:group", "Show the server's nodes"),
            ("completion", _AT + "completion:completion", "Print the completion script of a shell"),
        ),
    ),
)

COMPLETE = "_AENV_COMPLETE"  # set by the scripts of `aenv completion`

EXAMPLES = """
aenv start base                      # a sandbox with a shell; it is kept when the shell ends
aenv exec i3zj... python3 -V         # run a command; the id may be shortened
aenv fork i3zj... --count 4          # four copies, memory and processes included
aenv pull ubuntu:24.04               # any container image becomes a template
"""


class Root(LazyGroup):
    sections = SECTIONS
    aliases = {"cn": "connect", "delete": "rm", "list": "ls"}  # noqa: RUF012


@click.group(
    "aenv",
    cls=Root,
    epilog=EXAMPLES,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
@click.version_option(__version__, message="%(version)s", help="Print the version and exit.")
def root() -> None:
    """Isolated Linux computers for AI agents.

    The server and its key come from AENV_API_URL and AENV_API_KEY, `aenv auth login`, or the node on this machine.
    """


def run(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C, or what a command says."""
    try:
        code = root.main(arguments, prog_name="aenv", complete_var=COMPLETE, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        complain(error.format_message(), f"`{context.command_path} --help` shows how it is used." if context else "")
        return error.exit_code
    except AenvError as error:
        complain(error.message, error.hint)
        return 1
    except (KeyboardInterrupt, click.Abort):
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    # A terminated command cleans up like an interrupted one.
    def terminated(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGHUP, terminated)
    code = run()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is done: Ctrl-C would only change the exit code
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    main()
