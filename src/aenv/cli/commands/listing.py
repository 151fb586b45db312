"""``aenv ls``, ``info`` and ``tree``."""

from collections.abc import Iterator
from datetime import UTC, datetime
from urllib.parse import quote

import click

from aenv.cli import options, output, session, table
from aenv.cli.help import command
from aenv.cli.table import Cell, Column
from aenv.client.api import Json

COLUMNS = (
    Column("SANDBOX"),
    Column("TEMPLATE", cut=True),
    Column("STATE"),
    Column("AGE", right=True),
    Column("ENDS IN", right=True),
    Column("CPU", right=True, spare=2),
    Column("MEMORY", right=True, spare=1),
    Column("METADATA", cut=True),
)


@command(
    "ls",
    """
aenv ls
aenv ls --state paused
aenv ls -m project=demo -q           # ids only, one a line
aenv ls -o json | jq '.[].sandboxID'
""",
)
@click.option(
    "-s",
    "--state",
    type=click.Choice(["running", "paused"]),
    metavar="STATE",
    help="running or paused; both if left out.",
)
@click.option("-t", "--template", metavar="NAME", help="Made from this template.")
@click.option(
    "-m",
    "--metadata",
    type=options.PAIR,
    multiple=True,
    metavar="NAME=VALUE",
    help="With this metadata; may be repeated.",
)
@options.quiet_option
@options.output_option
def ls(
    state: str | None,
    template: str | None,
    metadata: tuple[tuple[str, str], ...],
    quiet: bool,
    form: str | None,
) -> None:
    """List sandboxes, newest first."""
    condition = "&".join(f"{quote(name)}={quote(value)}" for name, value in metadata) or None
    found = session.connect().sandboxes(states=state or "running,paused", template=template, metadata=condition)
    if quiet:
        for item in found:
            print(item["sandboxID"])
    elif output.wants_json(form):
        output.print_json(found)
    else:
        _table(found)


def _table(found: list[Json]) -> None:
    now = datetime.now(UTC)
    shown = len(COLUMNS) if any(item["metadata"] for item in found) else len(COLUMNS) - 1
    output.table(
        COLUMNS[:shown],
        (
            [
                item["sandboxID"],
                item.get("alias") or item["templateID"],
                output.state(item["state"]),
                output.age(item["startedAt"], now),
                "-" if item["state"] == "paused" else output.left(item["endAt"], now),
                str(item["cpuCount"]),
                output.bytes_text(item["memoryMB"] << 20),
                output.metadata_text(item["metadata"]),
            ][:shown]
            for item in found
        ),
        empty="No sandboxes. `aenv start base` starts one.",
    )


@command(
    "info",
    """
aenv info i3zj...
aenv info i3zj... -o json | jq -r .endAt
""",
)
@options.sandbox_argument()
@options.output_option
def info(sandbox: str, form: str | None) -> None:
    """Show everything about a sandbox."""
    found = session.find(session.connect(), sandbox)
    if output.wants_json(form):
        output.print_json(found)
        return
    now = datetime.now(UTC)
    network, lifecycle = found["network"], found["lifecycle"]
    state = output.state(found["state"])
    rows: list[tuple[str, str | Cell]] = [
        ("Sandbox", found["sandboxID"]),
        ("State", Cell(state.text + _pause_text(found), state.style)),
        ("Template", _template_text(found)),
        ("Started", f"{output.local_time(found['startedAt'])}, {output.age(found['startedAt'], now)} ago"),
        ("Ends", _end_text(found, now)),
        ("Machine", f"{found['cpuCount']} vCPU, {output.bytes_text(found['memoryMB'] << 20)} memory, "
                    f"{output.bytes_text(found['diskSizeMB'] << 20)} disk"),
        ("Access", "with a token (secure)" if found.get("envdAccessToken") else "without a token"),
        ("Internet", "no" if found.get("allowInternetAccess") is False else "yes"),
    ]  # fmt: skip
    if parent := found.get("parentID"):
        rows.insert(3, ("Forked from", parent))
    if not network["allowPublicTraffic"]:
        rows.append(("Ports", "with the traffic token only"))
    for name, key in (("Allowed", "allowOut"), ("Denied", "denyOut")):
        if network.get(key):
            rows.append((name, ", ".join(network[key])))
    if lifecycle["autoResume"]:
        rows.append(("Resumes", "when traffic arrives"))
    pairs = [f"{name}={value}" for name, value in found["metadata"].items()]
    rows += [("" if index else "Metadata", pair) for index, pair in enumerate(pairs)]
    output.details(rows)


def _template_text(found: Json) -> str:
    name: str = found["templateID"]
    return f"{found['alias']} ({name})" if "alias" in found else name


def _pause_text(found: Json) -> str:
    return "" if "pauseMode" not in found else " with memory" if found["pauseMode"] == "full" else ", disk only"


def _end_text(found: Json, now: datetime) -> str:
    if found["state"] == "paused":
        return "-"
    then = "is paused" if found["lifecycle"]["onTimeout"] == "pause" else "is deleted"
    return f"{output.local_time(found['endAt'])}, in {output.left(found['endAt'], now)}; then it {then}"


@command(
    "tree",
    """
aenv tree
aenv tree -o json                    # nested: template, sandboxes, children
""",
)
@options.output_option
def tree(form: str | None) -> None:
    """Show which sandbox was forked from which.

    The roots are templates and snapshots. A parent that has been deleted is shown as gone.
    """
    roots = _forest(session.connect().sandboxes())
    if output.wants_json(form):
        output.print_json(roots)
        return
    if not roots:
        print("No sandboxes. `aenv start base` starts one.")
        return
    for root in roots:
        print(output.styled(table.printable(root["template"]), output.BOLD))
        for line in _branches(root["sandboxes"], ""):
            print(line)


def _branches(items: list[Json], indent: str) -> Iterator[str]:
    for item in items:
        last = item is items[-1]
        text = _leaf(item, indent + "└── ")
        yield output.styled(indent + ("└── " if last else "├── "), output.DIM) + text
        yield from _branches(item["children"], indent + ("    " if last else "│   "))


def _leaf(item: Json, before: str) -> str:
    """One sandbox; its metadata is cut where the terminal ends."""
    if item["state"] == "gone":
        return output.styled(f"{item['sandboxID']}  gone", output.DIM)
    state = output.state(item["state"])
    about = table.printable(
        "  ".join([output.age(item["startedAt"]), output.metadata_text(item["metadata"])]).rstrip()
    )
    if (width := output.width()) is not None:
        used = len(before) + len(item["sandboxID"]) + len(state.text) + 4
        about = table.shortened(about, max(4, width - used))
    return f"{item['sandboxID']}  {output.styled(state.text, state.style)}  {output.styled(about, output.DIM)}"


def _forest(found: list[Json]) -> list[Json]:
    """Templates with their sandboxes, each with the children that were forked from it; oldest first."""
    nodes: dict[str, Json] = {}
    for item in sorted(found, key=lambda item: item["startedAt"]):
        nodes[item["sandboxID"]] = {**item, "children": []}
    roots: dict[str, Json] = {}
    for item in list(nodes.values()):
        parent = item.get("parentID")
        if parent is not None and parent not in nodes:
            nodes[parent] = {"sandboxID": parent, "state": "gone", "children": []}
            _root(roots, item)["sandboxes"].append(nodes[parent])
        if parent is not None:
            nodes[parent]["children"].append(item)
        else:
            _root(roots, item)["sandboxes"].append(item)
    return list(roots.values())


def _root(roots: dict[str, Json], item: Json) -> Json:
    name = item["templateID"]
    made: Json = roots.setdefault(name, {"template": item.get("alias") or name, "templateID": name, "sandboxes": []})
    return made
