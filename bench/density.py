"""What N sandboxes of one template take: memory that is theirs and that they share, page cache, disk."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from e2b import Sandbox
from rich.table import Table
from tests.node.process import NodeProcess

from bench.report import console

MIB = 1 << 20


def smaps(pid: int) -> dict[str, int]:
    """``/proc/PID/smaps_rollup``, bytes (proc_pid_smaps(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(rest.split()[0]) * 1024 for name, rest in (line.split(":") for line in lines)}


def cached(paths: list[Path]) -> int:
    """Bytes of files in the page cache, by fincore(1)."""
    argv = ["fincore", "--bytes", "--noheadings", "--output", "RES", *map(str, paths)]
    out = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return sum(int(line) for line in out.split())


def density(node: NodeProcess, create: Callable[[], Sandbox], count: int) -> None:
    """Print the table. The sandboxes are forked from one that wrote 8 MB of files, and each ran one command."""
    source = create()
    source.commands.run("head -c 8M /dev/urandom > data; sync")
    children = [child for child in source.fork(count=count) if isinstance(child, Sandbox)]
    for child in children:
        child.commands.run("echo hello > mine")
    ids = [child.sandbox_id for child in children]
    records = {name: json.loads(doc) for name, doc in node.records("sandboxes").items()}
    pids = []
    for name in ids:
        needle = records[name]["vm_id"].encode()
        pids.append(next(p for p in node.vm_pids() if needle in Path(f"/proc/{p}/cmdline").read_bytes()))
    maps = [smaps(pid) for pid in pids]
    bases = list((node.home / "memory").iterdir())
    layers = list((node.home / "layers").iterdir())
    snapshots = [path for path in (node.home / "snapshots").rglob("*") if path.is_file()]
    used = sum(path.stat().st_blocks * 512 for path in (*bases, *layers, *snapshots))
    virtual = sum((records[name]["disk_mib"] + records[name]["memory_mib"]) * MIB for name in ids)
    table = Table(title=f"{len(ids)} sandboxes of one fork, idle", title_justify="left")
    for name in ("", "MB", "per sandbox"):
        table.add_column(name, justify="left" if not name else "right")

    def row(name: str, amount: int) -> None:
        table.add_row(name, f"{amount / MIB:,.0f}", f"{amount / MIB / len(ids):,.1f}")

    row("resident, counted in each", sum(m["Rss"] for m in maps))
    row("  private", sum(m["Private_Clean"] + m["Private_Dirty"] for m in maps))
    row("  shared with others", sum(m["Shared_Clean"] + m["Shared_Dirty"] for m in maps))
    row("proportional (PSS)", sum(m["Pss"] for m in maps))
    row("page cache of memory bases", cached(bases))
    row("disk used, with the template's", used)
    row("memory and disks as the guests see them", virtual)
    console.print(table)
    for sandbox in (source, *children):
        sandbox.kill()
