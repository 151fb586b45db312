"""A node that is full, or whose guests do not come up, says so and goes on."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.node.process import NodeProcess, wait_for


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node of its own: room for one sandbox, nothing made ahead."""
    made = NodeProcess(tmp_path_factory.mktemp("small"), warm_vms="0", max_sandboxes="1")
    try:
        made.start()
        yield made
    finally:
        made.destroy()


def call(node: NodeProcess, method: str, path: str, body: object = None) -> httpx.Response:
    return httpx.request(method, node.url + path, json=body, headers={"X-API-Key": node.api_key}, timeout=60)


def create(node: NodeProcess) -> httpx.Response:
    return call(node, "POST", "/sandboxes", {"templateID": "base", "timeout": 60})


def kill_all(node: NodeProcess) -> None:
    for sandbox in call(node, "GET", "/v2/sandboxes?state=running,paused").json():
        call(node, "DELETE", f"/sandboxes/{sandbox['sandboxID']}")
    wait_for(lambda: not node.records("sandboxes") and not node.vm_pids(), "the node to be empty")


def restart_with(node: NodeProcess, **settings: str) -> None:
    node.terminate()
    node.configure(**settings)
    node.start()


def test_too_many_sandboxes(small: NodeProcess) -> None:
    first = create(small)
    assert first.status_code == 201
    refused = create(small)
    assert refused.status_code == 503
    assert "at most 1" in refused.json()["message"] and "max_sandboxes" in refused.json()["message"]
    path = f"/sandboxes/{first.json()['sandboxID']}"
    fork = call(small, "POST", f"{path}/fork", {"count": 2})
    assert fork.status_code == 503
    # A paused sandbox holds no place; resuming needs one again.
    assert call(small, "POST", f"{path}/pause").status_code == 204
    second = create(small)
    assert second.status_code == 201
    assert call(small, "POST", f"{path}/resume", {"timeout": 60}).status_code == 503
    assert call(small, "GET", path).json()["state"] == "paused"
    kill_all(small)
    assert create(small).status_code == 201
    kill_all(small)


@pytest.mark.parametrize(
    ("setting", "value", "word"),
    [("reserve_memory", "100000000", "memory"), ("reserve_disk", "1000000000", "disk")],
)
def test_no_memory_or_disk_left(small: NodeProcess, setting: str, value: str, word: str) -> None:
    restart_with(small, **{setting: value})
    try:
        refused = create(small)
        assert refused.status_code == 503
        assert word in refused.json()["message"] and setting in refused.json()["message"]
        assert httpx.get(f"{small.url}/health").is_success
    finally:
        restart_with(small, **{setting: "16"})
    assert create(small).status_code == 201
    kill_all(small)


def test_a_guest_that_never_comes_up(small: NodeProcess) -> None:
    restart_with(small, start_timeout="0.001")
    try:
        failed = create(small)
        assert failed.status_code == 500
        assert "did not come up" in failed.json()["message"]
        wait_for(lambda: not small.records("sandboxes") and not small.vm_pids(), "its remains to be gone")
        assert not list((small.home / "sandboxes").iterdir())
    finally:
        restart_with(small, start_timeout="60")
    assert create(small).status_code == 201
    kill_all(small)


def test_a_damaged_snapshot_is_refused_and_not_served(small: NodeProcess) -> None:
    """A flipped magic in a paused sandbox's memory delta: an error, no half-restored machine, nothing else hurt."""
    path = f"/sandboxes/{create(small).json()['sandboxID']}"
    assert call(small, "POST", f"{path}/pause").status_code == 204
    (delta,) = (small.home / "snapshots").glob("*/delta")
    whole = delta.read_bytes()
    _write(delta, b"\xff" * 16 + whole[16:-4096] + b"\xff" * 4096)
    failed = call(small, "POST", f"{path}/resume", {"timeout": 60})
    assert failed.status_code == 500
    assert call(small, "GET", path).json()["state"] == "paused"
    wait_for(lambda: not small.vm_pids(), "the VM of the failed resume to be gone")
    _write(delta, whole)
    assert call(small, "POST", f"{path}/resume", {"timeout": 60}).status_code == 201
    kill_all(small)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
