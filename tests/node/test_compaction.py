"""Disk chains of sandboxes that are saved again and again while they run: they stay short, and nothing is lost."""

import json

import httpx

from aenv.orchestrator.compaction import MAX_CHAIN
from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for
from tests.node.test_recovery import assert_nothing_leaked, names, restart


def depth(node: NodeProcess, sandbox_id: str) -> int:
    layers = {key: json.loads(doc) for key, doc in node.records("layers").items()}
    name, count = json.loads(node.records("sandboxes")[sandbox_id])["disk"], 0
    while name is not None:
        name, count = layers[name]["parent"], count + 1
    return count


def test_a_sandbox_that_is_saved_often_keeps_a_short_chain(
    create: Create, node: NodeProcess, api: httpx.Client
) -> None:
    source = create()
    saved = {}
    for number in range(3 * MAX_CHAIN):
        source.commands.run(f"echo {number} > f{number}; sync")
        saved[number] = source.create_snapshot().snapshot_id
        if number == MAX_CHAIN + 2:  # in the middle of a merge, or just after one
            restart(node)
    wait_for(lambda: depth(node, source.sandbox_id) <= MAX_CHAIN + 1, "the chain to be merged")
    expected = "".join(f"{number}\n" for number in range(3 * MAX_CHAIN))
    files = " ".join(f"f{number}" for number in range(3 * MAX_CHAIN))
    # From the disk, not from what the guest has in memory.
    read = f"sudo sh -c 'echo 3 > /proc/sys/vm/drop_caches'; cat {files}"
    assert source.commands.run(read).stdout == expected
    source.pause()
    source.connect()
    assert source.commands.run(read).stdout == expected
    early = create(saved[4])
    drop = "sudo sh -c 'echo 3 > /proc/sys/vm/drop_caches'; "
    assert early.commands.run(drop + "cat f4; ls f5 2>/dev/null || true").stdout == "4\n"
    for snapshot in saved.values():
        assert api.delete(f"/templates/{snapshot}").status_code in (200, 204)
    source.kill()
    early.kill()
    wait_for(lambda: not node.records("saved_snapshots") and not node.records("sandboxes"), "all to be gone")
    wait_for(lambda: len(node.records("layers")) <= 4, "layers that nobody needs to go")
    wait_for(lambda: len(names(node.home / "layers")) == len(node.records("layers")), "their files to go, too")
    assert_nothing_leaked(node)
