"""``aenv node ls``."""

from aenv.cli import output, session
from aenv.cli.help import command, group

app = group("Show the server's nodes.", "\naenv node ls\n")


@command(app, "ls", "\naenv node ls\naenv node ls -o json | jq '.[].metrics'\n")
def ls(form: output.OutputOption = None) -> None:
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
                _share(metrics["memoryUsedBytes"], metrics["memoryTotalBytes"]),
                _share(disk["usedBytes"], disk["totalBytes"]),
            ]
        )
    columns = ["NODE", "STATUS", "VERSION", "RUNNING", "PAUSED", "CPU", "MEMORY", "DISK"]
    output.table(columns, rows, right=("RUNNING", "PAUSED"))


def _share(used: int, total: int) -> str:
    return f"{output.bytes_text(used)} of {output.bytes_text(total)}"
