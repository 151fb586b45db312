"""Saved snapshots, network updates and ordered listings, as the E2B SDK asks for them."""

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from e2b import NotFoundException, Sandbox, SandboxException, SandboxInfo, SandboxQuery, SnapshotInfo

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for
from tests.node.test_recovery import assert_nothing_leaked, names, restart, states


@pytest.fixture(autouse=True)
def no_snapshots_left(node: NodeProcess) -> Iterator[None]:
    yield
    for snapshot in listed():
        Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not node.records("saved_snapshots")


def listed(sandbox_id: str | None = None, name: str | None = None) -> list[SnapshotInfo]:
    pages = Sandbox.list_snapshots(sandbox_id=sandbox_id, name=name, limit=2)
    found: list[SnapshotInfo] = []
    while pages.has_next:
        found += pages.next_items()
    return found


def counter(sandbox: Sandbox) -> int:
    """Starts a process that counts in memory; its pid."""
    handle = sandbox.commands.run(
        "n=0; while true; do n=$((n+1)); echo $n > /dev/shm/n; sleep 0.1; done", background=True, timeout=0
    )
    wait_for(lambda: sandbox.files.exists("/dev/shm/n"), "the counter to start")
    return int(handle.pid)


def test_a_snapshot_starts_sandboxes_with_memory_and_processes(create: Create, node: NodeProcess) -> None:
    sandbox = create(secure=True, envs={"COLOUR": "green"}, metadata={"a": "b"})
    sandbox.files.write("f", "then")
    pid = counter(sandbox)
    snapshot = sandbox.create_snapshot()
    assert snapshot.names == []
    # The source runs on, and what it does then is its own.
    sandbox.files.write("f", "later")
    assert pid in [process.pid for process in sandbox.commands.list()]
    sandbox.kill()
    wait_for(lambda: sandbox.sandbox_id not in node.records("sandboxes"), "the source to go")

    made = [create(snapshot.snapshot_id) for _ in range(2)]
    for child in made:
        assert child.files.read("f") == "then"
        assert pid in [process.pid for process in child.commands.list()]
        assert child.commands.run("hostname; echo $COLOUR").stdout.split() == [child.sandbox_id, "green"]
        assert child.get_info().template_id == snapshot.snapshot_id
        assert child.get_info().metadata == {}
    assert len({child._envd_access_token for child in made}) == 2
    # A child opens with its own token only.
    for token in (sandbox._envd_access_token, made[1]._envd_access_token, None):
        headers = {"e2b-sandbox-id": made[0].sandbox_id} | ({"X-Access-Token": token} if token else {})
        answer = httpx.get(f"{node.url}/files", params={"path": "/etc/hostname"}, headers=headers)
        assert answer.status_code == 401, answer.text
    # A snapshot of a child, while both live.
    made[0].files.write("f", "child")
    again = create(made[0].create_snapshot().snapshot_id)
    assert again.files.read("f") == "child"
    assert made[0].files.read("f") == "child"


def test_names_tags_listing_and_deletion(create: Create, node: NodeProcess, api: httpx.Client) -> None:
    sandbox, other = create(), create()
    mark = f"snap-{time.time_ns()}"
    sandbox.files.write("f", "1")
    first = sandbox.create_snapshot(name=mark)
    assert first.names == [mark]
    sandbox.files.write("f", "2")
    tagged = sandbox.create_snapshot(name=f"{mark}:v2")
    assert tagged.names == [f"{mark}:v2"]
    unnamed = other.create_snapshot()
    assert [s.snapshot_id for s in listed()] == [unnamed.snapshot_id, tagged.snapshot_id, first.snapshot_id]
    assert [s.snapshot_id for s in listed(sandbox_id=sandbox.sandbox_id)] == [tagged.snapshot_id, first.snapshot_id]
    assert [s.snapshot_id for s in listed(name=mark)] == [tagged.snapshot_id, first.snapshot_id]
    assert [s.snapshot_id for s in listed(name=f"{mark}:v2")] == [tagged.snapshot_id]
    own = sandbox.list_snapshots().next_items()  # type: ignore[misc]
    assert [s.snapshot_id for s in own] == [tagged.snapshot_id, first.snapshot_id]
    detail = api.get(f"/snapshots/{mark}:v2").json()
    assert (detail["snapshotID"], detail["memoryMB"], detail["diskSizeMB"]) == (tagged.snapshot_id, 512, 4096)
    assert create(mark).files.read("f") == "1"
    assert create(f"{mark}:v2").files.read("f") == "2"
    assert create(tagged.snapshot_id).files.read("f") == "2"

    # Saving under the same name gives the snapshot another content; what it was before goes.
    sandbox.files.write("f", "3")
    saved = json.loads(node.records("saved_snapshots")[first.snapshot_id])
    assert sandbox.create_snapshot(name=mark).snapshot_id == first.snapshot_id
    assert create(mark).files.read("f") == "3"
    assert json.loads(node.records("saved_snapshots")[first.snapshot_id])["created_at"] == saved["created_at"]

    for wrong in ("base", "with space", ":v1", "a" * 200):
        with pytest.raises(SandboxException, match=r"40[09]"):
            sandbox.create_snapshot(name=wrong)
    with pytest.raises(NotFoundException):
        Sandbox.create_snapshot("nosuchsandbox")
    assert Sandbox.delete_snapshot(mark)
    assert not Sandbox.delete_snapshot(mark)
    assert not Sandbox.delete_snapshot(first.snapshot_id)
    assert api.get(f"/snapshots/{mark}").status_code == 404
    assert api.delete(f"/snapshots/{tagged.snapshot_id}").status_code == 204
    with pytest.raises(SandboxException, match=mark):
        Sandbox.create(f"{mark}:v2")


def test_deleting_frees_exactly_what_nobody_else_names(create: Create, node: NodeProcess) -> None:
    kept = {table: set(node.records(table)) for table in ("snapshots", "layers", "memory")}
    sandbox = create()
    sandbox.files.write("f", "x" * 100_000)
    snapshot = sandbox.create_snapshot()
    child = create(snapshot.snapshot_id)
    sandbox.kill()
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    # The child lives on what it shares with the snapshot, also across a pause.
    assert len(child.files.read("f")) == 100_000
    child.pause()
    child.connect()
    assert len(child.files.read("f")) == 100_000
    child.kill()
    wait_for(
        lambda: all(set(node.records(table)) == before for table, before in kept.items()),
        "everything of the snapshot to be freed",
    )
    wait_for(
        lambda: set(files(node)) == {key for keys in kept.values() for key in keys if not key.startswith("v-")},
        "all files of it to go",
    )
    assert_nothing_leaked(node)


def files(node: NodeProcess) -> list[str]:
    return [name.split(".")[0] for folder in ("snapshots", "layers", "memory") for name in names(node.home / folder)]


def test_a_paused_sandbox_is_saved_as_it_is(create: Create) -> None:
    sandbox = create()
    pid = counter(sandbox)
    sandbox.files.write("f", "paused")
    sandbox.pause()
    full = sandbox.create_snapshot()
    assert sandbox.get_info().state == "paused"
    with pytest.raises(SandboxException, match="409"):
        sandbox.create_snapshot(mode="filesystem")
    child = create(full.snapshot_id)
    assert pid in [process.pid for process in child.commands.list()]
    sandbox.connect()
    sandbox.files.write("f", "resumed")
    assert create(full.snapshot_id).files.read("f") == "paused"
    sandbox.pause(mode="filesystem")
    disk = sandbox.create_snapshot()
    with pytest.raises(SandboxException, match="409"):
        sandbox.create_snapshot(mode="full")
    sandbox.kill()
    assert create(disk.snapshot_id).files.read("f") == "resumed"


def test_a_disk_only_snapshot_of_a_running_sandbox(create: Create) -> None:
    sandbox = create(secure=True)
    pid = counter(sandbox)
    sandbox.files.write("f", "unsynced")
    snapshot = sandbox.create_snapshot(mode="filesystem")
    sandbox.files.write("f", "source writes on")
    assert pid in [process.pid for process in sandbox.commands.list()]
    child = create(snapshot.snapshot_id, secure=True)
    assert child.files.read("f") == "unsynced"
    assert not child.files.exists("/dev/shm/n")
    assert pid not in [process.pid for process in child.commands.list()]
    assert sandbox.files.read("f") == "source writes on"


def test_snapshots_outlive_the_server(create: Create, node: NodeProcess) -> None:
    sandbox = create(secure=True)
    sandbox.files.write("f", "kept")
    snapshot = sandbox.create_snapshot(name=f"durable-{time.time_ns()}")
    sandbox.kill()
    restart(node)
    assert [s.snapshot_id for s in listed()] == [snapshot.snapshot_id]
    assert create(snapshot.names[0]).files.read("f") == "kept"
    assert_nothing_leaked(node)


def test_death_during_a_snapshot(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.files.write("f", "kept")
    for mode in ("full", "filesystem"):
        before = {path.name for path in (node.home / "snapshots").iterdir()}

        def snapshotting(before: set[str] = before) -> bool:
            return bool({path.name for path in (node.home / "snapshots").iterdir()} - before)

        def save(mode: str = mode) -> None:
            try:
                sandbox.create_snapshot(mode=mode)  # type: ignore[arg-type]
            except Exception:
                return  # the server died under it

        thread = threading.Thread(target=save)
        thread.start()
        wait_for(snapshotting, "the snapshot to begin", interval=0.0005)
        node.kill9()
        thread.join(60)
        node.start()
        assert states(node)[sandbox.sandbox_id] == "running"
        # Neither stopped nor frozen, and writing to a disk that is on record.
        sandbox.files.write("f", mode)
        sandbox.pause()
        sandbox.connect()
        assert sandbox.files.read("f") == mode
        for snapshot in listed():
            assert create(snapshot.snapshot_id).commands.run("echo whole").stdout == "whole\n"
            Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert_nothing_leaked(node)


def test_forks_of_what_a_snapshot_started(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("f", "root")
    child = create(sandbox.create_snapshot().snapshot_id)
    forks = child.fork(count=2)
    assert all(isinstance(fork, Sandbox) and fork.files.read("f") == "root" for fork in forks), forks


def test_the_network_can_be_changed_while_a_sandbox_runs(create: Create, node: NodeProcess) -> None:
    sandbox = create(network={"deny_out": ["192.0.2.1"]})
    assert sandbox.get_info().network["deny_out"] == ["192.0.2.1"]  # type: ignore[index]
    assert policy(node, sandbox) == (set(), {"192.0.2.1"})
    sandbox.update_network({"allow_out": ["198.51.100.0/24"], "deny_out": lambda ctx: [ctx.all_traffic]})
    assert policy(node, sandbox) == ({"198.51.100.0/24"}, {"0.0.0.0/0"})
    info = sandbox.get_info()
    assert info.network == {
        "allow_out": ["198.51.100.0/24"], "deny_out": ["0.0.0.0/0"], "allow_public_traffic": True
    }  # fmt: skip
    sandbox.update_network({"allow_internet_access": False})
    assert sandbox.get_info().allow_internet_access is False
    assert policy(node, sandbox) == (set(), {"0.0.0.0/0"})

    # What is on record holds for what outlives the server, and after a pause and in forks.
    restart(node)
    assert policy(node, sandbox) == (set(), {"0.0.0.0/0"})
    (fork,) = sandbox.fork(count=1)
    assert isinstance(fork, Sandbox)
    assert policy(node, fork) == (set(), {"0.0.0.0/0"})
    sandbox.pause()
    with pytest.raises(SandboxException, match="409"):
        sandbox.update_network({})
    sandbox.connect()
    assert policy(node, sandbox) == (set(), {"0.0.0.0/0"})
    sandbox.update_network({})
    assert policy(node, sandbox) == (set(), set())
    assert sandbox.get_info().allow_internet_access is None
    for wrong in ({"deny_out": ["example.com"]}, {"dns_servers": ["192.0.2.1"]}, {"allow_out": ["::/0"]}):
        with pytest.raises(SandboxException, match="400"):
            sandbox.update_network(wrong)  # type: ignore[arg-type]
    assert policy(node, sandbox) == (set(), set())


def policy(node: NodeProcess, sandbox: Sandbox) -> tuple[set[str], set[str]]:
    """The allowed and the denied networks in the rules of the sandbox's namespace, as the kernel has them."""
    slot = json.loads(node.records("sandboxes")[sandbox.sandbox_id])["slot"]
    found = []
    for name in ("allow", "deny"):
        command = ["ip", "netns", "exec", f"{node.prefix}-{slot}", "nft", "-j", "list", "set", "ip", "aenv", name]
        output = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        (described,) = [entry["set"] for entry in output["nftables"] if "set" in entry]
        found.append({_network(element) for element in described.get("elem", [])})
    return found[0], found[1]


def _network(element: object) -> str:
    if isinstance(element, dict) and "prefix" in element:
        return f"{element['prefix']['addr']}/{element['prefix']['len']}"
    return str(element)


def test_a_sandbox_whose_network_is_gone_goes_back_to_its_pause(create: Create, node: NodeProcess) -> None:
    never_paused, once_paused = create(), create()
    once_paused.files.write("f", "kept")
    once_paused.pause()
    once_paused.connect()
    node.kill9()
    for sandbox in (never_paused, once_paused):
        slot = json.loads(node.records("sandboxes")[sandbox.sandbox_id])["slot"]
        subprocess.run(["ip", "netns", "delete", f"{node.prefix}-{slot}"], check=True)
    node.start()
    with pytest.raises(NotFoundException):
        never_paused.get_info()
    assert once_paused.get_info().state == "paused"
    once_paused.connect()
    assert once_paused.files.read("f") == "kept"
    assert_nothing_leaked(node)


def test_listings_are_ordered_and_filtered_by_start(create: Create) -> None:
    mark = f"mark-{time.time_ns()}"
    made = []
    for _ in range(3):
        made.append(create(metadata={"mark": mark}))
        time.sleep(0.05)
    made[1].pause()
    infos = {info.sandbox_id: info for info in walk(SandboxQuery(metadata={"mark": mark}), "asc")}
    assert list(infos) == [sandbox.sandbox_id for sandbox in made]
    assert [info.sandbox_id for info in walk(SandboxQuery(metadata={"mark": mark}), "desc")] == list(infos)[::-1]
    second = infos[made[1].sandbox_id].started_at
    later = walk(SandboxQuery(metadata={"mark": mark}, started_after=second), "asc")
    assert [info.sandbox_id for info in later] == list(infos)[1:]
    assert not walk(SandboxQuery(started_after=datetime.now(UTC) + timedelta(hours=1)), None)


def walk(query: SandboxQuery, order: object) -> list[SandboxInfo]:
    pages = Sandbox.list(query=query, limit=2, order=order)  # type: ignore[arg-type]
    found: list[SandboxInfo] = []
    while pages.has_next:
        found += pages.next_items()
    return found
