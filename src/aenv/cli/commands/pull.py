"""``aenv pull``."""

import sys
from typing import Annotated

import typer

from aenv.cli import builds, output, session
from aenv.cli.help import application, command
from aenv.client.api import Json
from aenv.errors import AenvError

app = application()

NameOption = Annotated[
    str | None, typer.Option("-n", "--name", help="Name of the template, or name:tag.", show_default=False)
]
CpuOption = Annotated[int | None, typer.Option("--cpu", help="vCPUs of its sandboxes.", show_default=False)]
MemoryOption = Annotated[int | None, typer.Option("--mem", metavar="MIB", help="Memory.", show_default=False)]
StartOption = Annotated[
    str | None,
    typer.Option("--start", metavar="COMMAND", help="Runs when the template is made; sandboxes find it running."),
]
ReadyOption = Annotated[
    str | None, typer.Option("--ready", metavar="COMMAND", help="Succeeds when the start command is ready.")
]
PortOption = Annotated[
    int | None, typer.Option("--ready-port", metavar="PORT", min=1, max=65535, help="Ready when this port is open.")
]
FreshOption = Annotated[bool, typer.Option("--no-cache", help="Do everything again.")]


@command(
    app,
    "pull",
    """
aenv pull ubuntu:24.04               # template ubuntu
aenv pull docker.io/library/redis:7 --name redis --start redis-server --ready-port 6379
aenv pull registry.example.org/team/app --username me --password-stdin < token
""",
)
def pull(
    image: Annotated[str, typer.Argument(help="Reference of an OCI or Docker image.", show_default=False)],
    name: NameOption = None,
    start: StartOption = None,
    ready: ReadyOption = None,
    ready_port: PortOption = None,
    cpu: CpuOption = None,
    memory: MemoryOption = None,
    username: Annotated[str | None, typer.Option("--username", help="For the image's registry.")] = None,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read the registry's password from standard input.")
    ] = False,
    fresh: FreshOption = False,
    form: output.OutputOption = None,
) -> None:
    """Make a template from a container image."""
    if (username is None) == password_stdin:
        raise AenvError("--username and --password-stdin go together.")
    body: Json = {"fromImage": image, "force": fresh, **start_commands(start, ready, ready_port)}
    if username is not None:
        password = sys.stdin.read().strip()
        body["fromImageRegistry"] = {"type": "registry", "username": username, "password": password}
    api = session.connect()
    build = builds.request(api, name or default_name(image), cpu=cpu, memory=memory)
    builds.run(api, build, body, builds.Printer().show)
    report(build, form)


def start_commands(start: str | None, ready: str | None, port: int | None) -> Json:
    """The body's part for what runs in the template. Raises AenvError."""
    if ready is not None and port is not None:
        raise AenvError("--ready and --ready-port say the same thing twice.", "Use one of them.")
    if port is not None:
        ready = port_check(port)
    return ({"startCmd": start} if start else {}) | ({"readyCmd": ready} if ready else {})


def port_check(port: int) -> str:
    """A command that succeeds when something listens at a TCP port. It needs nothing but grep.

    State 0A of /proc/net/tcp is LISTEN; addresses are hexadecimal, see proc_net_tcp in the kernel's documentation.
    """
    return f"grep -qs ':{port:04X} [0-9A-F]*:0000 0A' /proc/net/tcp /proc/net/tcp6"


def default_name(image: str) -> str:
    """``docker.io/library/ubuntu:24.04`` -> ``ubuntu``."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0].lower()


def report(build: builds.Build, form: output.Format | None) -> None:
    """Say what was made."""
    if output.wants_json(form):
        output.print_json({"templateID": build.template_id, "buildID": build.build_id, "name": build.name})
    else:
        print(f"Template {build.name} is ready: aenv start {build.name}")
