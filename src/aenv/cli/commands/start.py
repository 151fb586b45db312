"""``aenv start`` and ``connect``."""

import sys
from typing import Annotated

import typer

from aenv.cli import output, session, shell
from aenv.cli.help import application, command
from aenv.client.api import Api, Json
from aenv.errors import AenvError

app = application()

DEFAULT_TIMEOUT = "5m"

TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="How long it lives: 90s, 15m, 2h. Shells prolong it.")
]
UserOption = Annotated[
    str | None, typer.Option("-u", "--user", help="User in the sandbox; its default user if left out.")
]
WorkdirOption = Annotated[
    str | None, typer.Option("-w", "--workdir", metavar="PATH", help="Folder to start in.", show_default=False)
]


@command(
    app,
    "start",
    """
aenv start base                      # a shell; the sandbox is kept when the shell ends
aenv start base --rm                 # delete it when the shell ends
ID=$(aenv start base -dq --timeout 2h)
aenv start my-app -e MODE=test -m project=demo
aenv start base --cpu 2 --mem 1024   # makes a template of that size on the first use
""",
)
def start(
    template: Annotated[
        str,
        typer.Argument(help="Name or id of a template or a snapshot.", autocompletion=session.complete_template),
    ] = "base",
    detach: Annotated[bool, typer.Option("-d", "--detach", help="Only start it; open no shell.")] = False,
    remove: Annotated[bool, typer.Option("--rm", help="Delete the sandbox when the shell ends.")] = False,
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    on_timeout: Annotated[
        str, typer.Option("--on-timeout", metavar="ACTION", help="pause or kill, when its time is over.")
    ] = "pause",
    secure: Annotated[
        bool, typer.Option("--secure/--no-secure", help="Whether its own API asks for an access token.")
    ] = True,
    no_internet: Annotated[bool, typer.Option("--no-internet", help="No way out of the sandbox.")] = False,
    cpu: Annotated[int | None, typer.Option("--cpu", help="vCPUs; the template's if left out.")] = None,
    memory: Annotated[
        int | None, typer.Option("--mem", metavar="MIB", help="Memory; the template's if left out.")
    ] = None,
    environment: Annotated[
        list[str] | None, typer.Option("-e", "--env", metavar="NAME=VALUE", help="Variable of all its commands.")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option("-m", "--metadata", metavar="NAME=VALUE", help="To find it by; see `aenv ls`.")
    ] = None,
    user: UserOption = None,
    quiet: output.QuietOption = False,
    form: output.OutputOption = None,
) -> None:
    """Start a sandbox and open a shell in it.

    Without a terminal, or with --detach, it only starts and prints the sandbox. When its time is over it is paused.
    """
    if on_timeout not in ("pause", "kill"):
        raise AenvError(f"--on-timeout is pause or kill, not {on_timeout!r}.")
    api = session.connect()
    body: Json = {
        "templateID": template,
        "timeout": session.seconds(timeout),
        "autoPause": on_timeout == "pause",
        "secure": secure,
        "envVars": session.pairs(environment or [], "variable"),
        "metadata": session.pairs(metadata or [], "metadata"),
    }
    if no_internet:
        body["allowInternetAccess"] = False
    if cpu is not None or memory is not None:
        from aenv.cli.sizes import sized

        body["templateID"] = sized(api, template, cpu, memory)
    made = session.undoable(lambda: api.create(body), lambda made: api.kill(made["sandboxID"]))
    sandbox_id = made["sandboxID"]
    if detach or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print(api, sandbox_id, quiet, form)
        return
    output.say(f"Sandbox {sandbox_id} started.")
    try:
        code = shell.on_terminal(api, api.sandbox(sandbox_id), shell.LOGIN_SHELL, user=user)
    finally:
        _left(api, sandbox_id, remove)
    raise typer.Exit(code)


def _print(api: Api, sandbox_id: str, quiet: bool, form: output.Format | None) -> None:
    if quiet:
        print(sandbox_id)
    elif output.wants_json(form):
        output.print_json(api.sandbox(sandbox_id))
    else:
        print(f"Sandbox {sandbox_id} started.")
        print(f"  aenv connect {sandbox_id}    opens a shell in it")
        print(f"  aenv rm {sandbox_id}         deletes it")


def _left(api: Api, sandbox_id: str, remove: bool) -> None:
    """After a shell: delete the sandbox, or say that it is still there."""
    if remove:
        api.kill(sandbox_id)
        output.say(f"Sandbox {sandbox_id} deleted.")
        return
    try:
        found = api.sandbox(sandbox_id)
    except AenvError:
        return
    if found["state"] == "running":
        left = output.duration_text((output.moment(found["endAt"]) - output.moment(_now())).total_seconds())
        then = "is paused" if found["lifecycle"]["onTimeout"] == "pause" else "is deleted"
        output.say(f"Sandbox {sandbox_id} runs on and {then} in {left}. Back: aenv connect {sandbox_id}")


def _now() -> str:
    from datetime import UTC, datetime

    return datetime.now(UTC).isoformat()


@command(
    app,
    "connect",
    """
aenv connect i3zj...
aenv cn i3zj -u root                 # cn is short for connect
aenv connect i3zj --pid 412          # back to a shell whose connection was lost
""",
)
def connect(
    sandbox: session.SandboxArgument,
    timeout: TimeoutOption = DEFAULT_TIMEOUT,
    pid: Annotated[
        int | None, typer.Option("--pid", help="Go back to this program instead of opening a shell.")
    ] = None,
    user: UserOption = None,
    workdir: WorkdirOption = None,
) -> None:
    """Open a shell in a sandbox; a paused one is resumed."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise AenvError("A shell needs a terminal.", f"`aenv exec {sandbox} COMMAND` runs a command without one.")
    api = session.connect()
    found = session.find(api, sandbox)
    sandbox_id = found["sandboxID"]
    api.connect(sandbox_id, session.seconds(timeout))
    try:
        code = shell.on_terminal(api, api.sandbox(sandbox_id), shell.LOGIN_SHELL, user=user, cwd=workdir, pid=pid)
    finally:
        _left(api, sandbox_id, remove=False)
    raise typer.Exit(code)
