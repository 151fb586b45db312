"""Two nodes and one repository: what one saves, the other runs, reading only what the guest touches."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from e2b import NotFoundException, Sandbox, SandboxException

from aenv.config import RepositorySettings
from aenv.snapshot.opening import open_repository
from aenv.snapshot.shared import SharedRepository
from tests.node.process import NodeProcess, wait_for
from tests.snapshot.s3_server import S3Server, s3_server

CLEAR = "sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'; "


class Cluster:
    """Nodes that share a repository, each reached with the SDK."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.repository = folder / "repository"
        self.nodes: list[NodeProcess] = []

    def add(self, **settings: str) -> NodeProcess:
        number = len(self.nodes) + 1
        folder = self._folder / f"node{number}"
        folder.mkdir()
        made = NodeProcess(
            folder,
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


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


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


def repository(cluster: Cluster) -> SharedRepository:
    return open_repository(RepositorySettings(path=cluster.repository), cluster.repository)


def collect(cluster: Cluster) -> int:
    """Collect now what nobody names or claims; how many layers went."""
    with closing(repository(cluster)) as opened:
        report = opened.gc(timedelta(0))
        assert opened.verify().clean
        return report.layers_deleted


def test_a_name_gets_another_content_and_goes(cluster: Cluster, first: NodeProcess, second: NodeProcess) -> None:
    source = cluster.create(first)
    source.files.write("version", "1")
    one = save(cluster, first, source, "moving")
    there = cluster.create(second, "moving")
    assert there.files.read("version") == "1"
    source.files.write("version", "2")
    assert source.create_snapshot(name="moving").snapshot_id == one, "the id stays"
    wanted = json.loads(first.records("saved_snapshots")[one])["snapshot_id"]
    wait_for(
        lambda: json.loads(first.records("published")["moving:default"])["snapshot_id"] == wanted,
        "the second one",
        120,
    )

    def version_there() -> str:
        sandbox = cluster.create(second, "moving")
        try:
            return sandbox.files.read("version")
        finally:
            sandbox.kill()

    wait_for(lambda: version_there() == "2", "the other node to notice")
    with cluster.api(second) as api:
        assert [s["snapshotID"] for s in api.get("/snapshots", params={"name": "moving"}).json()] == [one]
    assert there.files.read("version") == "1", "a sandbox keeps what it was made from"
    with cluster.api(second) as api:
        assert api.delete(f"/templates/{one}").status_code == 204
    with pytest.raises(SandboxException, match="not found"):
        cluster.create(second, "moving")
    collect(cluster)
    read = "cat version; find /usr/lib -type f | head -300 | xargs cat | wc -c"
    assert there.commands.run(CLEAR + read).exit_code == 0
    there.pause()
    there.connect()
    assert there.files.read("version") == "1"
    there.kill()
    source.kill()


def test_deleting_frees_what_nobody_else_names(cluster: Cluster, first: NodeProcess) -> None:
    source = cluster.create(first)
    save(cluster, first, source, "kept")
    collect(cluster)
    with closing(repository(cluster)) as opened:
        before = opened.usage()
    source.commands.run("head -c 5M /dev/urandom > data; sync")
    gone = save(cluster, first, source, "gone")
    with closing(repository(cluster)) as opened:
        grown = opened.usage()
        manifests = {m.attributes["name"]: m for m in opened.list()}
    # Incremental: what was written, not the disk and the memory again.
    assert 5 << 20 < grown.layer_bytes - before.layer_bytes < 60 << 20
    assert manifests["gone"].memory and manifests["kept"].memory
    shared = set(manifests["kept"].memory.layers) & set(manifests["gone"].memory.layers)
    assert shared == set(manifests["kept"].memory.layers), "its memory is the difference to the one before it"
    with cluster.api(first) as api:
        assert api.delete(f"/templates/{gone}").status_code == 204
    wait_for(lambda: "gone:default" not in published(first), "the name to go")
    assert collect(cluster) > 0
    with closing(repository(cluster)) as opened:
        assert opened.usage().layer_bytes == before.layer_bytes
    again = cluster.create(first, "kept")
    assert not again.files.exists("data")
    again.kill()
    source.kill()


@pytest.mark.slow
def test_the_layer_server_dies_under_a_running_sandbox(
    cluster: Cluster, first: NodeProcess, second: NodeProcess
) -> None:
    source = cluster.create(first)
    write = "mkdir d; for i in $(seq 200); do head -c 20000 /dev/urandom > d/$i; done; cat d/* | sha256sum > s"
    source.commands.run(write)
    save(cluster, first, source, "steady")
    there = cluster.create(second, "steady")
    keeper, _ = sorted(second.layer_server_pids())
    reading = there.commands.run(CLEAR + "for i in 1 2 3; do cat d/* | sha256sum; done", background=True)
    for _ in range(3):
        victims = set(second.layer_server_pids()) - {keeper}
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: set(second.layer_server_pids()) - {keeper} - victims, "another layer server")  # noqa: B023
    expected = source.commands.run("cat s").stdout
    assert reading.wait().stdout == expected * 3
    # The node's server, too.
    second.kill9()
    second.start()
    assert there.commands.run(CLEAR + "cat d/* | sha256sum").stdout == expected
    # Without keeper and server there is no file below the VM any more; sandboxes start again all the same.
    second.kill_layer_server()
    later = cluster.create(second, "steady")
    assert later.commands.run("cat d/* | sha256sum").stdout == expected
    later.kill()
    with contextlib.suppress(NotFoundException):
        there.kill()
    source.kill()


@pytest.mark.slow
def test_when_the_disk_is_short_the_repository_takes_the_place_of_files(cluster: Cluster, first: NodeProcess) -> None:
    source = cluster.create(first)
    source.commands.run("head -c 8M /dev/urandom > data; sha256sum data > sum; sync")
    saved = save(cluster, first, source, "roomy")
    snapshot = json.loads(first.records("saved_snapshots")[saved])["snapshot_id"]
    source.kill()
    stat = os.statvfs(first.home)
    first.restart(reserve_disk=str(stat.f_bavail * stat.f_frsize * 6 // 10 >> 20))
    wait_for(lambda: json.loads(first.records("snapshots")[snapshot])["memory_base"].startswith("v-"), "its eviction")
    wait_for(lambda: not (first.home / "snapshots" / snapshot / "delta").exists(), "its files to go")
    here = cluster.create(first, "roomy")
    assert here.commands.run(CLEAR + "sha256sum -c sum").exit_code == 0
    here.pause()
    first.restart(reserve_disk="1024")
    here.connect()
    assert here.commands.run(CLEAR + "sha256sum -c sum").exit_code == 0
    here.kill()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["workspace", "layers", "manifest"])
def test_a_server_that_dies_while_it_commits_goes_on_with_it(
    cluster: Cluster, first: NodeProcess, second: NodeProcess, moment: str
) -> None:
    source = cluster.create(first)
    source.commands.run("head -c 8M /dev/urandom > data; sha256sum data > sum; sync")
    with closing(repository(cluster)) as opened:
        before = opened.usage()
    source.create_snapshot(name=f"dying-{moment}")
    commits = first.home / "commits"

    def reached() -> bool:
        if moment == "workspace":
            return any(commits.iterdir())
        with closing(repository(cluster)) as opened:
            now = opened.usage()
        return now.layers > before.layers if moment == "layers" else now.snapshots > before.snapshots

    wait_for(reached, moment, 120, 0.002)
    first.kill9()
    first.start()
    wait_for(lambda: f"dying-{moment}:default" in published(first), "the commit", 120)
    wait_for(lambda: not any(commits.iterdir()), "the workspace to be empty")
    there = cluster.create(second, f"dying-{moment}")
    assert there.commands.run("sha256sum -c sum").exit_code == 0
    collect(cluster)
    there.kill()
    source.kill()


@pytest.mark.slow
def test_a_repository_that_cannot_be_written_delays_and_loses_nothing(
    cluster: Cluster, first: NodeProcess, second: NodeProcess
) -> None:
    source = cluster.create(first)
    source.files.write("f", "kept")
    hidden = cluster.repository.with_name("hidden")
    cluster.repository.rename(hidden)
    cluster.repository.write_text("not a folder")
    try:
        saved = source.create_snapshot(name="delayed")
        here = cluster.create(first, "delayed")
        assert here.files.read("f") == "kept", "usable here at once"
        here.kill()
        wait_for(lambda: "could not be brought up to date" in first.log.read_text(), "an attempt")
        assert "delayed:default" not in published(first)
    finally:
        cluster.repository.unlink()
        hidden.rename(cluster.repository)
    wait_for(lambda: "delayed:default" in published(first), "the commit", 120)
    there = cluster.create(second, saved.snapshot_id)
    assert there.files.read("f") == "kept"
    there.kill()
    source.kill()


@pytest.mark.slow
def test_a_snapshot_from_a_bucket(cluster: Cluster, first: NodeProcess, second: NodeProcess, s3: S3Server) -> None:
    """The same through a real S3 server, whose credentials the layer server has from the node."""
    settings = s3.settings("node-test").model_dump(exclude_defaults=True)
    bucket = {f"repository__{name}": str(value) for name, value in settings.items()}
    for node in (first, second):
        node.restart(**bucket)
    source = cluster.create(first)
    source.commands.run("head -c 3M /dev/urandom > big; sha256sum big > sum")
    save(cluster, first, source, "bucket")
    there = cluster.create(second, "bucket")
    assert there.commands.run(CLEAR + "sha256sum -c sum").exit_code == 0
    # What was read is in the node's own cache; without the server it is enough for what it has read.
    assert any((second.home / "cache").rglob("*"))
    there.pause()
    there.connect()
    assert there.commands.run("sha256sum -c sum").exit_code == 0
    there.kill()
    source.kill()
    for node in (first, second):
        node.restart(repository__backend="posix_fs")
