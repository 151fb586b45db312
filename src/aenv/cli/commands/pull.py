"""``aenv pull``."""

import sys
from collections.abc import Callable

import click

from aenv.cli import builds, options, output, session
from aenv.cli.help import command
from aenv.cli.options import Function
from aenv.client.api import Json
from aenv.template.ready import port_check


def template_options(function: Function) -> Function:
    """What can be said about any template that is made."""
    added: list[Callable[[Function], Function]] = [
        click.option("-n", "--name", metavar="NAME", help="Name of the template, or name:tag."),
        click.option("--start", metavar="COMMAND", help="Runs when the template is made; sandboxes find it running."),
        click.option("--ready", metavar="COMMAND", help="Succeeds when the start command is ready."),
        click.option(
            "--ready-port",
            type=click.IntRange(1, 65535, clamp=False),
            metavar="PORT",
            help="Ready when this port is open.",
        ),
        options.cpu_option,
        options.memory_option,
        click.option("--no-cache", "fresh", is_flag=True, help="Do everything again."),
    ]
    for option in reversed(added):
        function = option(function)
    return function


@command(
    "pull",
    """
aenv pull ubuntu:24.04               # template ubuntu
aenv pull docker.io/library/redis:7 --name redis --start redis-server --ready-port 6379
aenv pull registry.example.org/team/app --username me --password-stdin < token
""",
)
@click.argument("image", metavar="IMAGE", help="Reference of an OCI or Docker image.")
@template_options
@click.option("--no-start", is_flag=True, help="Do not run the image's ENTRYPOINT and CMD.")
@click.option("--username", metavar="NAME", help="For the image's registry.")
@click.option("--password-stdin", is_flag=True, help="Read the registry's password from standard input.")
@options.output_option
def pull(
    image: str,
    name: str | None,
    start: str | None,
    ready: str | None,
    ready_port: int | None,
    cpu: int | None,
    memory: int | None,
    fresh: bool,
    no_start: bool,
    username: str | None,
    password_stdin: bool,
    form: str | None,
) -> None:
    """Make a template from a container image.

    The image's ENTRYPOINT and CMD run when the template is made, and sandboxes find them running; ready is when the
    first port of EXPOSE is open, unless --ready or --ready-port say otherwise. An image whose command ends, as a
    shell does, or fails, becomes a template without it.
    """
    if (username is None) == password_stdin:
        raise click.UsageError("--username and --password-stdin go together.")
    body: Json = {"fromImage": image, "force": fresh, **start_commands(start, ready, ready_port)}
    if start is None and not no_start:
        body["imageCommand"] = ""
    if username is not None:
        password = sys.stdin.read().strip()
        body["fromImageRegistry"] = {"type": "registry", "username": username, "password": password}
    api = session.connect()
    build = builds.request(api, name or default_name(image), cpu=cpu, memory=memory)
    builds.run(api, build, body, builds.Printer().show)
    report(build, form)


def start_commands(start: str | None, ready: str | None, port: int | None) -> Json:
    """The body's part for what runs in the template. Raises UsageError."""
    if ready is not None and port is not None:
        raise click.UsageError("--ready and --ready-port say the same thing twice: use one of them.")
    if port is not None:
        ready = port_check(port)
    return ({"startCmd": start} if start else {}) | ({"readyCmd": ready} if ready else {})


def default_name(image: str) -> str:
    """``docker.io/library/ubuntu:24.04`` -> ``ubuntu``."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0].lower()


def report(build: builds.Build, form: str | None) -> None:
    """Say what was made."""
    if output.wants_json(form):
        output.print_json({"templateID": build.template_id, "buildID": build.build_id, "name": build.name})
    else:
        print(f"Template {build.name} is ready: aenv start {build.name}")
