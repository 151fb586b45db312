"""Cold starts on a real node, from images in a real registry: what boots, and that it is a sandbox like any other."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import Sandbox

from tests.image import overlaybd, registries
from tests.image.writer import Image, folder, member, push
from tests.image.writer import archive as tar
from tests.node import images
from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for
from tests.node.test_cold import boot_id, snapshot_of
from tests.node.test_recovery import assert_nothing_leaked, restart

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(registries.PROGRAM is None, reason="docker-registry is not installed"),
]

NAME = "cold/tiny:1"
DISK = 512  # MiB
ColdStart = Callable[..., Sandbox]


@pytest.fixture(scope="module")
def image(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image without bash, with its own PATH, variable, folder and numeric user."""
    with registries.running(tmp_path_factory.mktemp("registry")) as registry:
        made = images.tiny(["PATH=/tools:/bin", "FROM_IMAGE=a b"], WorkingDir="/app", User="4321:0")
        layer = tar([folder("tools", 0o755), member("tools/hello", b"#!/bin/sh\necho hello\n", mode=0o755)])
        repository, _, tag = NAME.partition(":")
        push(registry.base, repository, tag, [Image([*made.layers, layer], made.config)])
        other = tar([member("other", b"other ")])
        push(registry.base, repository, "other", [Image([*made.layers, other], made.config)])
        node.restart(registries=json.dumps({registry.host: {"plain_http": True}}), boot_args_allow="audit=,quiet")
        yield f"{registry.host}/{NAME}"


@pytest.fixture
def second_image(image: str) -> str:
    """Another one on the same base."""
    return f"{image.rpartition(':')[0]}:other"


@pytest.fixture
def cold(create: Create, api: httpx.Client, image: str) -> ColdStart:
    """POST /sandboxes-cold; ``create`` removes what it made."""

    def start(**body: Any) -> Sandbox:
        asked = {"image": image, "timeout": 300, "diskSizeMB": DISK, **body}
        answer = api.post("/sandboxes-cold", json=asked, timeout=300)
        assert answer.status_code == 201, answer.text
        made = answer.json()
        assert made["templateID"] == asked["image"]
        started: Sandbox = Sandbox.connect(made["sandboxID"], timeout=300)
        return started

    return start


def test_an_image_boots_as_it_says(cold: ColdStart, node: NodeProcess, api: httpx.Client) -> None:
    sandbox = cold(
        envVars={"COLOUR": "green"},
        memoryMB=384,
        secure=True,
        extraBootArgs="audit=0 forbidden=1 aenv.root=/dev/null",
    )
    said = sandbox.commands.run("pwd; id -u; id -g; echo $PATH; echo $FROM_IMAGE $COLOUR; hello")
    assert said.stdout.splitlines() == ["/app", "4321", "0", "/tools:/bin", "a b green", "hello"]
    parameters = sandbox.commands.run("cat /proc/cmdline").stdout.split()
    assert "audit=0" in parameters and "forbidden=1" not in parameters and "aenv.root=/dev/vda" in parameters
    record = api.get(f"/sandboxes/{sandbox.sandbox_id}").json()
    assert (record["memoryMB"], record["diskSizeMB"], record["state"]) == (384, DISK, "running")
    size = int(sandbox.commands.run("stat -f -c '%b %S' /").stdout.split()[0]) * 4096
    assert 0.8 * (DISK << 20) < size <= DISK << 20


def converted(node: NodeProcess) -> dict[Path, int]:
    """Layers in the image cache, and how many names each has."""
    return {path: path.stat().st_nlink for path in (node.home / "images/layers").glob("??/*")}


def test_the_converted_image_is_used_again(cold: ColdStart, node: NodeProcess) -> None:
    first = cold()
    before = [(path, path.stat().st_ino, path.stat().st_mtime_ns // 10**12) for path in sorted(converted(node))]
    second = cold()
    assert [(path, path.stat().st_ino) for path in sorted(converted(node))] == [each[:2] for each in before]
    mine = [json.loads(node.records("sandboxes")[s.sandbox_id])["disk"] for s in (first, second)]
    parents = {json.loads(node.records("layers")[disk])["parent"] for disk in mine}
    assert len(parents) == 1, "both are on the same layer"
    (base,) = parents
    links = {path.stat().st_ino for path in (node.home / "images/volumes" / base).iterdir()}
    assert links <= {inode for _, inode, _ in before} and len(links) >= 4
    first.commands.run("echo mine > /tmp/f")
    assert second.commands.run("cat /tmp/f 2>/dev/null || echo nothing").stdout == "nothing\n"
    first.kill()
    second.kill()
    wait_for(lambda: base not in node.records("layers"), "the image's layer to go with its last sandbox")
    wait_for(lambda: not (node.home / "images/volumes" / base).exists(), "its names to go as well")
    assert set(converted(node).values()) == {1}, "the cache has them still"


def test_images_on_one_base_share_its_layers(
    create: Create, api: httpx.Client, image: str, node: NodeProcess, second_image: str
) -> None:
    started = []
    for name in (image, second_image):
        answer = api.post("/sandboxes-cold", json={"image": name, "timeout": 300, "diskSizeMB": DISK}, timeout=300)
        assert answer.status_code == 201, answer.text
        started.append(Sandbox.connect(answer.json()["sandboxID"], timeout=300))
    assert started[0].commands.run("hello").stdout == "hello\n"
    assert started[1].commands.run("cat /other; command -v hello || echo none").stdout == "other none\n"
    assert sorted(converted(node).values()).count(3) >= 2, "two disks name what is shared, and the cache does"
    listed = {each["names"][0]: each for each in api.get("/images").json()}
    assert listed[image]["sharedBytes"] == listed[second_image]["sharedBytes"] > 0.9 * listed[image]["sizeBytes"]
    restart(node)
    assert started[1].commands.run("cat /other").stdout == "other "
    for each in started:
        each.kill()
    wait_for(lambda: set(converted(node).values()) == {1}, "the disks' names to go")


def test_a_larger_disk_grows_when_it_boots(cold: ColdStart, node: NodeProcess, api: httpx.Client) -> None:
    usual = 4096  # default_disk
    cold(diskSizeMB=usual).kill()
    before = set(converted(node))
    sandbox = cold(diskSizeMB=2 * usual)
    assert set(converted(node)) == before, "nothing had to be converted for it"
    size = int(sandbox.commands.run("stat -f -c '%b' /").stdout) * 4096
    assert 0.95 * (2 * usual << 20) < size <= 2 * usual << 20
    sandbox.commands.run("head -c 10000000 /dev/zero > /tmp/f")
    assert api.get(f"/sandboxes/{sandbox.sandbox_id}").json()["diskSizeMB"] == 2 * usual
    sandbox.pause(mode="filesystem")
    sandbox.connect()
    assert int(sandbox.commands.run("stat -f -c '%b' /").stdout) * 4096 == size
    assert sandbox.commands.run("wc -c < /tmp/f").stdout.strip() == "10000000"


def test_it_is_a_sandbox_like_any_other(
    cold: ColdStart, create: Create, node: NodeProcess, api: httpx.Client
) -> None:
    sandbox = cold(extraBootArgs="audit=0", envVars={"COLOUR": "green"})
    booted = boot_id(sandbox)
    sandbox.commands.run("echo kept > /tmp/f; echo memory > /dev/shm/f")
    sandbox.pause()
    sandbox.connect()
    assert (boot_id(sandbox), sandbox.commands.run("cat /tmp/f /dev/shm/f").stdout) == (booted, "kept\nmemory\n")
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    assert child.commands.run("cat /dev/shm/f; pwd; echo $COLOUR").stdout == "memory\n/app\ngreen\n"
    saved = sandbox.create_snapshot(name="from-cold")
    sandbox.kill()
    made = create(saved.snapshot_id)
    assert made.commands.run("cat /dev/shm/f; echo $FROM_IMAGE; id -u").stdout == "memory\na b\n4321\n"
    api.delete(f"/snapshots/{saved.snapshot_id}")
    child.pause(mode="filesystem")
    assert snapshot_of(node, child)["memory_base"] is None
    child.connect()
    assert boot_id(child) != booted
    assert "audit=0" in child.commands.run("cat /proc/cmdline").stdout.split(), "also when it boots again"
    restart(node)
    assert child.commands.run("cat /tmp/f").stdout == "kept\n"
    assert_nothing_leaked(node)


def test_the_cache_is_listed_and_removed_from(
    cold: ColdStart, node: NodeProcess, api: httpx.Client, image: str
) -> None:
    sandbox = cold()

    def cached() -> list[dict[str, Any]]:
        return [item for item in api.get("/images").json() if image in item["names"]]

    (listed,) = cached()
    assert (listed["names"], listed["inUse"]) == ([image], 1)
    assert listed["sizeBytes"] > 1e6
    refused = api.delete(f"/images/{image}")
    assert refused.status_code == 409 and "in use" in refused.json()["message"]
    assert api.delete("/images/no/such").status_code == 404
    collected = api.post("/images/gc", json={"capacityMB": 0}).json()
    assert collected["removed"] == 0, "it was just used"
    assert api.post("/images/gc", json={"capacityMB": -1}).status_code == 400

    environment = {**os.environ, "AENV_API_URL": node.url, "AENV_API_KEY": node.api_key, "NO_COLOR": "1"}

    def aenv(*arguments: str) -> subprocess.CompletedProcess[str]:
        program = Path(sys.executable).parent / "aenv"
        return subprocess.run([program, *arguments], env=environment, capture_output=True, text=True, timeout=300)

    shown = aenv("image", "ls", "-o", "table")
    assert image in shown.stdout and "IN USE" in shown.stdout, shown
    assert listed["digest"] in aenv("image", "ls", "-q").stdout.split()
    assert aenv("image", "rm", image).returncode == 1
    started = aenv("start", "--cold", image, "--disk", str(DISK), "--mem", "256", "-q")
    assert started.returncode == 0, started.stderr
    second = Sandbox.connect(started.stdout.strip(), timeout=300)
    assert second.commands.run("pwd").stdout == "/app\n"
    assert aenv("start", "base", "--disk", "99", "-q").returncode == 1
    second.kill()
    sandbox.kill()
    wait_for(lambda: cached()[0]["inUse"] == 0, "the image to be unused")
    assert aenv("image", "rm", image).returncode == 0
    assert cached() == []
    assert "kept" in aenv("image", "gc", "-o", "table").stdout


def test_drives_are_attached_and_captured(
    cold: ColdStart, create: Create, image: str, second_image: str, node: NodeProcess
) -> None:
    drives = [
        {"driveID": "tools", "source": {"image": image}, "subPath": "tools"},
        {"driveID": "data", "source": {"image": second_image}, "readOnly": False, "mountPath": "/srv/data"},
    ]
    sandbox = cold(attachedDrives=drives)
    said = sandbox.commands.run("/mnt/tools/hello; cat /srv/data/other; echo; ls /mnt/tools; pwd")
    assert said.stdout.splitlines() == ["hello", "other ", "hello", "/app"]
    refused = "touch /mnt/tools/x 2>&1 || true; echo mine > /srv/data/mine"
    assert "ead-only" in sandbox.commands.run(refused, user="root").stdout
    sandbox.pause(mode="filesystem")
    sandbox.connect()
    assert "ead-only" in sandbox.commands.run("touch /mnt/tools/x 2>&1 || true", user="root").stdout
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    assert child.commands.run("cat /srv/data/mine; /mnt/tools/hello").stdout == "mine\nhello\n"
    saved = sandbox.create_snapshot(name="with-drives")
    sandbox.kill()
    assert create(saved.snapshot_id).commands.run("cat /srv/data/mine; /mnt/tools/hello").stdout == "mine\nhello\n"
    Sandbox.delete_snapshot(saved.snapshot_id)


def test_what_cannot_be_started_leaves_nothing(image: str, api: httpx.Client, node: NodeProcess) -> None:
    host = image.partition("/")[0]
    for body, status, says in (
        ({"image": f"{host}/cold/none"}, 400, "not found"),
        ({"image": "UPPER"}, 400, "lower case"),
        ({"image": f"oci:{node.home}"}, 400, ""),
        ({"image": image, "diskSizeMB": 1}, 400, "diskSizeMB"),
        ({"image": image, "diskSizeMB": 64 << 20}, 400, "diskSizeMB"),
        ({"image": image, "cpuCount": 64}, 400, "cpuCount"),
        ({"image": image, "memoryMB": 64}, 400, "memoryMB"),
        (
            {"image": image, "attachedDrives": [{"driveID": "x", "source": {"image": f"{host}/no/ne"}}]},
            400,
            "not found",
        ),
    ):
        answer = api.post("/sandboxes-cold", json=body, timeout=120)
        assert answer.status_code == status and says in answer.json()["message"], answer.text
    assert not node.records("sandboxes")
    assert_nothing_leaked(node)


def test_a_file_system_that_does_not_boot_is_a_clear_error(
    image: str, api: httpx.Client, node: NodeProcess, tmp_path: Path
) -> None:
    (tmp_path / "noise").write_bytes(os.urandom(64 << 20))
    noise = overlaybd.NativeImage([overlaybd.layer((None, tmp_path / "noise"), tmp_path)])
    host = image.partition("/")[0]
    push(f"http://{host}", "cold/noise", "1", [noise])
    answer = api.post("/sandboxes-cold", json={"image": f"{host}/cold/noise:1"}, timeout=300)
    assert answer.status_code == 500 and answer.json()["error_code"] == "sandbox_create_failed", answer.text
    wait_for(lambda: not node.records("sandboxes"), "the failed sandbox to go")
    assert_nothing_leaked(node)
    wait_for(lambda: not list((node.home / "images/native").iterdir()), "what is known of its disk to go")
