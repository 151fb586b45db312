"""Overlaybd-native images on a real node: they start while nearly all of them is still in the registry."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from aenv.image.manifest import OCI_MANIFEST
from aenv.storage.layerd.client import LayerServer
from aenv.storage.layerd.config import Config
from tests.image import overlaybd, registries
from tests.image.writer import digest_of, push
from tests.node import images
from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for
from tests.node.test_cold import boot_id
from tests.node.test_recovery import assert_nothing_leaked, restart

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(registries.PROGRAM is None, reason="docker-registry is not installed"),
]

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
    # Files that go are renamed first and removed behind that.
    wait_for(lambda: not list((node.home / "layers").glob(".*")), "files aside to be removed")
    assert_nothing_leaked(node)


def test_refusals(native: Pushed, api: httpx.Client, node: NodeProcess, tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2 << 40)
        file.write(b"x" * 4096)
    host = native.name.partition("/")[0]
    huge = overlaybd.NativeImage([overlaybd.layer((None, tmp_path / "huge"), tmp_path)])
    broken = overlaybd.NativeImage([os.urandom(20_000)])
    for name, image, status, says in (("huge", huge, 400, "MiB"), ("broken", broken, 500, "layer")):
        push(f"http://{host}", f"native/{name}", "1", [image])
        answer = api.post("/sandboxes-cold", json={"image": f"{host}/native/{name}:1"}, timeout=60)
        assert answer.status_code == status and says in answer.json()["message"], answer.text
    answer = api.post("/sandboxes-cold", json={"image": native.name, "diskSizeMB": SIZE // 2}, timeout=60)
    assert answer.status_code == 400 and f"{SIZE} MiB" in answer.json()["message"], answer.text
    assert not node.records("sandboxes")


def test_a_larger_disk_grows_when_it_boots(cold: Callable[..., Sandbox], api: httpx.Client) -> None:
    sandbox = cold(diskSizeMB=3 * SIZE)
    blocks, block = map(int, sandbox.commands.run("stat -f -c '%b %S' /").stdout.split())
    size = blocks * block
    assert 0.8 * (3 * SIZE << 20) < size <= 3 * SIZE << 20
    assert api.get(f"/sandboxes/{sandbox.sandbox_id}").json()["diskSizeMB"] == 3 * SIZE
    assert sandbox.commands.run("hello").stdout == "hello\n"


def test_a_template_is_made_of_it(create: Create, node: NodeProcess, api: httpx.Client, native: Pushed) -> None:
    environment = {**os.environ, "AENV_API_URL": node.url, "AENV_API_KEY": node.api_key, "NO_COLOR": "1"}
    program = str(Path(sys.executable).parent / "aenv")

    def aenv(*arguments: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    before = fetched(node)
    aenv("pull", native.name, "--name", "from-native", "--mem", "256")
    assert fetched(node) - before < native.size / 4, "it was not downloaded"
    sandbox = create("from-native")
    said = sandbox.commands.run("pwd; id -un; echo $PATH $FROM_IMAGE; hello; wc -c < /large")
    assert said.stdout.splitlines() == ["/app", "uid4321", "/tools:/bin yes", "hello", str(UNREAD)]
    restart(node)
    assert sandbox.commands.run("hello").stdout == "hello\n"
    again = create("from-native")
    assert again.commands.run("hello").stdout == "hello\n"
    published = "from-native:default"
    wait_for(lambda: published in node.records("published"), "the template to be in the repository", 120)
    for data in native.image.layers:
        name = digest_of(data).removeprefix("sha256:")
        assert (node.home / "repository/layers" / name[:2] / name).read_bytes() == data
    for each in (sandbox, again):
        each.kill()
    assert api.delete("/templates/from-native").status_code in (200, 204)
    wait_for(lambda: not node.records("sandboxes"), "the sandboxes to be gone")
    assert_nothing_leaked(node)


def test_a_snapshot_is_published_and_started_again(
    cold: Callable[..., Sandbox], create: Create, node: NodeProcess, api: httpx.Client, native: Pushed
) -> None:
    host = native.name.partition("/")[0]
    target = f"{host}/native/published:1"
    sandbox = cold(envVars={"SECRET": "x"})
    sandbox.commands.run("echo written > /tmp/f")  # by nobody synced
    saved = api.post(f"/sandboxes/{sandbox.sandbox_id}/snapshots", json={"name": "to-publish"}).json()["snapshotID"]
    answer = api.post(f"/snapshots/{saved}/publish", json={"image": target}, timeout=300)
    assert answer.status_code == 201, answer.text
    done = answer.json()
    assert done["image"] == target and done["layers"] > 2
    # The second time the registry has everything but what is written out anew.
    environment = {**os.environ, "AENV_API_URL": node.url, "AENV_API_KEY": node.api_key, "NO_COLOR": "1"}
    program = Path(sys.executable).parent / "aenv"
    command = [str(program), "snapshot", "publish", "to-publish", f"{host}/native/published:2", "-o", "json"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert said.returncode == 0, said.stderr
    again = json.loads(said.stdout)
    assert again["pushedLayers"] <= 1
    started = cold(image=target)
    shown = started.commands.run("cat /tmp/f; hello; echo $FROM_IMAGE.$SECRET; echo $PATH; id -un")
    assert shown.stdout.splitlines() == ["written", "hello", ".", "/tools:/bin", "uid4321"]
    with_env = api.post(
        "/snapshots/to-publish/publish",
        json={"image": f"{host}/native/published:3", "environment": True},
        timeout=300,
    )
    assert with_env.status_code == 201
    manifest = httpx.get(f"http://{host}/v2/native/published/manifests/3", headers={"Accept": OCI_MANIFEST}).json()
    config = httpx.get(f"http://{host}/v2/native/published/blobs/{manifest['config']['digest']}").json()
    assert "SECRET=x" in config["config"]["Env"] and config["config"]["User"] == "uid4321"
    for body, status in (
        ({"image": "no-registry"}, 400),
        ({"image": f"{host}/x@{done['digest']}"}, 400),
        ({"image": target, "username": "u"}, 400),
        ({}, 400),
    ):
        assert api.post(f"/snapshots/{saved}/publish", json=body).status_code == status, body
    assert api.post("/snapshots/unknown/publish", json={"image": target}).status_code == 404
    api.delete(f"/snapshots/{saved}")
    for each in (sandbox, started):
        each.kill()
    wait_for(lambda: not node.records("sandboxes"), "the sandboxes to be gone")
    assert not list((node.home / "commits").iterdir())
    assert_nothing_leaked(node)


def test_a_snapshot_of_the_base_template_is_published(
    create: Create, api: httpx.Client, native: Pushed, node: NodeProcess
) -> None:
    """Nothing of it needs to be committed first; without memory it is taken as it is."""
    target = f"{native.name.partition('/')[0]}/native/from-base:1"
    sandbox = create()
    sandbox.files.write("f", "disk alone")
    path = f"/sandboxes/{sandbox.sandbox_id}/snapshots"
    saved = api.post(path, json={"memory": False}).json()["snapshotID"]
    sandbox.kill()
    done = api.post(f"/snapshots/{saved}/publish", json={"image": target}, timeout=500)
    assert done.status_code == 201, done.text
    assert done.json()["pushedLayers"] == done.json()["layers"] >= 2
    answer = api.post("/sandboxes-cold", json={"image": target, "timeout": 300}, timeout=300)
    assert answer.status_code == 201, answer.text
    started: Sandbox = Sandbox.connect(answer.json()["sandboxID"], timeout=300)
    assert started.files.read("f") == "disk alone"
    assert started.commands.run("sudo id -u; python3 -c 'print(6*7)'").stdout == "0\n42\n"
    api.delete(f"/snapshots/{saved}")
