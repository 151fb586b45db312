"""Requests and responses of the API: fields, statuses, errors."""

from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest

from aenv.errors import (
    AenvError,
    CapacityError,
    ConflictError,
    CorruptFileError,
    IncompatibleSnapshotError,
    SandboxStartError,
    SandboxUnreachableError,
    VmmError,
)
from aenv.orchestrator.model import Egress, SandboxSpec
from tests.api.fakes import FakeOrchestrator, api


def spec(fake: FakeOrchestrator) -> SandboxSpec:
    return fake.specs[-1]


async def create(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await client.post("/sandboxes", json={"templateID": "base", **body})
    assert response.status_code == 201, response.text
    made: dict[str, Any] = response.json()
    return made


async def test_create_returns_e2b_fields() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        response = await client.post("/sandboxes", json={"templateID": "base", "secure": True})
        body = response.json()
        assert response.status_code == 201
        assert response.headers["x-agentenv-sandbox-id"] == body["sandboxID"]
        assert set(body) == {
            "templateID", "sandboxID", "clientID", "alias", "envdVersion", "envdAccessToken", "domain"
        }  # fmt: skip
        assert body["domain"] == "sandbox.test"


async def test_defaults_of_both_versions() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        await create(client)
        assert spec(fake) == SandboxSpec(template="base", timeout=15, auto_pause=True, secure=False)
        await client.post("/v2/sandboxes", json={"templateID": "base", "secure": False})
        assert spec(fake) == SandboxSpec(template="base", timeout=300, auto_pause=True, secure=True)


async def test_all_fields_reach_the_spec() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        await create(
            client,
            timeout=60,
            autoPause=True,
            autoResume={"enabled": True},
            metadata={"a": "b"},
            envVars={"A": "1"},
            allow_internet_access=False,
            network={"allowPublicTraffic": False, "allowOut": ["8.8.8.8", "10.0.0.0/8"], "denyOut": ["0.0.0.0/0"]},
            mcp=None,
            volumeMounts=[],
        )
    assert spec(fake) == SandboxSpec(
        template="base",
        timeout=60,
        auto_resume=True,
        metadata={"a": "b"},
        env_vars={"A": "1"},
        egress=Egress(False, ("8.8.8.8", "10.0.0.0/8"), ("0.0.0.0/0",)),
        allow_public_traffic=False,
    )


async def test_auto_pause_false_is_honoured() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        await create(client, autoPause=False)
        assert spec(fake).auto_pause is False


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "templateID"),
        ({"templateID": ""}, "templateID"),
        ({"templateID": 5}, "templateID"),
        ({"templateID": "base", "timeout": -1}, "timeout"),
        ({"templateID": "base", "timeout": 86401}, "timeout"),
        ({"templateID": "base", "timeout": "60"}, "timeout"),
        ({"templateID": "base", "timeout": 1.5}, "timeout"),
        ({"templateID": "base", "metadata": {"a": 1}}, "metadata.a"),
        ({"templateID": "base", "envVars": {"A=B": "1"}}, "envVars"),
        ({"templateID": "base", "envVars": {"A": "x" * (128 * 1024 - 2)}}, "envVars"),
        ({"templateID": "base", "autoPause": False, "autoResume": {"enabled": True}}, "autoResume"),
        ({"templateID": "base", "autoPauseMemory": False, "autoResume": {"enabled": True}}, "autoPauseMemory"),
        ({"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}, "volumeMounts"),
        ({"templateID": "base", "mcp": {"x": {}}}, "mcp"),
        ({"templateID": "base", "iam": {"tokens": {}}}, "iam"),
        ({"templateID": "base", "network": {"maskRequestHost": "x\r\ny: z"}}, "network.maskRequestHost"),
        ({"templateID": "base", "network": {"httpsPorts": [8443]}}, "network.httpsPorts"),
        ({"templateID": "base", "network": {"egressProxy": {"address": "p:1"}}}, "network.egressProxy"),
        ({"templateID": "base", "network": {"dnsServers": ["1.1.1.1"]}}, "network.dnsServers"),
        ({"templateID": "base", "network": {"rules": {"x": []}}}, "network.rules"),
        ({"templateID": "base", "network": {"allowOut": ["*.example.com"]}}, "network.allowOut"),
        ({"templateID": "base", "network": {"denyOut": ["10.0.0.0/99"]}}, "network.denyOut"),
        ([], "body"),
    ],
)
async def test_wrong_creations_name_the_field(body: object, named: str) -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        for path in ("/sandboxes", "/v2/sandboxes"):
            response = await client.post(path, json=body)
            error = response.json()
            assert response.status_code == error["code"] == (501 if named == "volumeMounts" else 400)
            assert named in error["message"]
    assert fake.specs == []


@pytest.mark.parametrize("field", ["metadata", "envVars", "network"])
@pytest.mark.parametrize("inner", [r'{"\ud800": "x"}', r'{"x": "\ud800"}'])
async def test_half_a_surrogate_pair_is_a_400(field: str, inner: str) -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        body = f'{{"templateID": "base", "{field}": {inner}}}'
        response = await client.post("/sandboxes", content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["code"]) == (400, 400)
    assert fake.specs == []


async def test_broken_json_is_a_400() -> None:
    async with api(FakeOrchestrator()) as client:
        response = await client.post("/sandboxes", content=b"{", headers={"content-type": "application/json"})
        assert response.json() == {"code": 400, "message": "Invalid request: body: invalid JSON"}


async def test_detail_and_life() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        made = await create(client, timeout=100, metadata={"k": "v"}, network={"denyOut": ["1.1.1.1"]})
        path = f"/sandboxes/{made['sandboxID']}"
        body = (await client.get(path)).json()
        assert body["state"] == "running"
        assert body["metadata"] == {"k": "v"}
        assert body["lifecycle"] == {"autoResume": False, "onTimeout": "pause"}
        assert body["network"] == {"allowPublicTraffic": True, "denyOut": ["1.1.1.1"]}
        assert (body["cpuCount"], body["memoryMB"], body["diskSizeMB"]) == (2, 512, 4096)
        assert datetime.fromisoformat(body["endAt"]) > datetime.now(UTC)
        assert (await client.get(path + "-1a2b3c")).json()["sandboxID"] == made["sandboxID"]

        assert (await client.post(path + "/timeout", json={"timeout": 5})).status_code == 204
        assert (await client.post(path + "/refreshes", json={"duration": 1000})).status_code == 204
        assert (await client.post(path + "/refreshes")).status_code == 204
        assert (await client.post(path + "/refreshes", json={"duration": 3601})).status_code == 400
        assert (await client.post(path + "/connect", json={"timeout": 5})).status_code == 200
        assert (await client.post(path + "/connect", json={})).status_code == 400
        assert (await client.post(path + "/pause")).status_code == 204
        assert (await client.post(path + "/pause", json={})).status_code == 409
        assert (await client.post(path + "/pause", json={"memory": False})).status_code == 409
        assert (await client.post(path + "/timeout", json={"timeout": 5})).status_code == 409
        body = (await client.get(path)).json()
        assert (body["state"], body["pauseMode"]) == ("paused", "full")
        assert (await client.post(path + "/resume", json={"timeout": 5})).status_code == 201
        assert (await client.post(path + "/resume", json={"timeout": 5})).status_code == 409
        assert "pauseMode" not in (await client.get(path)).json()
        assert (await client.post(path + "/pause", json={"memory": False})).status_code == 204
        assert (await client.get(path)).json()["pauseMode"] == "filesystem"
        assert (await client.post("/v2" + path + "/connect", json={})).status_code == 201
        assert fake.reboots == []
        await client.post(path + "/pause")
        assert (await client.post("/v2" + path + "/connect", json={"memory": False})).status_code == 201
        assert fake.reboots == [made["sandboxID"]]
        fake.unresponsive = True
        refused = await client.post(path + "/pause", json={"requireHealthyGuest": True})
        assert (refused.status_code, refused.headers["should-retry"]) == (503, "true")
        assert (await client.delete(path)).status_code == 204
        assert (await client.delete(path)).status_code == 404


@pytest.mark.parametrize("bad", ["nosuch", "%00", "a%2Fb", "..%2f..", "é", "a b", "%ff", "x" * 500, "-", "'--"])
async def test_odd_ids_are_not_found(bad: str) -> None:
    async with api(FakeOrchestrator()) as client:
        for method, tail in (("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("POST", "/fork")):
            response = await client.request(method, f"/sandboxes/{bad}{tail}")
            assert response.status_code == response.json()["code"] == 404


async def test_fork_reports_each_child() -> None:
    fake = FakeOrchestrator()
    async with api(fake, max_fork=4) as client:
        made = await create(client)
        path = f"/sandboxes/{made['sandboxID']}/fork"
        one = await client.post(path)
        assert one.status_code == 201
        assert len(one.json()) == 1
        fake.capacity = 4
        first, second, third = (await client.post(path, json={"count": 3})).json()
        assert set(first) == set(second) == {"sandbox"}
        assert third["error"]["code"] == 503
        assert third["error"]["error_code"] == "sandbox_capacity_unavailable"
        for count in (0, 5, -1):
            refused = await client.post(path, json={"count": count})
            assert refused.status_code == 400
            assert "count" in refused.json()["message"]


async def test_listings() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        ids = [(await create(client, metadata={"n": str(n % 2)}))["sandboxID"] for n in range(5)]
        await client.post(f"/sandboxes/{ids[0]}/pause")

        async def listed(path: str, **query: Any) -> list[str]:
            response = await client.get(path, params=query)
            assert response.status_code == 200, response.text
            return [item["sandboxID"] for item in response.json()]

        assert await listed("/sandboxes") == ids[:0:-1]
        assert await listed("/sandboxes", metadata="n=0") == [ids[4], ids[2]]
        assert await listed("/v2/sandboxes") == ids[::-1]
        assert await listed("/v2/sandboxes", state="paused") == [ids[0]]
        assert await listed("/v2/sandboxes", state="running,paused") == ids[::-1]
        assert await listed("/v2/sandboxes", state=["running", "paused"]) == ids[::-1]
        assert await listed("/v2/sandboxes", template="base") == ids[::-1]
        assert await listed("/v2/sandboxes", template="other") == []
        now = datetime.now(UTC)
        assert await listed("/v2/sandboxes", startedAfter=(now - timedelta(hours=1)).isoformat()) == ids[::-1]
        assert await listed("/v2/sandboxes", startedAfter=now.isoformat()) == []
        assert await listed("/v2/sandboxes", order="asc") == ids
        assert await listed("/v2/sandboxes", order="asc", limit=2) == ids[:2]

        first = await client.get("/v2/sandboxes", params={"limit": 3})
        token = first.headers["x-next-token"]
        rest = await client.get("/v2/sandboxes", params={"limit": 3, "nextToken": token})
        assert [item["sandboxID"] for item in first.json() + rest.json()] == ids[::-1]
        assert "x-next-token" not in rest.headers
        assert first.headers["x-total-running"] == rest.headers["x-total-running"] == "4"
        for parameters, running in (("metadata=n=0", "2"), ("state=running&limit=1", "4"), ("state=paused", None)):
            counted = await client.get(f"/v2/sandboxes?{parameters}")
            assert counted.headers.get("x-total-running") == running, parameters

        for query in (
            {"limit": 0}, {"limit": 101}, {"limit": "x"}, {"state": "dead"}, {"metadata": "no-equals"},
            {"nextToken": "foreign"}, {"order": "up"}, {"startedAfter": "2026-01-01T00:00:00"},
        ):  # fmt: skip
            refused = await client.get("/v2/sandboxes", params=query)
            assert refused.status_code == 400, query


async def test_network_updates_replace_the_policy() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        made = await create(client, network={"denyOut": ["1.1.1.1"]})
        path = f"/sandboxes/{made['sandboxID']}"
        update = {"allowOut": ["8.8.8.8"], "denyOut": ["0.0.0.0/0"], "allow_internet_access": True}
        assert (await client.put(path + "/network", json=update)).status_code == 204
        body = (await client.get(path)).json()
        assert body["network"] == {"allowPublicTraffic": True, "allowOut": ["8.8.8.8"], "denyOut": ["0.0.0.0/0"]}
        assert body["allowInternetAccess"] is True
        assert (await client.put(path + "/network", json={})).status_code == 204
        body = (await client.get(path)).json()
        assert body["network"] == {"allowPublicTraffic": True}
        assert "allowInternetAccess" not in body
        for wrong, named in (
            ({"rules": {"x": [{}]}}, "rules"),
            ({"egressProxy": {"address": "x:1"}}, "egressProxy"),
            ({"dnsServers": ["1.1.1.1"]}, "dnsServers"),
            ({"denyOut": ["example.com"]}, "denyOut"),
            ({"allow_internet_access": "no"}, "allow_internet_access"),
        ):
            refused = await client.put(path + "/network", json=wrong)
            assert refused.status_code == 400
            assert named in refused.json()["message"]
        await client.post(path + "/pause")
        assert (await client.put(path + "/network", json={})).status_code == 409
        assert (await client.put("/sandboxes/nosuch/network", json={})).status_code == 404


async def test_snapshots() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        sandbox = (await create(client))["sandboxID"]
        first = await client.post(f"/sandboxes/{sandbox}/snapshots", json={})
        assert first.status_code == 201
        assert set(first.json()) == {
            "snapshotID", "names", "cpuCount", "memoryMB", "diskSizeMB", "createdAt", "updatedAt"
        }  # fmt: skip
        assert first.json()["names"] == []
        made = (await client.post(f"/sandboxes/{sandbox}/snapshots", json={"name": "team/mine:v1"})).json()
        assert made["names"] == ["team/mine:v1"]
        assert (await client.get("/snapshots/team/mine")).json() == made
        assert (await client.get("/snapshots/team%2Fmine")).json() == made
        page = await client.get("/snapshots", params={"sandboxID": sandbox, "limit": 1})
        rest = await client.get("/snapshots", params={"nextToken": page.headers["x-next-token"]})
        assert page.json() + rest.json() == [made, first.json()]
        for wrong in ({"name": ""}, {"name": "no spaces"}, {"name": 5}, {"memory": "yes"}):
            assert (await client.post(f"/sandboxes/{sandbox}/snapshots", json=wrong)).status_code == 400
        assert (await client.get("/snapshots", params={"limit": 0})).status_code == 400
        assert (await client.get("/snapshots", params={"nextToken": "foreign"})).status_code == 400
        assert (await client.post("/sandboxes/nosuch/snapshots", json={})).status_code == 404
        assert (await client.delete(f"/snapshots/{made['snapshotID']}")).status_code == 204
        assert (await client.delete(f"/snapshots/{made['snapshotID']}")).status_code == 404
        assert (await client.get("/snapshots/team/mine")).status_code == 404


async def test_templates() -> None:
    async with api(FakeOrchestrator()) as client:
        found = (await client.get("/templates")).json()
        assert [item["templateID"] for item in found] == [f"template{n:012}" for n in range(3)]
        assert found[0]["createdBy"] is None
        assert found[0]["lastSpawnedAt"] is None
        page = await client.get("/v2/templates", params={"limit": 2})
        rest = await client.get("/v2/templates", params={"nextToken": page.headers["x-next-token"]})
        assert [t["templateID"][-1] for t in page.json() + rest.json()] == ["2", "1", "0"]
        assert (await client.get("/v2/templates", params={"nextToken": "foreign"})).status_code == 400
        assert (await client.get("/templates/base")).json()["builds"][0]["status"] == "ready"
        assert (await client.get("/templates/aliases/team%2Ft1")).json()["templateID"] == "template" + "1".zfill(12)
        assert (await client.get("/templates/aliases/none")).status_code == 404
        assert (await client.get("/templates/none")).status_code == 404


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConflictError("x"), 409),
        (CapacityError("x"), 503),
        (SandboxStartError("x"), 500),
        (SandboxUnreachableError("x"), 502),
        (VmmError("x"), 500),
        (IncompatibleSnapshotError("x"), 409),
        (CorruptFileError("x"), 500),
        (AenvError("x", "hint"), 500),
    ],
)
async def test_typed_errors(error: AenvError, status: int) -> None:
    fake = FakeOrchestrator()
    fake.broken = error
    async with api(fake) as client:
        response = await client.get("/sandboxes/x")
        assert response.status_code == response.json()["code"] == status
        assert response.json()["message"] == str(error)
        assert response.headers.get("should-retry") == {502: "false", 503: "true"}.get(status)


async def test_unknown_errors_tell_nothing() -> None:
    fake = FakeOrchestrator()
    fake.broken = ValueError("secret path /etc")
    async with api(fake) as client:
        response = await client.get("/sandboxes/x")
        assert response.status_code == 500
        assert "secret" not in response.text
        assert "request id" in response.json()["message"]


async def test_keys() -> None:
    fake = FakeOrchestrator()
    async with api(fake, key=None) as client:
        right = {"Authorization": "Bearer e2b_" + "0" * 40}
        assert (await client.get("/sandboxes", headers=right)).status_code == 200
        wrong: list[dict[str, str]] = [
            {},
            {"X-API-Key": "wrong"},
            {"X-API-Key": ""},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic x"},
        ]
        for headers in wrong:
            for path in ("/sandboxes", "/nosuch", "/docs"):
                response = await client.get(path, headers=headers)
                assert response.status_code == response.json()["code"] == 401
        latin = await client.get("/sandboxes", headers=[(b"x-api-key", b"\xe9")])
        assert latin.status_code == 401
        # A stranger's broken body is not even read.
        assert (await client.post("/sandboxes", content=b"{")).status_code == 401
        assert (await client.get("/health")).status_code == 204


async def test_unknown_paths_and_methods_and_sizes() -> None:
    async with api(FakeOrchestrator()) as client:
        assert (await client.get("/nosuch")).json() == {"code": 404, "message": "Not Found: GET /nosuch"}
        assert (await client.put("/sandboxes")).json()["code"] == 405
        large = await client.post("/sandboxes", content=b"x" * (5 * 2**20))
        assert large.status_code == large.json()["code"] == 413

        async def endless() -> Any:
            for _ in range(6):
                yield b" " * 2**20

        headers = {"content-type": "application/json"}
        assert (await client.post("/sandboxes", content=endless(), headers=headers)).status_code == 413


async def test_the_openapi_document_describes_what_is_served() -> None:
    async with api(FakeOrchestrator(), key=None) as client:
        document = (await client.get("/openapi.json")).json()
    create_responses = document["paths"]["/sandboxes"]["post"]["responses"]
    assert set(create_responses) == {"201", "400", "401", "404", "422", "500", "501", "503", "default"}
    assert "HTTPValidationError" not in document["components"]["schemas"]
    assert set(document["components"]["securitySchemes"]) == {"APIKeyHeader", "HTTPBearer"}
    assert document["components"]["schemas"]["Error"]["required"] == ["code", "message"]
    assert "sandboxID" in document["components"]["schemas"]["Sandbox"]["properties"]


async def test_pages_of_other_origins_may_call() -> None:
    asked = {"Origin": "https://page.test", "Access-Control-Request-Method": "POST"}
    headers = "x-api-key, content-type, e2b-sandbox-id, connect-protocol-version"
    async with api(FakeOrchestrator(), key=None) as client:
        allowed = await client.options("/v2/sandboxes", headers=asked | {"Access-Control-Request-Headers": headers})
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "*"
        assert {"POST", "PUT", "PATCH", "DELETE"} <= set(allowed.headers["access-control-allow-methods"].split(", "))
        assert allowed.headers["access-control-allow-headers"] == headers
        # A refusal can be read by the page as well; a request that no page sent is answered as ever.
        refused = await client.get("/v2/sandboxes", headers={"Origin": "https://page.test"})
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "*")
        assert "access-control-allow-origin" not in (await client.get("/v2/sandboxes")).headers
    async with api(FakeOrchestrator()) as client:
        listed = await client.get("/v2/sandboxes", headers={"Origin": "https://page.test"})
        assert "X-Next-Token" in listed.headers["access-control-expose-headers"]
        # The guest daemon's answers, but no other server's of a sandbox.
        to_guest = {"Origin": "https://page.test", "e2b-sandbox-id": "i" + "0" * 19}
        for port, origin in (("49983", "*"), ("8080", None)):
            answer = await client.get("/health", headers=to_guest | {"e2b-sandbox-port": port})
            assert answer.status_code == 502 or answer.status_code == 404
            assert answer.headers.get("access-control-allow-origin") == origin


async def test_extension_parameters() -> None:
    async with api(FakeOrchestrator()) as client:
        path = f"/sandboxes/{(await create(client, customExtensionParams={}))['sandboxID']}/custom-extension-params"
        assert (await client.get(path)).json() == {}
        patched = await client.patch(path, json={"a": 1})
        assert (patched.status_code, patched.json()["error_code"]) == (501, "not_supported")
        for method in ("get", "patch"):
            missing = await client.request(method, "/sandboxes/nosuchsandbox/custom-extension-params", json={})
            assert missing.status_code == 404
        refused = await client.post("/sandboxes", json={"templateID": "base", "customExtensionParams": {"a": 1}})
        assert refused.status_code == 400 and "customExtensionParams" in refused.json()["message"]


async def test_a_null_is_as_if_it_were_left_out() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        await create(client, network={"allowPublicTraffic": None}, autoPause=None, autoResume=None, iam=None)
        assert spec(fake).allow_public_traffic
