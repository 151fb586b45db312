"""Overlaybd-native images on a real node: they start while nearly all of them is still in the registry."""

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from aenv.storage.layerd.client import LayerServer
from aenv.storage.layerd.config import Config
from tests.image import overlaybd, registries
from tests.image.writer import digest_of, push
from tests.node import images
from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for
from tests.node.test_cold import boot_id
from tests.node.test_recovery import assert_nothing_leaked, restart

pytestmark = pytest.mark.skipif(registries.PROGRAM is None, reason="docker-registry is not installed")

NAME, TAG = "native/tiny", "1"
SIZE = 384  # MiB of the disk
UNREAD = 96 << 20  # bytes of a file that no guest reads; random, so that it does not compress


@dataclass(frozen=True)
class Pushed:
    name: str
    image: overlaybd.NativeImage

    @property
    def size(self) -> int:
        return sum(map(len, self.image.layers))


@pytest.fixture(scope="module")
def native(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushed]:
    """Two layers: a small distribution without a user and bash and with a large file; and a program."""
    work = tmp_path_factory.mktemp("native")
    tree = overlaybd.unpacked(images.tiny([]).layers, work / "tree")
    (tree / "large").write_bytes(os.urandom(UNREAD))
    (work / "hello").write_text("#!/bin/sh\necho hello\n")
    base = overlaybd.ext4(tree, work / "one.img", SIZE)
    more = overlaybd.with_file(base, work / "two.img", work / "hello", "bin/hello")
    layers = [overlaybd.layer((None, base), work), overlaybd.layer((base, more), work)]
    image = overlaybd.NativeImage(
        layers, {"Env": ["PATH=/tools:/bin", "FROM_IMAGE=yes"], "WorkingDir": "/app", "User": "4321"}
    )
    (work / "registry").mkdir()
    with registries.running(work / "registry") as registry:
        push(registry.base, NAME, TAG, [image])
        node.restart(registries=json.dumps({registry.host: {"plain_http": True}}))
        yield Pushed(f"{registry.host}/{NAME}:{TAG}", image)


@pytest.fixture
def cold(create: Create, api: httpx.Client, native: Pushed) -> Callable[..., Sandbox]:
    def start(**body: Any) -> Sandbox:
        answer = api.post("/sandboxes-cold", json={"image": native.name, "timeout": 300, **body}, timeout=300)
        assert answer.status_code == 201, answer.text
        started: Sandbox = Sandbox.connect(answer.json()["sandboxID"], timeout=300)
        return started

    return start


def fetched(node: NodeProcess) -> int:
    """Bytes that the layer server has read from sources."""
    server = LayerServer(Config(node.runtime, None, 0, 0, 0), {})
    total: int = asyncio.run(server.stats())["total"]["fetched"]
    return total


def test_it_starts_while_it_is_in_the_registry(
    cold: Callable[..., Sandbox], node: NodeProcess, native: Pushed
) -> None:
    sandbox = cold()
    said = sandbox.commands.run("pwd; id -u; id -un; echo $PATH $FROM_IMAGE; hello; grep -c ^user: /etc/passwd")
    assert said.stdout.splitlines() == ["/app", "4321", "uid4321", "/tools:/bin yes", "hello", "1"]
    assert sandbox.commands.run("id -u", user="user").stdout == "1000\n"
    first = fetched(node)
    assert 0 < first < native.size / 8, f"{first} of {native.size} bytes were fetched"
    blobs = {path.name for path in (node.home / "images/blobs/sha256").iterdir()}
    assert not blobs & {digest_of(data).removeprefix("sha256:") for data in native.image.layers}
    second = cold()
    assert second.commands.run("hello").stdout == "hello\n"
    assert fetched(node) - first < first / 4, "the second start finds nearly all of it in the cache"
    assert sandbox.commands.run("wc -c < /large").stdout.strip() == str(UNREAD)


def test_it_is_a_sandbox_like_any_other(
    cold: Callable[..., Sandbox], create: Create, node: NodeProcess, api: httpx.Client, native: Pushed
) -> None:
    sandbox = cold(secure=True)
    booted = boot_id(sandbox)
    sandbox.commands.run("echo kept > /tmp/f; echo memory > /dev/shm/f")
    sandbox.pause()
    sandbox.connect()
    assert (boot_id(sandbox), sandbox.commands.run("cat /tmp/f /dev/shm/f").stdout) == (booted, "kept\nmemory\n")
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    assert child.commands.run("cat /dev/shm/f; hello").stdout == "memory\nhello\n"
    restart(node)
    assert child.commands.run("cat /tmp/f; hello").stdout == "kept\nhello\n"
    saved = sandbox.create_snapshot(name="from-native")
    wait_for(lambda: "from-native:default" in node.records("published"), "the snapshot to be in the repository", 120)
    for data in native.image.layers:
        name = digest_of(data).removeprefix("sha256:")
        stored: Path = node.home / "repository/layers" / name[:2] / name
        assert stored.read_bytes() == data, "the image's layers are there as they were"
    sandbox.kill()
    child.kill()
    made = create(saved.snapshot_id)
    assert made.commands.run("cat /dev/shm/f; hello; pwd").stdout == "memory\nhello\n/app\n"
    api.delete(f"/snapshots/{saved.snapshot_id}")
    made.kill()
    wait_for(lambda: not [n for n in node.records("layers") if n.startswith("v-")], "the volume to be forgotten")
    wait_for(lambda: not list((node.home / "images/native").iterdir()), "its registry to be forgotten")
    assert_nothing_leaked(node)


def test_refusals(native: Pushed, api: httpx.Client, node: NodeProcess) -> None:
    answer = api.post("/sandboxes-cold", json={"image": native.name, "diskSizeMB": SIZE * 2}, timeout=60)
    assert answer.status_code == 400 and f"{SIZE} MiB" in answer.json()["message"], answer.text
    assert not node.records("sandboxes")
