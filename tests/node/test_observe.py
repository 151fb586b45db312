"""Logs, metrics and the node's own figures, on real microVMs."""

import time
from datetime import UTC, datetime

import httpx
import pytest
from e2b import Sandbox, SandboxException

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for


def compat(feature: str, verdict: str = "works") -> pytest.MarkDecorator:
    return pytest.mark.compat("Python, sync", feature, verdict)


def messages(api: httpx.Client, sandbox_id: str, **query: object) -> list[str]:
    answer = api.get(f"/v2/sandboxes/{sandbox_id}/logs", params=query)  # type: ignore[arg-type]
    assert answer.status_code == 200, answer.text
    return [entry["message"] for entry in answer.json()["logs"]]


@compat("metrics")
def test_metrics_are_sampled_in_the_background(create: Create, api: httpx.Client) -> None:
    sandbox = create()
    before = datetime.now(UTC)
    time.sleep(11)
    samples = sandbox.get_metrics()
    assert len(samples) >= 2
    assert [s.timestamp for s in samples] == sorted(s.timestamp for s in samples)
    assert abs((samples[-1].timestamp - datetime.now(UTC)).total_seconds()) < 7
    assert all(0 < s.mem_used < s.mem_total and 0 <= s.cpu_used_pct <= 100 for s in samples)
    later = sandbox.get_metrics(start=before)
    assert 0 < len(later) <= len(samples)
    several = api.get("/sandboxes/metrics", params={"sandbox_ids": f"{sandbox.sandbox_id},nosuch"}).json()
    assert set(several["sandboxes"]) == {sandbox.sandbox_id}
    sandbox.pause()
    kept = sandbox.get_metrics()
    time.sleep(6)
    assert len(sandbox.get_metrics()) == len(kept)


def test_the_log_tells_the_life_of_a_sandbox(create: Create, api: httpx.Client) -> None:
    sandbox = create()
    sandbox.commands.run("echo said-by-the-guest | sudo tee /dev/ttyS0")
    sandbox.pause()
    sandbox.connect()
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    said = messages(api, sandbox.sandbox_id, level="info")
    expected = [
        "created from template base", "said-by-the-guest", "paused", "resumed", f"forked into {child.sandbox_id}",
    ]  # fmt: skip
    assert [line for line in said if line in expected] == expected
    assert messages(api, child.sandbox_id, level="info")[0] == f"forked from {sandbox.sandbox_id}"
    assert messages(api, sandbox.sandbox_id, search="said-by") == ["said-by-the-guest"]
    child.kill()
    assert messages(api, child.sandbox_id)[-1] == "killed"


def test_logs_page_in_both_directions(create: Create, api: httpx.Client) -> None:
    sandbox = create()
    sandbox.commands.run("for i in $(seq 30); do echo line-$i; done | sudo tee /dev/ttyS0 >/dev/null")
    wait_for(lambda: "line-30" in messages(api, sandbox.sandbox_id), "the console's last line")
    path = f"/v2/sandboxes/{sandbox.sandbox_id}/logs"
    every = api.get(path).json()["logs"]
    back = api.get(path, params={"direction": "backward"}).json()["logs"]
    assert back == every[::-1]
    paged: list[object] = []
    cursor = 0
    while page := api.get(path, params={"cursor": cursor, "limit": 7}).json()["logs"]:
        paged += page
        cursor = int(datetime.fromisoformat(page[-1]["timestamp"]).timestamp() * 1000 + 0.5) + 1
    assert paged == every
    assert api.get(path, params={"limit": 0}).json()["logs"] == []
    old = api.get(f"/sandboxes/{sandbox.sandbox_id}/logs", params={"limit": 5}).json()
    assert len(old["logs"]) == len(old["logEntries"]) == 5


def test_expiry_and_unknown_sandboxes(create: Create, api: httpx.Client) -> None:
    sandbox = create(timeout=1, lifecycle={"on_timeout": "kill"})
    wait_for(lambda: not sandbox.is_running(), "the sandbox to expire")
    assert messages(api, sandbox.sandbox_id)[-1] == "killed at the end of its time to live"
    assert api.get("/v2/sandboxes/nosuch/logs").status_code == 404
    assert api.get("/sandboxes/nosuch/logs").status_code == 404
    assert api.get("/sandboxes/nosuch/metrics").status_code == 404


@compat("volume mounts", "refused")
def test_volume_mounts_are_refused(create: Create) -> None:
    with pytest.raises(SandboxException, match=r"501: .*cannot be mounted"):
        create(volume_mounts={"/data": "some-volume"})


def test_the_node_tells_its_figures(create: Create, api: httpx.Client, node: NodeProcess) -> None:
    running, paused = create(), create()
    paused.pause()
    (found,) = api.get("/nodes").json()
    assert (found["sandboxCount"], found["sandboxPausedCount"], found["status"]) == (1, 1, "ready")
    assert found["createSuccesses"] >= 2
    assert found["metrics"]["allocatedMemoryBytes"] == running.get_info().memory_mb << 20
    assert 0 < found["metrics"]["memoryUsedBytes"] < found["metrics"]["memoryTotalBytes"]
    assert api.get(f"/nodes/{found['id']}").json()["id"] == found["id"]
    assert api.get("/nodes/other").status_code == 404
    assert api.get("/nodes/other/hypervisors").status_code == 404
    assert api.post(f"/nodes/{found['id']}", json={"status": "draining"}).status_code == 501
