"""``aenv metrics``."""

import time
from typing import Annotated

import typer

from aenv.cli import output, session
from aenv.cli.help import application, command
from aenv.client.api import Api, Json

app = application()

INTERVAL = 5.0  # seconds; the server's own samples are as far apart by default


@command(
    app,
    "metrics",
    """
aenv metrics                         # every running sandbox
aenv metrics i3zj --history          # the samples of the last hour
aenv metrics i3zj -f                 # a new line every 5 seconds
""",
)
def metrics(
    sandboxes: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SANDBOX...", help="Ids, or beginnings of ids; all that run if left out.", show_default=False
        ),
    ] = None,
    history: Annotated[bool, typer.Option("--history", help="Every sample that the server has.")] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until Ctrl-C.")] = False,
    form: output.OutputOption = None,
) -> None:
    """Show processor, memory and disk use."""
    api = session.connect()
    names = [session.find(api, name)["sandboxID"] for name in sandboxes or []]
    while True:
        wanted = names or [item["sandboxID"] for item in api.sandboxes(states="running")]
        found = {name: _samples(api, name, history) for name in wanted}
        if output.wants_json(form):
            output.print_json(found)
        else:
            _table(found)
        if not follow:
            return
        time.sleep(INTERVAL)


def _samples(api: Api, name: str, history: bool) -> list[Json]:
    found = api.metrics(name)
    return found if history else found[-1:]


def _table(found: dict[str, list[Json]]) -> None:
    output.table(
        ["SANDBOX", "TIME", "CPU", "", "MEMORY", "", "DISK", ""],
        (
            [
                name,
                output.local_time(sample["timestamp"])[11:],
                f"{sample['cpuUsedPct']:.0f}% of {sample['cpuCount']}",
                _bar(sample["cpuUsedPct"] / 100),
                f"{output.bytes_text(sample['memUsed'])} of {output.bytes_text(sample['memTotal'])}",
                _bar(sample["memUsed"] / max(1, sample["memTotal"])),
                f"{output.bytes_text(sample['diskUsed'])} of {output.bytes_text(sample['diskTotal'])}",
                _bar(sample["diskUsed"] / max(1, sample["diskTotal"])),
            ]
            for name, samples in found.items()
            for sample in samples
        ),
        empty="No samples. Only running sandboxes have them.",
    )


def _bar(share: float) -> str:
    """Five cells of rich's markup."""
    filled = min(5, max(0, round(share * 5)))
    colour = "red" if share > 0.9 else "yellow" if share > 0.7 else "green"
    return f"[{colour}]{'■' * filled}[/][dim]{'□' * (5 - filled)}[/]"
