"""``aenv``: the command line. This module names the commands; ``aenv.cli.commands`` has them."""

import os
import signal
import sys
from typing import Annotated, Any

import typer
from typer import _click as click

from aenv import __version__
from aenv.cli.help import LazyGroup
from aenv.errors import AenvError

_AT = "aenv.cli.commands."

SECTIONS = (
    (
        "Sandboxes:",
        (
            ("start", _AT + "start", "Start a sandbox and open a shell in it"),
            ("connect", _AT + "start", "Open a shell in a sandbox; a paused one is resumed"),
            ("exec", _AT + "execute", "Run a command in a sandbox"),
            ("ls", _AT + "listing", "List sandboxes"),
            ("info", _AT + "listing", "Show everything about a sandbox"),
            ("tree", _AT + "listing", "Show which sandbox was forked from which"),
            ("pause", _AT + "lifecycle", "Pause sandboxes to disk"),
            ("resume", _AT + "lifecycle", "Resume paused sandboxes"),
            ("fork", _AT + "lifecycle", "Start copies of a sandbox as it is now"),
            ("timeout", _AT + "lifecycle", "Set how long a sandbox lives from now on"),
            ("rm", _AT + "lifecycle", "Delete sandboxes"),
        ),
    ),
    (
        "Files and ports:",
        (
            ("upload", _AT + "files", "Copy files or folders into a sandbox"),
            ("download", _AT + "files", "Copy a file or folder out of a sandbox"),
            ("port-forward", _AT + "ports", "Reach a server in a sandbox under a local port"),
        ),
    ),
    (
        "Watching:",
        (
            ("logs", _AT + "logs", "Show what happened to a sandbox, and its console"),
            ("metrics", _AT + "metrics", "Show processor, memory and disk use"),
        ),
    ),
    (
        "Templates and snapshots:",
        (
            ("pull", _AT + "pull", "Make a template from a container image"),
            ("build", _AT + "build", "Make a template from a Dockerfile"),
            ("template", _AT + "templates", "List, watch and delete templates"),
            ("snapshot", _AT + "snapshots", "Make, list and delete snapshots"),
        ),
    ),
    (
        "Server and setup:",
        (
            ("auth", _AT + "auth", "Log in to a server, show or forget the login"),
            ("doctor", _AT + "doctor", "Check the connection, the server and this machine"),
            ("node", _AT + "nodes", "Show the server's nodes"),
            ("completion", _AT + "completion", "Print the completion script of a shell"),
        ),
    ),
)

_COMPLETE = "_AENV_COMPLETE"  # set by the scripts of `aenv completion`

EXAMPLES = """
aenv start base                      # a sandbox with a shell; it is kept when the shell ends
aenv exec i3zj... python3 -V         # run a command; the id may be shortened
aenv fork i3zj... --count 4          # four copies, memory and processes included
aenv pull ubuntu:24.04               # any container image becomes a template
"""


class Root(LazyGroup):
    sections = SECTIONS
    aliases = {"cn": "connect", "delete": "rm", "list": "ls"}  # noqa: RUF012


app = typer.Typer(
    cls=Root,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Isolated Linux computers for AI agents.

    The server and its key come from AENV_API_URL and AENV_API_KEY, `aenv auth login`, or the node on this machine.
    """


def run(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C, or what a command says."""
    root: Any = typer.main.get_command(app)
    if _COMPLETE in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    try:
        code = root.main(arguments, prog_name="aenv", complete_var=_COMPLETE, standalone_mode=False)
    except click.exceptions.ClickException as error:
        _usage_error(error)
        return error.exit_code
    except AenvError as error:
        complain(error.message, error.hint)
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain again when it flushes at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code if isinstance(code, int) else 0


def complain(message: str, hint: str = "") -> None:
    """An error on standard error: what happened, then what to do."""
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    start, dim, end = ("\033[1;31m", "\033[2m", "\033[0m") if colours else ("", "", "")
    print(f"{start}error:{end} {message}", file=sys.stderr)
    if hint:
        print(f"{dim}{hint}{end}", file=sys.stderr)


def _usage_error(error: click.exceptions.ClickException) -> None:
    context = getattr(error, "ctx", None)
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        print(error.format_message(), file=sys.stderr)
        return
    hint = f"`{context.command_path} --help` shows how it is used." if context is not None else ""
    complain(error.format_message(), hint)


def main() -> None:
    # A terminated command cleans up like an interrupted one.
    def terminated(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGHUP, terminated)
    code = run()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


if __name__ == "__main__":
    main()
