"""The drives of a cold start: what the specification demands of them."""

from typing import Any

import pytest

from aenv.api.drives import AttachedDrive, drives
from aenv.errors import InvalidRequestError
from aenv.orchestrator.boot import read_only_folders
from aenv.orchestrator.model import Drive
from tests.api.fakes import FakeOrchestrator, api

IMAGE = "registry.example.org/team/data:1"


def drive(name: str = "data", **more: Any) -> AttachedDrive:
    return AttachedDrive(driveID=name, source={"image": IMAGE}, **more)  # type: ignore[arg-type]


async def test_defaults_and_what_is_asked_for() -> None:
    fake = FakeOrchestrator()
    asked = [
        {"driveID": "data", "source": {"image": IMAGE}},
        {"driveID": "own", "source": {"image": IMAGE}, "readOnly": False, "mountPath": "/srv/x/", "subPath": "a/./b/",
         "diskSizeMB": 100},
    ]  # fmt: skip
    async with api(fake) as client:
        answer = await client.post("/sandboxes-cold", json={"image": IMAGE, "attachedDrives": asked})
    assert answer.status_code == 201, answer.text
    assert fake.cold[-1].drives == (
        Drive(IMAGE, "/mnt/data"),
        Drive(IMAGE, "/srv/x", "a/b", read_only=False, disk_mib=100),
    )


@pytest.mark.parametrize("name", ["", "a/b", "a b", ".", "..", "a,b", "a:b", "ü"])
def test_names(name: str) -> None:
    with pytest.raises(InvalidRequestError):
        drives([drive(name)])


@pytest.mark.parametrize(
    "path",
    ["", "/", "//", "/.", "relative", "/a/../b", "/a b", "/a,b", "/a:b", "/proc", "/proc/x", "/sys/./x", "//dev/shm",
     "/run/x", "/agentenv", "/opt/agentenv/x", "/a/" + "x" * 256, '/a"b', "/a\nb"],
)  # fmt: skip
def test_paths_that_cannot_be(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="mountPath"):
        drives([drive(mount_path=path)])


@pytest.mark.parametrize("path", ["", "/a", "..", "a/../..", "a b", "a,b", "a:b", "."])
def test_folders_that_cannot_be(path: str) -> None:
    with pytest.raises(InvalidRequestError, match="subPath"):
        drives([drive(sub_path=path)])


def test_several() -> None:
    assert [found.mount_path for found in drives([drive("a"), drive("b"), drive("ab")])] == [
        "/mnt/a",
        "/mnt/b",
        "/mnt/ab",
    ]
    for other in (drive("a"), drive("b", mount_path="/mnt/a/x"), drive("b", mount_path="/mnt")):
        with pytest.raises(InvalidRequestError):
            drives([drive("a"), other])
    with pytest.raises(InvalidRequestError, match="too many"):
        drives([drive(f"d{number}") for number in range(17)])
    with pytest.raises(InvalidRequestError, match="together"):
        drives([drive(f"d{number}", mount_path=f"/{number}/{'x' * 200}") for number in range(6)])


def test_those_that_are_read_only_are_named_to_the_guest() -> None:
    found = drives([drive("a"), drive("b", read_only=False), drive("c", mount_path="/c")])
    assert read_only_folders(found) == ("aenv.readonly=/mnt/a,/c",)
    assert read_only_folders(found[1:2]) == ()
