"""Two nodes and one repository: what one saves, the other runs, reading only what the guest touches."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from tests.node.process import NodeProcess, wait_for

CLEAR = "sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'; "


class Cluster:
    """Nodes that share a repository, each reached with the SDK."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.repository = folder / "repository"
        prefix, cidr = os.environ.get("AENV_TEST_SLOTS", "aenvt,10.232.0.0/16").split(",")
        self._prefix, self._network = prefix[:5], cidr.split(".")[1]
        self.nodes: list[NodeProcess] = []

    def add(self, **settings: str) -> NodeProcess:
        number = len(self.nodes) + 1
        folder = self._folder / f"node{number}"
        folder.mkdir()
        made = NodeProcess(
            folder,
            prefix=f"{self._prefix}{'abcdef'[number]}",
            cidr=f"10.{self._network}.{128 + 16 * number}.0/20",
            warm_vms="1",
            **{"repository__path": str(self.repository), **settings},
        )
        self.nodes.append(made)
        made.start()
        return made

    def create(self, node: NodeProcess, template: str = "base", **options: object) -> Sandbox:
        return Sandbox.create(template, timeout=300, **self.access(node), **options)  # type: ignore[arg-type]

    @staticmethod
    def access(node: NodeProcess) -> dict[str, str]:
        return {"api_url": node.url, "sandbox_url": node.url, "api_key": node.api_key}

    @staticmethod
    def api(node: NodeProcess) -> httpx.Client:
        return httpx.Client(base_url=node.url, headers={"X-API-Key": node.api_key}, timeout=60)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        yield made
    finally:
        for node in made.nodes:
            node.destroy()


@pytest.fixture(scope="module")
def first(cluster: Cluster) -> NodeProcess:
    return cluster.add()


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> NodeProcess:
    return cluster.add()


def published(node: NodeProcess) -> set[str]:
    return set(node.records("published"))


def save(cluster: Cluster, node: NodeProcess, sandbox: Sandbox, name: str) -> str:
    saved = sandbox.create_snapshot(name=name)
    wait_for(lambda: f"{name}:default" in published(node), "the snapshot to be in the repository", 120)
    return saved.snapshot_id


def test_a_node_runs_what_another_saved(cluster: Cluster, first: NodeProcess, second: NodeProcess) -> None:
    source = cluster.create(first)
    source.commands.run("head -c 3M /dev/urandom > big; sha256sum big > sum")
    counter = source.commands.run("i=0; while sleep 0.2; do i=$((i+1)); echo $i > count; done", background=True)
    save(cluster, first, source, "shared")
    there = cluster.create(second, "shared")
    assert there.commands.run(CLEAR + "sha256sum -c sum").exit_code == 0
    before = int(there.files.read("count"))
    wait_for(lambda: int(there.files.read("count") or 0) > before, "the process of the snapshot to go on")
    assert any(p.pid == counter.pid for p in there.commands.list())
    there.files.write("mine", "second")
    assert not source.files.exists("mine")
    # It is a sandbox like any other.
    there.pause()
    there.connect()
    (child,) = there.fork(count=1)
    assert isinstance(child, Sandbox)
    assert child.files.read("mine") == "second"
    assert child.commands.run(CLEAR + "sha256sum -c sum").exit_code == 0
    for sandbox in (child, there, source):
        sandbox.kill()
