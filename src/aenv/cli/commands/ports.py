"""``aenv port-forward``."""

import sys
import threading
from contextlib import ExitStack
from typing import Annotated

import typer

from aenv.cli import forward, session, shell
from aenv.cli.help import application, command

app = application()


@command(
    app,
    "port-forward",
    """
aenv port-forward i3zj 8000          # http://127.0.0.1:8000
aenv port-forward i3zj 8080:80 9229  # local 8080 is its port 80
aenv port-forward i3zj --tcp 5432    # any protocol, such as a database's
""",
)
def port_forward(
    sandbox: session.SandboxArgument,
    ports: Annotated[
        list[str],
        typer.Argument(metavar="PORT...", help="PORT, or LOCAL:PORT if it is another one here.", show_default=False),
    ],
    address: Annotated[str, typer.Option("--address", help="Local address to listen on.")] = "127.0.0.1",
    tcp: Annotated[bool, typer.Option("--tcp", help="Not HTTP: relay bytes. Needs bash in the sandbox.")] = False,
) -> None:
    """Reach a server in a sandbox under a local port, until Ctrl-C.

    HTTP, WebSockets and event streams; with --tcp anything, more slowly. The server may listen on 127.0.0.1 in the
    sandbox. The sandbox stays alive meanwhile.
    """
    wanted = [forward.parse(text) for text in ports]
    api = session.connect()
    client = session.guest(api, session.find(api, sandbox))
    with ExitStack() as stack:
        forwarders = []
        for each in wanted:
            made = forward.Forwarder(api.transport, client, each, address, tcp=tcp)
            stack.callback(made.close)
            forwarders.append((made, each.remote))
        stack.enter_context(shell.Attended(api, client.sandbox_id))
        for made, remote in forwarders:
            made.start()
            place = f"{address}:{made.port}" if tcp else f"http://{address}:{made.port}"
            print(f"{place} -> {client.sandbox_id}:{remote}", file=sys.stderr, flush=True)
        threading.Event().wait()
