"""``aenv port-forward``."""

import sys
import threading
from contextlib import ExitStack

import click

from aenv.cli import forward, options, session, shell
from aenv.cli.help import command


@command(
    "port-forward",
    """
aenv port-forward i3zj 8000          # http://127.0.0.1:8000
aenv port-forward i3zj 8080:80 9229  # local 8080 is its port 80
aenv port-forward i3zj --tcp 5432    # any protocol, such as a database's
""",
)
@options.sandbox_argument()
@click.argument(
    "ports", nargs=-1, required=True, metavar="PORT...", help="PORT, or LOCAL:PORT if it is another one here."
)
@click.option(
    "--address", metavar="ADDRESS", default="127.0.0.1", show_default=True, help="Local address to listen on."
)
@click.option("--tcp", is_flag=True, help="Not HTTP: relay bytes. Needs bash in the sandbox.")
def port_forward(sandbox: str, ports: tuple[str, ...], address: str, tcp: bool) -> None:
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
