"""One real node, with real microVMs, shared by all tests of this folder."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from tests.node import javascript as javascript_packages
from tests.node.process import NodeProcess, wait_for

Create = Callable[..., Sandbox]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Into the JUnit report, from which scripts/compatibility.py makes its tables."""
    for item in items:
        for mark in item.iter_markers("compat"):
            item.user_properties.append(("compat", "|".join(mark.args)))


@pytest.fixture(scope="session")
def javascript() -> Path:
    """The folder with the JavaScript packages."""
    return javascript_packages.install()


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path_factory.mktemp("node"), warm_vms="2")
    try:
        made.start()
        yield made
    finally:
        made.destroy()


@pytest.fixture(autouse=True)
def e2b_environment(node: NodeProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user sets, and nothing else."""
    monkeypatch.setenv("E2B_API_URL", node.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", node.url)
    monkeypatch.setenv("E2B_VOLUME_API_URL", node.url)
    monkeypatch.setenv("E2B_API_KEY", node.api_key)


@pytest.fixture
def api(node: NodeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=node.url, headers={"X-API-Key": node.api_key}, timeout=60) as client:
        yield client


@pytest.fixture
def create(node: NodeProcess) -> Iterator[Create]:
    """``Sandbox.create`` whose sandboxes, and everything forked from them, are gone after the test."""

    def make(template: str = "base", **options: object) -> Sandbox:
        return Sandbox.create(template, **{"timeout": 300, **options})  # type: ignore[arg-type]

    yield make
    with httpx.Client(base_url=node.url, headers={"X-API-Key": node.api_key}, timeout=60) as client:
        for sandbox in client.get("/v2/sandboxes", params={"state": "running,paused"}).json():
            client.delete(f"/sandboxes/{sandbox['sandboxID']}")
    wait_for(lambda: not node.records("sandboxes"), "all sandboxes of the test to be gone")
