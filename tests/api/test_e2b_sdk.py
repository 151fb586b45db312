"""The official E2B SDK, unchanged, against the API on a real port."""

from collections.abc import Iterator
from typing import Any

import pytest
from e2b import Sandbox, SandboxQuery
from e2b.api.client.models import SandboxState
from e2b.exceptions import (
    AuthenticationException,
    SandboxException,
    SandboxNotFoundException,
    SandboxNotRunningException,
    ServiceBusyException,
)

from tests.api.fakes import KEY, FakeOrchestrator, served


class Server:
    def __init__(self, fake: FakeOrchestrator, url: str) -> None:
        self.fake = fake
        self.options: dict[str, Any] = {"api_key": KEY, "api_url": url, "sandbox_url": url}


@pytest.fixture
def server() -> Iterator[Server]:
    fake = FakeOrchestrator()
    with served(fake) as url:
        yield Server(fake, url)


def create(server: Server, **options: Any) -> Sandbox:
    return Sandbox.create("base", **options, **server.options)


def test_life_of_a_sandbox(server: Server) -> None:
    box = create(server, timeout=60, metadata={"user": "a&b=c/ü"}, envs={"A": "1"})
    info = box.get_info()
    assert info.sandbox_id == box.sandbox_id
    assert info.name == "base"
    assert info.metadata == {"user": "a&b=c/ü"}
    assert info.state == SandboxState.RUNNING
    assert info.lifecycle == {"on_timeout": "pause", "auto_resume": False}
    before = info.end_at
    box.set_timeout(600)
    assert box.get_info().end_at > before
    assert box.pause() is True
    assert box.pause() is False
    assert box.get_info().state == SandboxState.PAUSED
    again = Sandbox.connect(box.sandbox_id, timeout=120, **server.options)
    assert again.sandbox_id == box.sandbox_id
    assert again.get_info().state == SandboxState.RUNNING
    assert box.kill() is True
    assert box.kill() is False


def test_lifecycle_options(server: Server) -> None:
    kept = create(server, lifecycle={"on_timeout": "pause", "auto_resume": True})
    assert kept.get_info().lifecycle == {"on_timeout": "pause", "auto_resume": True}
    killed = create(server, lifecycle={"on_timeout": "kill"})
    assert killed.get_info().lifecycle == {"on_timeout": "kill", "auto_resume": False}


def test_network_options(server: Server) -> None:
    box = create(
        server, allow_internet_access=False, network={"allow_public_traffic": False, "deny_out": ["10.0.0.0/8"]}
    )
    assert box.traffic_access_token
    info = box.get_info()
    assert info.allow_internet_access is False
    assert info.network is not None
    assert info.network["deny_out"] == ["10.0.0.0/8"]


def test_pages_and_filters(server: Server) -> None:
    boxes = [create(server, metadata={"kind": "x y&z" if n else "other"}) for n in range(5)]
    boxes[1].pause()
    pages = Sandbox.list(limit=2, **server.options)
    seen = []
    while pages.has_next:
        seen += [info.sandbox_id for info in pages.next_items()]
    assert seen == [box.sandbox_id for box in reversed(boxes)]
    query = SandboxQuery(metadata={"kind": "x y&z"}, state=[SandboxState.RUNNING])
    found = Sandbox.list(query=query, **server.options).next_items()
    assert [info.sandbox_id for info in found] == [box.sandbox_id for box in reversed(boxes[2:])]


def test_fork(server: Server) -> None:
    box = create(server)
    server.fake.capacity = 3
    first, second, third = box.fork(count=3)
    assert isinstance(first, Sandbox)
    assert isinstance(second, Sandbox)
    assert isinstance(third, ServiceBusyException)
    assert first.sandbox_id != second.sandbox_id


def test_missing_sandboxes(server: Server) -> None:
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect("nosuch", **server.options)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info("nosuch", **server.options)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.set_timeout("nosuch", 5, **server.options)
    assert Sandbox.kill("nosuch", **server.options) is False


def test_envd_of_a_dead_or_paused_sandbox(server: Server) -> None:
    box = create(server)
    box.pause()
    assert box.is_running() is False
    with pytest.raises(SandboxNotRunningException):
        box.files.read("/etc/hostname")
    with pytest.raises(SandboxNotRunningException):
        box.commands.run("true")
    box.kill()
    assert box.is_running() is False
    with pytest.raises(SandboxNotRunningException):
        box.commands.run("true")


def test_refusals(server: Server) -> None:
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("nosuch", **server.options)
    with pytest.raises(SandboxException, match="timeout"):
        create(server, timeout=10**6)
    with pytest.raises(SandboxException, match="not supported"):
        create(server).update_network({"egress_proxy": {"address": "proxy.test:1080"}})
    with pytest.raises(AuthenticationException):
        Sandbox.create("base", **{**server.options, "api_key": "wrong"})
    server.fake.capacity = 0
    with pytest.raises(ServiceBusyException):
        create(server, retries=1)
    assert len(server.fake.specs) >= 2
