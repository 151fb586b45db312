"""Keys, tokens, secrets and volumes of a real node, across its restart."""

import io
import os
import sqlite3
from pathlib import Path

import httpx
import pytest
from e2b import (
    AuthenticationException,
    Sandbox,
    Secret,
    SecretNotFoundException,
    Volume,
    VolumeException,
    VolumeNotFoundException,
    VolumePathNotFoundException,
)

from tests.node.conftest import Create
from tests.node.process import NodeProcess


def compat(feature: str, verdict: str = "works") -> pytest.MarkDecorator:
    return pytest.mark.compat("Python, sync", feature, verdict)


def client(node: NodeProcess, key: str, *, bearer: bool = False) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"} if bearer else {"X-API-Key": key}
    return httpx.Client(base_url=node.url, headers=headers, timeout=60)


def test_keys_work_are_named_and_stop(api: httpx.Client, node: NodeProcess, create: Create) -> None:
    made = api.post("/api-keys", json={"name": "ci"}).json()
    assert made["key"].startswith("e2b_") and made["mask"]["maskedValueSuffix"] == made["key"][-4:]
    sandbox = Sandbox.create("base", api_key=made["key"])
    for bearer in (False, True):
        with client(node, made["key"], bearer=bearer) as own:
            assert own.get(f"/sandboxes/{sandbox.sandbox_id}").status_code == 200
            (team,) = own.get("/teams").json()
            assert (team["apiKey"], team["isDefault"]) == (made["key"], True)
    assert api.patch(f"/api-keys/{made['id']}", json={"name": "renamed"}).status_code == 200
    first, *others = api.get("/api-keys").json()
    (second,) = (key for key in others if key["id"] == made["id"])
    assert (second["name"], second["lastUsed"] is not None) == ("renamed", True)
    assert "key" not in second
    assert api.delete(f"/api-keys/{first['id']}").status_code == 409
    assert api.delete(f"/api-keys/{made['id']}").status_code == 204
    assert api.delete(f"/api-keys/{made['id']}").status_code == 404
    with client(node, made["key"]) as gone:
        assert gone.get("/teams").status_code == 401


def test_access_tokens(api: httpx.Client, node: NodeProcess) -> None:
    made = api.post("/access-tokens", json={"name": "laptop"}).json()
    with client(node, made["token"], bearer=True) as own:
        assert own.get("/teams").json()[0]["apiKey"] == made["token"]
        assert api.delete(f"/access-tokens/{made['id']}").status_code == 204
        assert own.get("/teams").status_code == 401
    assert api.delete(f"/access-tokens/{made['id']}").status_code == 404


def test_nothing_of_a_key_is_in_the_home(api: httpx.Client, node: NodeProcess) -> None:
    made = api.post("/api-keys", json={"name": "hidden"}).json()
    for file in node.home.glob("accounts.db*"):
        assert made["key"].encode() not in file.read_bytes()
        assert file.stat().st_mode & 0o077 == 0
    api.delete(f"/api-keys/{made['id']}")


@compat("secrets", "differs")
def test_secrets_never_come_back(api: httpx.Client, node: NodeProcess) -> None:
    made = Secret.create("Sync-Secret", "hidden-value", metadata={"a": "b"})
    assert (made.name, made.version) == ("sync-secret", 1)
    assert Secret.update("sync-secret", "hidden-again").version == 2
    assert Secret.get_info(made.secret_id).metadata == {"a": "b"}
    assert "hidden" not in api.get("/secrets").text + api.get(f"/secrets/{made.secret_id}").text
    assert api.post("/secrets", json={"name": "SYNC-secret", "value": "x"}).status_code == 409
    assert Secret.destroy("sync-secret")
    with pytest.raises(SecretNotFoundException):
        Secret.get_info("sync-secret")


@compat("volumes")
def test_volumes(api: httpx.Client, node: NodeProcess) -> None:
    folder = node.home / "volumes"
    before = set(folder.iterdir()) if folder.exists() else set()
    volume = Volume.create("sync-volume")
    assert Volume.get_info(volume.volume_id).name == "sync-volume"
    assert api.post("/volumes", json={"name": "sync-volume"}).status_code == 409
    assert set(folder.iterdir()) - before == {folder / volume.volume_id}
    assert Volume.destroy(volume.volume_id)
    assert set(folder.iterdir()) == before
    with pytest.raises(VolumeNotFoundException):
        Volume.get_info(volume.volume_id)


@compat("volume content")
def test_volume_content(node: NodeProcess) -> None:
    volume = Volume.create("sync-content")
    try:
        assert volume.write_file("/f", "text ü").size == 7
        assert volume.read_file("/f") == "text ü"
        large = os.urandom(9 << 20)
        volume.make_dir("/a/b/c", force=True, mode=0o750, uid=1000)
        with pytest.raises(VolumePathNotFoundException):
            volume.make_dir("/x/y")
        with pytest.raises(VolumePathNotFoundException):
            volume.write_file("/x/y", "")
        written = volume.write_file("/a/b/large", io.BytesIO(large), uid=1000, gid=1001, mode=0o640)
        assert (written.uid, written.gid, written.mode, written.size) == (1000, 1001, 0o640, len(large))
        assert volume.read_file("/a/b/large", format="bytes") == large
        assert b"".join(volume.read_file("/a/b/large", format="stream")) == large
        assert volume.write_file("/a/b/large", "small").mode == 0o640, "overwriting leaves owner and mode"
        assert [entry.path for entry in volume.list("/")] == ["/a", "/f"]
        deep = volume.list("/", depth=9)
        assert [(entry.path, entry.type.value) for entry in deep] == [
            ("/a", "directory"),
            ("/a/b", "directory"),
            ("/a/b/c", "directory"),
            ("/a/b/large", "file"),
            ("/f", "file"),
        ]
        assert (deep[2].mode, deep[2].uid) == (0o750, 1000)
        changed = volume.update_metadata("/f", mode=0o4711, gid=7)
        assert (changed.mode, changed.gid, volume.get_info("/f").mode) == (0o4711, 7, 0o4711)
        with pytest.raises(VolumeException, match="not a file"):
            volume.read_file("/a")
        for outside in ("/../../api-key", "..", "a/../../x"):
            with pytest.raises(VolumeException, match="cannot be a path"):
                volume.read_file(outside)
        other = Volume.create("sync-other")
        with pytest.raises(AuthenticationException):
            volume.read_file("/f", token=other.token)
        Volume.destroy(other.volume_id)
        # What was answered is durable, also when the server dies at once.
        node.kill9()
        node.start()
        assert Volume.connect(volume.volume_id).read_file("/a/b/large") == "small"
        volume.remove("/a")
        assert not volume.exists("/a/b") and volume.exists("/f")
        with pytest.raises(VolumePathNotFoundException):
            volume.remove("/a")
    finally:
        Volume.destroy(volume.volume_id)


def test_accounts_and_logs_survive_kill_9(tmp_path: Path) -> None:
    """On a node of its own, which is killed without warning and started again."""
    node = NodeProcess(tmp_path, warm_vms="0", metrics_interval="0")
    try:
        node.start()
        with client(node, node.api_key) as api:
            key = api.post("/api-keys", json={"name": "kept"}).json()["key"]
            api.post("/secrets", json={"name": "kept", "value": "v"})
            api.post("/volumes", json={"name": "kept"})
            sandbox = api.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
            gone = api.post("/v2/sandboxes", json={"templateID": "base"}).json()["sandboxID"]
            api.delete(f"/sandboxes/{gone}")
            before = api.get(f"/v2/sandboxes/{sandbox}/logs").json()
        node.kill9()
        node.start()
        with client(node, key) as api:
            assert api.get("/secrets/kept").status_code == 200
            assert [volume["name"] for volume in api.get("/volumes").json()] == ["kept"]
            assert api.get(f"/v2/sandboxes/{sandbox}/logs").json() == before
            assert api.get(f"/v2/sandboxes/{gone}/logs").json()["logs"][-1]["message"] == "killed"
            assert len(api.get(f"/sandboxes/{sandbox}/metrics").json()) == 1, "on demand, as the interval is 0"
        ended = sqlite3.connect(node.home / "logs.db").execute("SELECT id FROM sandboxes WHERE ended_ms NOT NULL")
        assert ended.fetchall() == [(gone,)]
    finally:
        node.destroy()
