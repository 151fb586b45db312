"""POST /sandboxes-cold: its schema, what reaches the lifecycle, refusals."""

from typing import Any

import pytest

from aenv.errors import AenvError, CapacityError
from aenv.image.errors import ImageNotFoundError, ImageTooLargeError, RegistryForbiddenError, RegistryUnreachableError
from aenv.orchestrator.boot import allowed_arguments
from aenv.orchestrator.model import ColdMachine, Sandbox, SandboxSpec
from tests.api.fakes import FakeOrchestrator, api

IMAGE = "registry.example.org/team/app:1"


async def test_fields_reach_the_lifecycle() -> None:
    fake = FakeOrchestrator()
    body: dict[str, Any] = {
        "image": f" {IMAGE} ",
        "timeout": 60,
        "autoPause": False,
        "secure": True,
        "allowInternetAccess": False,
        "metadata": {"project": "demo"},
        "envVars": {"COLOUR": "green"},
        "cpuCount": 2,
        "memoryMB": 768,
        "diskSizeMB": 2048,
        "attachedDrives": [],
        "extraBootArgs": "audit=0  panic=1 rm;rf",
    }
    async with api(fake, boot_args_allow=["audit="]) as client:
        answer = await client.post("/sandboxes-cold", json=body)
        assert answer.status_code == 201, answer.text
        made = answer.json()
        assert answer.headers["x-agentenv-sandbox-id"] == made["sandboxID"]
        assert (made["templateID"], "alias" in made) == (IMAGE, False)
        assert fake.cold == [ColdMachine(2, 768, 2048, ("audit=0",))]
        spec = fake.specs[-1]
        assert (spec.template, spec.timeout, spec.auto_pause, spec.secure) == (IMAGE, 60, False, True)
        assert spec.egress.allow_internet is False
        assert (spec.metadata, spec.env_vars) == ({"project": "demo"}, {"COLOUR": "green"})


async def test_defaults() -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        assert (await client.post("/sandboxes-cold", json={"image": IMAGE})).status_code == 201
    assert fake.specs == [SandboxSpec(template=IMAGE, timeout=15, auto_pause=True, secure=False)]
    assert fake.cold == [ColdMachine()]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "image"),
        ({"image": ""}, "image"),
        ({"image": 3}, "image"),
        ({"image": IMAGE, "cpuCount": "2"}, "cpuCount"),
        ({"image": IMAGE, "memoryMB": 1.5}, "memoryMB"),
        ({"image": IMAGE, "timeout": -1}, "timeout"),
        ({"image": IMAGE, "attachedDrives": [{"driveID": "data"}]}, "source"),
        ({"image": IMAGE, "attachedDrives": [{"driveID": "a/b", "source": {"image": IMAGE}}]}, "driveID"),
        ({"image": IMAGE, "customExtensionParams": {"a": 1}}, "customExtensionParams"),
        ({"image": IMAGE, "mcp": {"a": 1}}, "mcp"),
    ],
)
async def test_refusals(body: dict[str, Any], says: str) -> None:
    fake = FakeOrchestrator()
    async with api(fake) as client:
        answer = await client.post("/sandboxes-cold", json=body)
    assert answer.status_code == 400 and says in answer.json()["message"], answer.text
    assert not fake.specs


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (ImageNotFoundError("No such image."), 400, "image_not_found"),
        (ImageTooLargeError("Does not fit."), 400, None),
        (RegistryForbiddenError("Not allowed."), 400, None),
        (RegistryUnreachableError("No answer."), 500, "image_registry_unreachable"),
        (CapacityError("Full."), 503, "sandbox_capacity_unavailable"),
    ],
)
async def test_errors_have_the_specifications_statuses(error: AenvError, status: int, code: str | None) -> None:
    class Failing(FakeOrchestrator):
        async def create_cold(self, spec: SandboxSpec, machine: ColdMachine) -> Sandbox:
            raise error

    async with api(Failing()) as client:
        answer = await client.post("/sandboxes-cold", json={"image": IMAGE})
        assert (answer.status_code, answer.json().get("error_code")) == (status, code)
        assert (await client.post("/sandboxes-cold", json={}, headers={"X-API-Key": "wrong"})).status_code == 401


async def test_boot_arguments_leave_room_on_the_command_line() -> None:
    fake = FakeOrchestrator()
    async with api(fake, boot_args_allow=["audit="]) as client:
        for length, status in ((505, 201), (1000, 400)):
            body = {"image": IMAGE, "extraBootArgs": f"not=allowed audit={'1' * length}"}
            assert (await client.post("/sandboxes-cold", json=body)).status_code == status
    assert len(fake.cold) == 1


@pytest.mark.parametrize(
    ("text", "prefixes", "expected"),
    [
        ("a=1 b c=x/y+z=", ["a", "c="], ("a=1", "c=x/y+z=")),
        ("a=1", [], ()),
        ('a="1" a=$x a=ü\ta=ok', ["a"], ("a=ok",)),
        ("aenv.root=/dev/vdb =x init=/bin/sh", [""], ("init=/bin/sh",)),
        ("", ["a"], ()),
    ],
)
def test_allowed_boot_arguments(text: str, prefixes: list[str], expected: tuple[str, ...]) -> None:
    assert allowed_arguments(text, prefixes) == expected
