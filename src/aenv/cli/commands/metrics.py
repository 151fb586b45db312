"""``aenv metrics``."""

import time

import click

from aenv.cli import options, output, session
from aenv.cli.help import command
from aenv.cli.table import Cell, Column
from aenv.client.api import Api, Json

INTERVAL = 5.0  # seconds; the server's own samples are as far apart by default
COLUMNS = (
    Column("SANDBOX"),
    Column("TIME"),
    Column("CPU", right=True),
    Column("", spare=1),
    Column("MEMORY", right=True),
    Column("", spare=1),
    Column("DISK", right=True),
    Column("", spare=1),
)


@command(
    "metrics",
    """
aenv metrics                         # every running sandbox
aenv metrics i3zj --history          # the samples of the last hour
aenv metrics i3zj -f                 # a new line every 5 seconds
""",
)
@options.sandbox_argument(nargs=-1, required=False, help="Ids, or beginnings of ids; all that run if left out.")
@click.option("--history", is_flag=True, help="Every sample that the server has.")
@click.option("-f", "--follow", is_flag=True, help="Go on until Ctrl-C.")
@options.output_option
def metrics(sandboxes: tuple[str, ...], history: bool, follow: bool, form: str | None) -> None:
    """Show processor, memory and disk use."""
    api = session.connect()
    names = [session.find(api, name)["sandboxID"] for name in sandboxes]
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
        COLUMNS,
        (
            [
                name,
                output.local_time(sample["timestamp"])[11:],
                f"{sample['cpuUsedPct']:.0f}% of {sample['cpuCount']}",
                _bar(sample["cpuUsedPct"] / 100 / max(1, sample["cpuCount"])),
                output.share_text(sample["memUsed"], sample["memTotal"]),
                _bar(sample["memUsed"] / max(1, sample["memTotal"])),
                output.share_text(sample["diskUsed"], sample["diskTotal"]),
                _bar(sample["diskUsed"] / max(1, sample["diskTotal"])),
            ]
            for name, samples in found.items()
            for sample in samples
        ),
        empty="No samples. Only running sandboxes have them.",
    )


def _bar(share: float) -> Cell:
    filled = min(5, max(0, round(share * 5)))
    colour = output.RED if share > 0.9 else output.YELLOW if share > 0.7 else output.GREEN
    return Cell("■" * filled + "□" * (5 - filled), colour)
