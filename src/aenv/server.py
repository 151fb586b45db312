"""``aenv-server``: one node's API, proxy and sandboxes in one process."""

import asyncio
import signal
import socket
import sqlite3
import tomllib
from pathlib import Path
from typing import Annotated

import structlog
import typer
import uvicorn
import uvloop
from pydantic import ValidationError
from pydantic_settings import SettingsError

from aenv import __version__
from aenv.accounts.credentials import Credentials
from aenv.accounts.database import open_accounts
from aenv.accounts.secrets import Secrets
from aenv.accounts.volume_files import VolumeFiles
from aenv.accounts.volumes import Volumes
from aenv.api.app import create_app
from aenv.api.context import Services
from aenv.api.server import uvicorn_config
from aenv.assembly import Progress, Running, running_node, summary
from aenv.config import Settings
from aenv.errors import AenvError
from aenv.keys import load_or_create
from aenv.log import configure
from aenv.observability.host import Host
from aenv.storage.layout import Layout
from aenv.vmm.choice import installed_in
from aenv.vmm.firecracker.release import install

log = structlog.get_logger()
cli = typer.Typer(add_completion=False, help="Run an AgentENV node.", pretty_exceptions_enable=False)

GRACE = 10  # seconds that requests under way get after SIGTERM

Home = Annotated[Path | None, typer.Option(help="State of the node. [default: /var/lib/aenv]")]


def load_settings(**overrides: object) -> Settings:
    """Settings with command-line values on top. AenvError names the field that is wrong."""
    try:
        return Settings(**{key: value for key, value in overrides.items() if value is not None})  # type: ignore[arg-type]
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise AenvError(f"The configuration is wrong: {problems}.", "See docs/reference/configuration.md.") from None
    except (SettingsError, tomllib.TOMLDecodeError, OSError) as error:
        raise AenvError(
            f"The configuration cannot be read: {error}.", "See docs/reference/configuration.md."
        ) from None


def _log_progress(message: str) -> None:
    log.info(message)


async def serve(
    settings: Settings, progress: Progress, *, stop_sandboxes: bool, ready: asyncio.Event | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. Running VMs outlive it unless ``stop_sandboxes`` (they are paused then)."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    listener = _listen(settings)
    async with running_node(settings, progress, pause_all=stop_sandboxes) as running:
        if stopping.is_set():
            return
        key = settings.api_key or load_or_create(settings.home / "api-key")
        accounts = open_accounts(Layout(settings.home, settings.runtime).accounts)
        try:
            services = _services(settings, running, accounts, key)
            await _serve_http(settings, running, services, listener, stopping, ready)
        finally:
            accounts.close()


def _services(settings: Settings, running: Running, accounts: sqlite3.Connection, key: str) -> Services:
    return Services(
        credentials=Credentials(accounts, key),
        secrets=Secrets(accounts),
        volumes=Volumes(accounts, VolumeFiles(settings.home / "volumes", settings.reserve_disk << 20)),
        sampler=running.sampler,
        logs=running.logs,
        recorder=running.recorder,
        host=Host(settings.home),
        hypervisors=running.hypervisors,
    )


def _listen(settings: Settings) -> socket.socket:
    """Bind before anything is started, so that a taken port is an error and not a half-started node."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise AenvError(
            f"Port {settings.port} on {settings.host} cannot be used: {error.strerror}.",
            "Stop what uses it, or choose another with --port.",
        ) from error
    return listener


async def _serve_http(
    settings: Settings,
    running: Running,
    services: Services,
    listener: socket.socket,
    stopping: asyncio.Event,
    ready: asyncio.Event | None,
) -> None:
    app = create_app(settings, running.node, services.credentials.valid, services)
    app.serve_templates(running.templates, settings)
    app.serve_exports(running.exports)
    running.machines.on_retire = app.proxy.drop
    server = uvicorn.Server(uvicorn_config(app, settings, grace=GRACE))
    serving = asyncio.create_task(server._serve([listener]))
    waiting = asyncio.create_task(stopping.wait())
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event to wait for
        await asyncio.sleep(0.01)
    host, port = listener.getsockname()[:2]
    log.info("node is ready", url=f"http://{host}:{port}", version=__version__, **summary(running))
    if ready is not None:
        ready.set()
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    log.info("stopping: no new requests")
    server.should_exit = True
    await serving
    waiting.cancel()


@cli.callback(invoke_without_command=True)
def main_command(
    context: typer.Context,
    home: Home = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 0.0.0.0]")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. [default: 8000]")] = None,
    stop_sandboxes: Annotated[
        bool,
        typer.Option("--stop-sandboxes", help="On SIGTERM pause running sandboxes instead of leaving them."),
    ] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Serve the API and the proxy. Builds the base template on first start."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is not None:
        return
    _run(
        lambda settings: serve(settings, _log_progress, stop_sandboxes=stop_sandboxes),
        home=home,
        host=host,
        port=port,
    )


@cli.command()
def setup(
    home: Home = None,
    firecracker: Annotated[
        bool, typer.Option("--firecracker", help="First load Firecracker from its public releases, checked.")
    ] = False,
) -> None:
    """Prepare kernel, initramfs and the base template, then exit."""

    async def prepare(settings: Settings) -> None:
        if firecracker:
            installed = await install(
                installed_in(settings.home), progress=_log_progress, sha256=settings.firecracker_sha256
            )
            log.info("Firecracker is there", path=str(installed))
        async with running_node(settings, _log_progress):
            pass

    _run(prepare, home=home)


def _run(work, **overrides: object) -> None:  # type: ignore[no-untyped-def]
    try:
        settings = load_settings(**overrides)
        configure(settings.log_level, settings.log_format)
        uvloop.run(work(settings))
    except AenvError as error:
        typer.echo(f"aenv-server: {error}", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def main() -> None:
    cli()


if __name__ == "__main__":
    main()
