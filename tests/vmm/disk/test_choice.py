"""Which way of exporting is chosen, and that what another way exported is found again."""

from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.vmm.disk import daemon, fuse, ublk
from aenv.vmm.disk.choice import Exporters, ExportKind, choose_exporter, find_blockd
from aenv.vmm.disk.protocol import DiskExport


def works(monkeypatch: pytest.MonkeyPatch, over: dict[str, str | None]) -> None:
    monkeypatch.setattr(ublk, "unavailable", lambda program: over["ublk"])
    monkeypatch.setattr(fuse, "unavailable", lambda: over["fuse"])


@pytest.fixture
def blockd(tmp_path: Path) -> Path:
    path = tmp_path / "aenv-blockd"
    path.touch()
    return path


@pytest.mark.parametrize(
    ("kind", "ublk_works", "fuse_works", "chosen"),
    [
        ("auto", True, True, "ublk"),
        ("auto", False, True, "fuse"),
        ("fuse", True, True, "fuse"),
        ("ublk", True, False, "ublk"),
    ],
)
async def test_choice(
    monkeypatch: pytest.MonkeyPatch, blockd: Path, kind: str, ublk_works: bool, fuse_works: bool, chosen: str
) -> None:
    works(monkeypatch, {"ublk": None if ublk_works else "not here", "fuse": None if fuse_works else "not here"})
    assert (await choose_exporter(ExportKind(kind), blockd)).kind == chosen


@pytest.mark.parametrize("kind", ["auto", "ublk", "fuse"])
async def test_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, blockd: Path, kind: str) -> None:
    works(monkeypatch, {"ublk": "no ublk_drv", "fuse": "no /dev/fuse"})
    with pytest.raises(VmmError) as caught:
        await choose_exporter(ExportKind(kind), blockd)
    assert ("no ublk_drv" in caught.value.message) == (kind != "fuse")
    assert ("no /dev/fuse" in caught.value.message) == (kind != "ublk")


async def test_a_configured_program_that_is_missing_is_not_replaced(tmp_path: Path) -> None:
    assert find_blockd(tmp_path / "missing") is None
    with pytest.raises(VmmError, match="make blockd"):
        await choose_exporter(ExportKind.UBLK, tmp_path / "missing")


class Recorder:
    def __init__(self) -> None:
        self.adopted: list[str] = []

    async def export(self, name: str, disk: Path, directory: Path) -> DiskExport:
        raise NotImplementedError

    async def adopt(self, name: str, directory: Path) -> DiskExport | None:
        self.adopted.append(name)
        return None


async def test_what_another_way_exported_is_adopted_by_that(tmp_path: Path) -> None:
    one, other = Recorder(), Recorder()
    exporters = Exporters("fuse", {"fuse": one, "ublk": other})
    await exporters.adopt("nothing", tmp_path)
    daemon.Record("ublk", 1, 2).write(tmp_path)
    await exporters.adopt("before", tmp_path)
    assert (one.adopted, other.adopted) == (["nothing"], ["before"])
    with pytest.raises(VmmError, match="ublk"):
        await Exporters("fuse", {"fuse": one}).adopt("before", tmp_path)
