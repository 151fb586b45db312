"""The command line of a machine."""

import itertools
from pathlib import Path

import pytest

from aenv.vmm.protocol import Accelerator, MachineShape, NetworkAttachment
from aenv.vmm.qemu_command import BootSource, Given, Platform, command, kernel_parameters, memory_backend

TCG = Platform("qemu-system-x86_64", Accelerator.TCG, "max", 2_600_000)
KVM = Platform("qemu-system-x86_64", Accelerator.KVM, "host", 2_600_000)
SHAPE = MachineShape(2, 512)
NETWORK = NetworkAttachment("ns", "tap0", "02:00:00:00:00:01")
BOOT = BootSource(Path("/k"), Path("/i"), "console=ttyS0")


def build(platform: Platform, boot: BootSource | None, given: Given | None = None) -> list[str]:
    return command(platform, "v", SHAPE, NETWORK, Path("/con,sole"), 7, boot, given)


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
    assert backend["mem-path"] == "/m"


def test_a_process_without_rights_opens_nothing_but_what_it_is_given() -> None:
    argv = build(KVM, BOOT, Given(console=8, tap=9, kvm=10))
    assert "kvm,device=/dev/fdset/2" in argv and "fd=10,set=2" in argv
    assert "file,id=console,path=/dev/fdset/1,append=on" in argv and "fd=8,set=1,opaque=/con,,sole" in argv
    assert "tap,id=net,fd=9" in argv and not any("tap0" in word for word in argv)
    assert devices(argv) == devices(build(KVM, None))


def test_whoever_starts_it_has_a_connection_that_nobody_has_to_accept() -> None:
    argv = command(TCG, "v", SHAPE, NETWORK, Path("/c"), 7, None, control_fd=8)
    assert "socket,id=qmp,fd=7,server=on,wait=off" in argv and "socket,id=control,fd=8" in argv
    assert [b for a, b in itertools.pairwise(argv) if a == "-mon"] == [
        "chardev=qmp,mode=control", "chardev=control,mode=control"
    ]  # fmt: skip


def test_kernel_parameters() -> None:
    line = kernel_parameters(TCG, {"aenv.root": "/dev/vda", "flag": ""})
    assert line.endswith(" aenv.root=/dev/vda flag")
    assert "tsc_early_khz=2600000" in line
    assert "tsc" not in kernel_parameters(KVM, {})
    for bad in ({"a": "b c"}, {"": "x"}, {"a": 'say "x"'}, {"a\n": "b"}):
        with pytest.raises(ValueError, match="Kernel parameter"):
            kernel_parameters(TCG, bad)
