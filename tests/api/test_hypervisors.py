"""``GET /nodes/{nodeID}/hypervisors``."""

from tests.api.fakes import FakeOrchestrator, api


async def test_verdicts_name_the_one_in_use() -> None:
    async with api(FakeOrchestrator()) as client:
        node = (await client.get("/nodes")).json()[0]["id"]
        broken, working = (await client.get(f"/nodes/{node}/hypervisors")).json()
    assert broken == {
        "vmm": "qemu", "accelerator": "kvm", "works": False, "used": False,
        "reason": "It did not start.", "advice": "Buy another.", "unconfined": [],
    }  # fmt: skip
    assert working["works"] and working["used"] and working["accelerator"] == "tcg"
    assert working["unconfined"] == ["no limits of memory"]


async def test_other_nodes_are_not_known_here() -> None:
    async with api(FakeOrchestrator()) as client:
        assert (await client.get("/nodes/elsewhere/hypervisors")).status_code == 404
