"""The command line of a machine."""

import itertools
import json
from pathlib import Path

import pytest

from aenv.vmm.protocol import Accelerator, MachineShape, NetworkAttachment
from aenv.vmm.qemu_command import BootSource, Platform, command, kernel_parameters, memory_backend

TCG = Platform("qemu-system-x86_64", Accelerator.TCG, "max", 2_600_000)
KVM = Platform("qemu-system-x86_64", Accelerator.KVM, "host", 2_600_000)
SHAPE = MachineShape(2, 512)
NETWORK = NetworkAttachment("ns", "tap0", "02:00:00:00:00:01")
BOOT = BootSource(Path("/k"), Path("/i"), "console=ttyS0", Path("/mem"), Path("/disk"))


def build(platform: Platform, boot: BootSource | None) -> list[str]:
    return command(platform, "v", SHAPE, NETWORK, Path("/con,sole"), 7, boot)


def devices(argv: list[str]) -> list[str]:
    return [b for a, b in itertools.pairwise(argv) if a in ("-device", "-serial", "-cpu", "-smp", "-m")]


@pytest.mark.parametrize("platform", [TCG, KVM])
def test_a_boot_and_a_restore_have_the_same_devices(platform: Platform) -> None:
    assert devices(build(platform, BOOT)) == devices(build(platform, None))


def test_a_process_that_waits_has_nothing_of_a_snapshot() -> None:
    argv = build(TCG, None)
    assert "-preconfig" in argv and "-kernel" not in argv and "-blockdev" not in argv
    assert not any("memory-backend" in word for word in argv)


def test_accelerators_differ_in_nothing_else() -> None:
    different = [(a, b) for a, b in zip(build(TCG, BOOT), build(KVM, BOOT), strict=True) if a != b]
    assert different == [("tcg,thread=multi", "kvm"), ("max", "host")]


def test_commas_are_escaped() -> None:
    assert "file,id=console,path=/con,,sole,append=on" in build(TCG, None)


def test_guest_memory_can_never_reach_the_file() -> None:
    backend = memory_backend(Path("/m"), 512)
    assert (backend["share"], backend["readonly"], backend["rom"]) == (False, True, "off")
    argv = build(TCG, BOOT)
    assert json.loads(argv[argv.index("-object") + 1])["mem-path"] == "/mem"


def test_kernel_parameters() -> None:
    line = kernel_parameters(TCG, {"aenv.root": "/dev/vda", "flag": ""})
    assert line.endswith(" aenv.root=/dev/vda flag")
    assert "tsc_early_khz=2600000" in line
    assert "tsc" not in kernel_parameters(KVM, {})
    for bad in ({"a": "b c"}, {"": "x"}, {"a": 'say "x"'}, {"a\n": "b"}):
        with pytest.raises(ValueError, match="Kernel parameter"):
            kernel_parameters(TCG, bad)
