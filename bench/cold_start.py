"""A snapshot's first sandbox on a node that never saw it, from an S3 server: what it reads, how long it takes."""

import asyncio
import json
import time
from pathlib import Path

from e2b import Sandbox
from tests.node.process import NodeProcess, wait_for
from tests.snapshot.s3_server import S3Server, s3_server

from aenv.config import RepositorySettings, Settings
from aenv.snapshot.opening import open_repository
from aenv.storage.layerd.client import LayerServer
from aenv.storage.layerd.settings import config_of
from bench.report import Report, Row, console

MIB = 1 << 20


def environment(settings: RepositorySettings) -> dict[str, str]:
    return {f"repository__{name}": str(value) for name, value in settings.model_dump(exclude_defaults=True).items()}


def create(node: NodeProcess, template: str) -> Sandbox:
    access = {"api_url": node.url, "sandbox_url": node.url, "api_key": node.api_key}
    return Sandbox.create(template, timeout=600, **access)  # type: ignore[arg-type]


def stats(node: NodeProcess) -> dict[str, int]:
    """Of the node's layer server, since it started."""
    config = config_of(Settings.model_validate({"home": node.home, "runtime": node.runtime}))
    found = asyncio.run(LayerServer(config, {}).stats())
    total: dict[str, int] = found["total"]
    return total


def cold_start(folder: Path, report: Report) -> None:
    """Two nodes of their own; the second one starts what the first one saved."""
    folder = folder / "cold"
    folder.mkdir()
    with s3_server(folder / "s3") as server:
        nodes = []
        try:
            for number, cidr in ((1, "10.236.0.0/16"), (2, "10.237.0.0/16")):
                (folder / f"node{number}").mkdir()
                settings = environment(server.settings("snapshots"))
                node = NodeProcess(folder / f"node{number}", prefix=f"aenvc{number}"[:6], cidr=cidr, **settings)
                nodes.append(node)
                node.start()
            _measure(nodes[0], nodes[1], server, folder, report)
        finally:
            for node in nodes:
                node.destroy()


def _measure(first: NodeProcess, second: NodeProcess, server: S3Server, folder: Path, report: Report) -> None:
    source = create(first, "base")
    source.commands.run("head -c 20M /dev/urandom > data; sync")
    source.create_snapshot(name="cold")
    wait_for(lambda: "cold:default" in first.records("published"), "the commit", 300)
    here = create(first, "cold")
    begin = time.perf_counter()
    here.commands.run("true")
    warm = (time.perf_counter() - begin) * 1000
    here.kill()
    begin = time.perf_counter()
    there = create(second, "cold")
    created = (time.perf_counter() - begin) * 1000
    there.commands.run("true")
    ours = (time.perf_counter() - begin) * 1000
    total = stats(second)
    # By hand: fetch all layers whole, then start.
    repository = open_repository(server.settings("snapshots"), folder)
    snapshot = json.loads(second.records("sandboxes")[there.sandbox_id])["snapshot_id"]
    manifest = repository.get(snapshot)
    begin = time.perf_counter()
    for number, layer in enumerate(dict.fromkeys(manifest.layers())):
        repository.fetch(layer, folder / f"layer{number}")
    fetched = (time.perf_counter() - begin) * 1000
    repository.close()
    size = sum(layer.size for layer in set(manifest.layers()))
    report.add(
        Row("first command of a snapshot from S3", ours, fetched + warm, note="by hand: fetch all, then start")
    )
    report.add(Row("  until created", created, None))
    report.add(
        Row("  fetched, and what the guest's host asked for", total["fetched"] / MIB, total["asked"] / MIB, "MB",
            f"the snapshot has {size / MIB:.0f} MB stored; {total['touched'] / MIB:.1f} MB of distinct pages")
    )  # fmt: skip
    console.print(f"  [dim]layer server: {total}[/]")
    there.kill()
    source.kill()
