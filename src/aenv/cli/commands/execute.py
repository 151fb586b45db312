"""``aenv exec``."""

import os
import re
import signal
import sys
import threading
from contextlib import suppress

import click

from aenv.cli import options, session, shell
from aenv.cli.help import command
from aenv.cli.output import complain
from aenv.client.connect import CommandRefusedError, Ended, Output, Started
from aenv.client.sandbox import ProcessStream, SandboxClient
from aenv.client.transport import UnreachableError
from aenv.errors import AenvError

GRACE = 5.0  # seconds between SIGTERM and SIGKILL for an interrupted command
INPUT_BLOCK = 32 * 1024  # bytes of input sent at once

_PLAIN = re.compile(r"[\w@%+:,./-]+")


@command(
    "exec",
    """
aenv exec i3zj python3 -c 'print(6 * 7)'
aenv exec i3zj 'ls -l | wc -l'       # one word with shell syntax runs in a shell
aenv exec i3zj sh -c 'cat > notes' < notes.txt
aenv exec -t i3zj top                # on a terminal
aenv exec -u root -w /srv i3zj apt-get update
""",
    context_settings={"allow_interspersed_args": False},
)
@options.sandbox_argument()
@click.argument(
    "arguments", nargs=-1, required=True, metavar="COMMAND...", type=click.UNPROCESSED, help="Program and arguments."
)
@click.option("-t", "--tty", "terminal", is_flag=True, help="Give it a terminal.")
@click.option("-n", "--no-stdin", is_flag=True, help="Do not pass standard input on.")
@options.user_option
@options.workdir_option
@options.environment_option
def execute(
    sandbox: str,
    arguments: tuple[str, ...],
    terminal: bool,
    no_stdin: bool,
    user: str | None,
    workdir: str | None,
    environment: tuple[tuple[str, str], ...],
) -> None:
    """Run a command in a sandbox.

    Standard input, output and errors are the command's, and so is the exit code: 128 and the signal's number if one
    ended it, 127 if there is no such program, 126 if it is none that can be run, 125 if something else kept it from
    running. Ctrl-C ends the command.
    """
    argv = command_line(list(arguments))
    envs = dict(environment)
    try:
        api = session.connect()
        found = session.find(api, sandbox)
        if terminal:
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                raise AenvError("-t needs a terminal as standard input and output.", "Leave it out.")
            code = shell.on_terminal(api, found, argv, envs=envs, cwd=workdir, user=user)
        else:
            client = session.guest(api, found)
            stream = client.start(argv, envs=envs, cwd=workdir, user=user, stdin=not no_stdin)
            code = _Command(client, stream, with_input=not no_stdin).run()
    except AenvError as error:
        complain(error.message, error.hint)
        code = shell.refused_code(error) if isinstance(error, CommandRefusedError) else shell.NOT_RUN
    raise click.exceptions.Exit(code)


def command_line(arguments: list[str]) -> list[str]:
    """Several words are a program and its arguments; a single one with more than a name in it is for a shell.

    The first word is dropped when it is ``--``. Raises AenvError when nothing is left.
    """
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments:
        raise AenvError("There is no command after --.")
    if len(arguments) > 1 or _PLAIN.fullmatch(arguments[0]):
        return arguments
    return ["/bin/sh", "-c", 'command -v bash >/dev/null 2>&1 && exec bash -l -c "$1"; exec sh -l -c "$1"', "sh",
            arguments[0]]  # fmt: skip


class _Command:
    """Copies what a command reads and writes until it ends."""

    def __init__(self, client: SandboxClient, stream: ProcessStream, *, with_input: bool) -> None:
        self._client = client
        self._stream = stream
        self._with_input = with_input
        self._pid = 0

    def run(self) -> int:
        try:
            return self._copy()
        except (KeyboardInterrupt, SystemExit) as error:
            self._end()
            if isinstance(error, SystemExit):
                raise
            return 128 + signal.SIGINT
        except BrokenPipeError:  # nobody reads our output any more
            self._end()
            return 128 + signal.SIGPIPE

    def _copy(self) -> int:
        ended: Ended | None = None
        targets = {"stdout": sys.stdout.fileno(), "stderr": sys.stderr.fileno()}
        for event in self._stream:
            match event:
                case Started(pid):
                    self._pid = pid
                    if self._with_input:
                        threading.Thread(target=self._feed, daemon=True).start()
                case Output(name, data):
                    view = memoryview(data)
                    while view:
                        view = view[os.write(targets[name], view) :]
                case Ended():
                    ended = event
        if ended is None:
            raise UnreachableError("The command's output ended without its exit code.")
        return shell.exit_code(ended)

    def _feed(self) -> None:
        """Send standard input to its end. A command that ends or closes its input first is no error."""
        with suppress(AenvError, OSError):
            data = os.read(0, INPUT_BLOCK)
            if data:
                target = self._client.input(self._pid, terminal=False)
                while data:
                    target.send(data)
                    data = os.read(0, INPUT_BLOCK)
                target.finish()
            self._client.close_stdin(self._pid)

    def _end(self) -> None:
        """Ask the command to end, and make it end when it does not."""
        if not self._pid:
            self._stream.close()
            return
        timer = threading.Timer(GRACE, self._kill)
        timer.daemon = True
        timer.start()
        with suppress(AenvError, KeyboardInterrupt):
            self._client.signal(self._pid)
            for _ in self._stream:
                pass
        timer.cancel()
        self._stream.close()

    def _kill(self) -> None:
        with suppress(AenvError):
            self._client.signal(self._pid, kill=True)
