"""Creations that are repeated under an idempotency key, as the SDK repeats them."""

import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from e2b import AsyncSandbox, Sandbox, SandboxException

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for


@pytest.mark.compat("Python, sync", "idempotency keys", "works")
def test_one_key_makes_one_sandbox(create: Create, node: NodeProcess) -> None:
    key = f"key-{time.time_ns()}"
    with ThreadPoolExecutor(6) as executor:
        made = list(executor.map(lambda _: create(idempotency_key=key, metadata={"a": "b"}), range(6)))
    (sandbox_id,) = {sandbox.sandbox_id for sandbox in made}
    assert len({sandbox._envd_access_token for sandbox in made}) == 1
    assert list(node.records("sandboxes")) == [sandbox_id]
    made[5].files.write("f", "one")
    # Also when the server died before it could answer, and while the sandbox is paused.
    node.kill9()
    node.start()
    again = create(idempotency_key=key, metadata={"a": "b"})
    assert again.sandbox_id == sandbox_id and again.files.read("f") == "one"
    again.pause()
    assert create(idempotency_key=key, metadata={"a": "b"}).sandbox_id == sandbox_id
    with pytest.raises(SandboxException, match=r"422.*another request"):
        create(idempotency_key=key, metadata={"a": "c"})
    (child,) = Sandbox.connect(sandbox_id).fork(count=1)
    assert isinstance(child, Sandbox) and child.kill()
    again.kill()
    wait_for(lambda: sandbox_id not in node.records("sandboxes"), "the sandbox to go")
    assert create(idempotency_key=key, metadata={"a": "b"}).sandbox_id != sandbox_id


@pytest.mark.compat("Python, async", "idempotency keys", "works")
async def test_one_key_makes_one_sandbox_async(create: Create) -> None:
    key = f"key-{time.time_ns()}"
    first, second = [await AsyncSandbox.create("base", idempotency_key=key) for _ in range(2)]
    assert first.sandbox_id == second.sandbox_id


def test_a_creation_that_failed_may_be_repeated(create: Create, api: httpx.Client) -> None:
    headers = {"Idempotency-Key": f"key-{time.time_ns()}"}
    for _ in range(2):
        assert api.post("/v2/sandboxes", json={"templateID": "nothing"}, headers=headers).status_code == 404
    made = api.post("/sandboxes", json={"templateID": "base"}, headers=headers)
    assert made.status_code == 201
    for wrong in ("", "UPPER", "a b", "x" * 256):
        refused = api.post("/v2/sandboxes", json={"templateID": "base"}, headers={"Idempotency-Key": wrong})
        assert refused.status_code == 400 and "Idempotency-Key" in refused.json()["message"], wrong
