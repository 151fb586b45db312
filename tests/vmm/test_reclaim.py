"""Memory of an idle VM goes to the host's swap and comes back, whole, also in a capture."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aenv.vmm.protocol import MemoryImage
from tests.vmm.conftest import Children, Frozen, ask

MIB = 1 << 20


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "swap"
    with file.open("wb") as out:
        for _ in range(256):
            out.write(bytes(MIB))
    file.chmod(0o600)
    subprocess.run(["mkswap", file], check=True, stdout=subprocess.DEVNULL)
    on = subprocess.run(["swapon", file], check=False, capture_output=True, text=True)
    if on.returncode:
        pytest.skip(f"no swap here: {on.stderr.strip()}")
    yield file
    subprocess.run(["swapoff", file], check=True)


def anonymous(pid: int) -> int:
    """Resident anonymous memory, bytes (proc_pid_smaps(5))."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no such line")


async def test_memory_goes_and_comes_back(children: Children, frozen: Frozen, swap: Path, tmp_path: Path) -> None:
    vm = await children.restore("a", frozen)
    expected = await ask(vm, "fill 64 9")
    before = anonymous(vm.pid)
    assert before > 64 * MIB
    assert await vm.reclaim()
    assert anonymous(vm.pid) < before - 48 * MIB
    assert await ask(vm, "sum") == expected, "the guest takes back what it reads"
    assert await vm.reclaim()
    await vm.stop()
    stats = await vm.capture(tmp_path / "state", tmp_path / "delta")
    assert stats.memory_bytes > 64 * MIB, "what is in swap is captured as well"
    await vm.kill()
    again = replace(
        frozen,
        memory=MemoryImage(frozen.memory.base, tmp_path / "delta"),
        state=tmp_path / "state",
        disk=tmp_path / "a.qcow2",
    )
    assert await ask(await children.restore("b", again), "sum") == expected
