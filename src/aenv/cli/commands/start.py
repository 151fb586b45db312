"""``aenv start`` and ``connect``."""

import sys

import click

from aenv.cli import options, output, session, shell
from aenv.cli.help import command
from aenv.client.api import Api, Json
from aenv.errors import AenvError


@command(
    "start",
    """
aenv start base                      # a shell; the sandbox is kept when the shell ends
aenv start base --rm                 # delete it when the shell ends
ID=$(aenv start base -dq --timeout 2h)
aenv start my-app -e MODE=test -m project=demo
aenv start base --cpu 2 --mem 1024   # makes a template of that size on the first use
aenv start --cold ubuntu:24.04       # boots a container image; no template is made
""",
)
@options.template_argument(default="base", help="Name or id of a template or a snapshot; with --cold, an image.")
@click.option("--cold", is_flag=True, help="Boot the container image of that name.")
@click.option("-d", "--detach", is_flag=True, help="Only start it; open no shell.")
@click.option("--rm", "remove", is_flag=True, help="Delete the sandbox when the shell ends.")
@options.timeout_option("How long it lives: 90s, 15m, 2h. Shells prolong it.")
@click.option(
    "--on-timeout",
    type=click.Choice(["pause", "kill"]),
    metavar="ACTION",
    default="pause",
    show_default=True,
    help="pause or kill, when its time is over.",
)
@click.option(
    "--secure/--no-secure",
    default=True,
    show_default=True,
    help="Whether its own API asks for an access token.",
)
@click.option("--no-internet", is_flag=True, help="No way out of the sandbox.")
@options.cpu_option
@options.memory_option
@click.option("--disk", type=click.IntRange(min=1), metavar="MIB", help="Root disk, with --cold.")
@options.environment_option
@options.metadata_option
@options.user_option
@options.quiet_option
@options.output_option
def start(
    template: str,
    cold: bool,
    detach: bool,
    remove: bool,
    timeout: int,
    on_timeout: str,
    secure: bool,
    no_internet: bool,
    cpu: int | None,
    memory: int | None,
    disk: int | None,
    environment: tuple[tuple[str, str], ...],
    metadata: tuple[tuple[str, str], ...],
    user: str | None,
    quiet: bool,
    form: str | None,
) -> None:
    """Start a sandbox and open a shell in it.

    Without a terminal, or with --detach, it only starts and prints the sandbox. When its time is over it is paused.
    """
    api = session.connect()
    body: Json = {
        "timeout": timeout,
        "autoPause": on_timeout == "pause",
        "secure": secure,
        "envVars": dict(environment),
        "metadata": dict(metadata),
    }
    if no_internet:
        body["allowInternetAccess"] = False
    if disk is not None and not cold:
        raise AenvError("--disk is for --cold.", "A template has the disk it was made with.")
    with session.naming("image" if cold else "template or snapshot", template):
        if cold:
            sizes = {"cpuCount": cpu, "memoryMB": memory, "diskSizeMB": disk}
            body |= {"image": template} | {name: value for name, value in sizes.items() if value is not None}
        elif cpu is not None or memory is not None:
            from aenv.cli.sizes import sized

            body["templateID"] = sized(api, template, cpu, memory)
        else:
            body["templateID"] = template
        create = api.create_cold if cold else api.create
        with session.undoable(lambda: create(body), lambda made: api.kill(made["sandboxID"])) as made:
            sandbox_id: str = made["sandboxID"]
            if detach or not (sys.stdin.isatty() and sys.stdout.isatty()):
                _print(api, sandbox_id, quiet, form)
                return
            output.say(f"Sandbox {sandbox_id} started.")
    try:
        code = shell.on_terminal(api, api.sandbox(sandbox_id), shell.LOGIN_SHELL, user=user)
    finally:
        if remove:
            api.kill(sandbox_id)
            output.say(f"Sandbox {sandbox_id} deleted.")
    if not remove:
        _left(api, sandbox_id)
    raise click.exceptions.Exit(code)


def _print(api: Api, sandbox_id: str, quiet: bool, form: str | None) -> None:
    if quiet:
        print(sandbox_id)
    elif output.wants_json(form):
        output.print_json(api.sandbox(sandbox_id))
    else:
        print(f"Sandbox {sandbox_id} started.")
        print(f"  aenv connect {sandbox_id}    opens a shell in it")
        print(f"  aenv rm {sandbox_id}         deletes it")


def _left(api: Api, sandbox_id: str) -> None:
    """After a shell: say that the sandbox is still there."""
    try:
        found = api.sandbox(sandbox_id)
    except AenvError:
        return
    if found["state"] == "running":
        then = "is paused" if found["lifecycle"]["onTimeout"] == "pause" else "is deleted"
        left = output.left(found["endAt"])
        output.say(f"Sandbox {sandbox_id} runs on and {then} in {left}. Back: aenv connect {sandbox_id}")


@command(
    "connect",
    """
aenv connect i3zj...
aenv cn i3zj -u root                 # cn is short for connect
aenv connect i3zj --pid 412          # back to a shell whose connection was lost
""",
)
@options.sandbox_argument()
@options.timeout_option("How long it lives after the shell at least.")
@click.option("--pid", type=int, metavar="N", help="Go back to this program instead of opening a shell.")
@options.user_option
@options.workdir_option
def connect(sandbox: str, timeout: int, pid: int | None, user: str | None, workdir: str | None) -> None:
    """Open a shell in a sandbox; a paused one is resumed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise AenvError("A shell needs a terminal.", f"`aenv exec {sandbox} COMMAND` runs a command without one.")
    api = session.connect()
    found = session.find(api, sandbox)
    sandbox_id = found["sandboxID"]
    api.connect(sandbox_id, timeout)
    code = shell.on_terminal(api, api.sandbox(sandbox_id), shell.LOGIN_SHELL, user=user, cwd=workdir, pid=pid)
    _left(api, sandbox_id)
    raise click.exceptions.Exit(code)
