"""``aenv ls``, ``info`` and ``tree``."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from aenv.cli import output, session
from aenv.cli.help import application, command
from aenv.client.api import Json

if TYPE_CHECKING:
    from rich.tree import Tree

app = application()


@command(
    app,
    "ls",
    """
aenv ls
aenv ls --state paused
aenv ls -m project=demo -q           # ids only, one a line
aenv ls -o json | jq '.[].sandboxID'
""",
)
def ls(
    state: Annotated[
        str | None, typer.Option("-s", "--state", help="running or paused; both if left out.", show_default=False)
    ] = None,
    template: Annotated[
        str | None, typer.Option("-t", "--template", help="Made from this template.", show_default=False)
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option("-m", "--metadata", metavar="NAME=VALUE", help="With this metadata; may be repeated."),
    ] = None,
    quiet: output.QuietOption = False,
    form: output.OutputOption = None,
) -> None:
    """List sandboxes, newest first."""
    wanted = session.pairs(metadata or [], "metadata")
    condition = "&".join(f"{quote(name)}={quote(value)}" for name, value in wanted.items()) or None
    found = session.connect().sandboxes(states=state or "running,paused", template=template, metadata=condition)
    if quiet:
        for item in found:
            print(item["sandboxID"])
    elif output.wants_json(form):
        output.print_json(found)
    else:
        _table(found)


def _table(found: list[Json]) -> None:
    from rich.markup import escape

    now = datetime.now(UTC)
    with_metadata = any(item["metadata"] for item in found)
    columns = ["SANDBOX", "TEMPLATE", "STATE", "AGE", "ENDS IN", "CPU", "MEMORY"]
    output.table(
        [*columns, "METADATA"] if with_metadata else columns,
        (
            [
                item["sandboxID"],
                escape(item.get("alias") or item["templateID"]),
                output.state(item["state"]),
                output.age(item["startedAt"], now),
                _ends_in(item, now),
                str(item["cpuCount"]),
                output.bytes_text(item["memoryMB"] << 20),
                *([escape(output.metadata_text(item["metadata"]))] if with_metadata else []),
            ]
            for item in found
        ),
        right=("CPU", "MEMORY"),
        empty="No sandboxes. `aenv start base` starts one.",
    )


def _ends_in(item: Json, now: datetime) -> str:
    if item["state"] == "paused":
        return "[dim]-[/]"
    return output.duration_text((output.moment(item["endAt"]) - now).total_seconds())


@command(
    app,
    "info",
    """
aenv info i3zj...
aenv info i3zj... -o json | jq -r .endAt
""",
)
def info(sandbox: session.SandboxArgument, form: output.OutputOption = None) -> None:
    """Show everything about a sandbox."""
    found = session.find(session.connect(), sandbox)
    if output.wants_json(form):
        output.print_json(found)
        return
    from rich.markup import escape

    now = datetime.now(UTC)
    network, lifecycle = found["network"], found["lifecycle"]
    rows = [
        ("Sandbox", found["sandboxID"]),
        ("State", output.state(found["state"]) + _pause_text(found)),
        ("Template", escape(_template_text(found))),
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
            rows.append((name, escape(", ".join(network[key]))))
    if lifecycle["autoResume"]:
        rows.append(("Resumes", "when traffic arrives"))
    rows += [("Metadata", escape(f"{name}={value}")) for name, value in found["metadata"].items()]
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
    left = output.duration_text((output.moment(found["endAt"]) - now).total_seconds())
    return f"{output.local_time(found['endAt'])}, in {left}; then it {then}"


@command(
    app,
    "tree",
    """
aenv tree
aenv tree -o json                    # nested: template, sandboxes, children
""",
)
def tree(form: output.OutputOption = None) -> None:
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
    from rich.markup import escape
    from rich.tree import Tree

    for root in roots:
        drawn = Tree(f"[bold]{escape(root['template'])}[/]", guide_style="dim")
        for item in root["sandboxes"]:
            _draw(drawn, item)
        output.console().print(drawn)


def _draw(drawn: "Tree", item: Json) -> None:
    from rich.markup import escape

    if item["state"] == "gone":
        line = f"[dim]{item['sandboxID']}  gone[/]"
    else:
        about = "  ".join(
            filter(None, (output.age(item["startedAt"]), escape(output.metadata_text(item["metadata"]))))
        )
        line = f"{item['sandboxID']}  {output.state(item['state'])}  [dim]{about}[/]"
    branch = drawn.add(line)
    for child in item["children"]:
        _draw(branch, child)


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
