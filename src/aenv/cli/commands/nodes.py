"""``aenv node ls``."""

from aenv.cli import help, options, output, session
from aenv.cli.help import command
from aenv.cli.table import Column

group = help.group("node", "Show the server's nodes.", "\naenv node ls\n")

COLUMNS = (
    Column("NODE"),
    Column("STATUS"),
    Column("VERSION", spare=1),
    Column("RUNNING", right=True),
    Column("PAUSED", right=True),
    Column("CPU", right=True),
    Column("MEMORY"),
    Column("DISK"),
)


@command("ls", "\naenv node ls\naenv node ls -o json | jq '.[].metrics'\n", of=group)
@options.output_option
def ls(form: str | None) -> None:
    """List nodes with what they run and have free."""
    found = session.connect().nodes()
    if output.wants_json(form):
        output.print_json(found)
        return
    rows = []
    for item in found:
        metrics = item["metrics"]
        disk = metrics["disks"][0]
        rows.append(
            [
                item["id"],
                output.state(item["status"]),
                item["version"],
                str(item["sandboxCount"]),
                str(item.get("sandboxPausedCount", 0)),
                f"{metrics['cpuPercent']}% of {metrics['cpuCount']}",
                output.share_text(metrics["memoryUsedBytes"], metrics["memoryTotalBytes"]),
                output.share_text(disk["usedBytes"], disk["totalBytes"]),
            ]
        )
    output.table(COLUMNS, rows)
