"""Which hypervisors are tried, and what is remembered of it."""

import json
import time
from pathlib import Path

import pytest

from aenv.config import Settings
from aenv.errors import VmmError
from aenv.vmm import verdict
from aenv.vmm.choice import Hypervisors
from aenv.vmm.protocol import Accelerator
from aenv.vmm.verdict import CANDIDATES, Candidate, Memory, Verdict, allowed

KVM = Candidate("qemu", Accelerator.KVM)
TCG = Candidate("qemu", Accelerator.TCG)


def found(candidate: Candidate, works: bool = True) -> Verdict:
    return Verdict(*candidate, works, "It was tried.", "" if works else "Do something.", 1.5)


@pytest.mark.parametrize(
    ("vmm", "accelerator", "expected"),
    [
        ("auto", "auto", ["firecracker/kvm", "firecracker/pvm", "qemu/kvm", "qemu/tcg"]),
        ("qemu", "auto", ["qemu/kvm", "qemu/tcg"]),
        ("auto", "kvm", ["firecracker/kvm", "qemu/kvm"]),
        ("firecracker", "pvm", ["firecracker/pvm"]),
        ("firecracker", "tcg", []),
    ],
)
def test_settings_leave_candidates_best_first(vmm: str, accelerator: str, expected: list[str]) -> None:
    assert list(map(str, allowed(vmm, accelerator))) == expected


def test_a_verdict_is_remembered_for_what_it_depends_on(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    assert memory.recall(KVM, "kernel 1") is None
    memory.remember(found(KVM, works=False), "kernel 1")
    memory.remember(found(TCG), "kernel 1")
    assert Memory(tmp_path).recall(KVM, "kernel 1") == found(KVM, works=False)
    assert Memory(tmp_path).recall(TCG, "kernel 1") == found(TCG)
    assert Memory(tmp_path).recall(KVM, "kernel 2") is None


def test_verdicts_do_not_outlive_the_boot_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Memory(tmp_path).remember(found(KVM), "key")
    other = tmp_path / "boot"
    other.write_text("another boot\n")
    monkeypatch.setattr(verdict, "BOOT_ID", other)
    assert Memory(tmp_path).recall(KVM, "key") is None


def test_a_failure_is_tried_again_after_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(tmp_path)
    memory.remember(found(KVM, works=False), "key")
    memory.remember(found(TCG), "key")
    later = time.time() + verdict.FAILURE_HOLDS + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert memory.recall(KVM, "key") is None
    assert memory.recall(TCG, "key") == found(TCG)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"boot": "x"}', '{"verdicts": []}', json.dumps({"key": "old", "verdicts": [{}]})],
)
def test_a_file_that_is_not_ours_is_as_good_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / verdict.REMEMBERED).write_text(content)
    memory = Memory(tmp_path)
    assert memory.recall(KVM, "key") is None
    memory.remember(found(KVM), "key")
    assert memory.recall(KVM, "key") == found(KVM)


def hypervisors(tmp_path: Path, **settings: str) -> tuple[Hypervisors, list[str]]:
    kernel = tmp_path / "vmlinux"
    kernel.write_bytes(b"not a kernel")
    said: list[str] = []
    configured = Settings.model_validate({"home": tmp_path, "runtime": tmp_path, **settings})
    return Hypervisors(configured, kernel, kernel, said.append), said


async def test_every_candidate_gets_a_verdict_also_where_nothing_is_installed(tmp_path: Path) -> None:
    here, _ = hypervisors(tmp_path, qemu="no-such-qemu", firecracker="no-such-firecracker")
    tried = await here.verdicts()
    assert [item.candidate for item in tried] == list(CANDIDATES)
    for item in tried:
        assert not item.works and item.advice
    assert "no-such-qemu" in tried[-1].reason and "no-such-firecracker" in tried[0].reason


async def test_none_that_works_is_an_error_with_every_reason(tmp_path: Path) -> None:
    here, said = hypervisors(tmp_path, qemu="no-such-qemu", firecracker="no-such-firecracker")
    with pytest.raises(VmmError, match=r"firecracker/kvm: .* qemu/kvm: .* qemu/tcg: "):
        await here.choose()
    assert here.used is None and len(said) == len(CANDIDATES)


async def test_a_combination_that_does_not_exist_is_named(tmp_path: Path) -> None:
    here, _ = hypervisors(tmp_path, vmm="firecracker", accelerator="tcg")
    with pytest.raises(VmmError, match=r"There is no firecracker with tcg.*qemu/tcg"):
        await here.choose()
