"""QEMU's command line. Pure: what a machine is made of and why; nothing here looks at the host."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv.vmm.protocol import Accelerator, MachineShape, NetworkAttachment

# pcie, usb: no devices that a sandbox does not need. rtc: the guest's clock at boot. ioapic2=off: 8 virtio-mmio
# slots instead of 24, which saves about 2 ms of a restore. suppress-vmdesc: no JSON description in the state.
# pit, pic: the guest never programs the PIC, whose first tick then arrives as vector 0, a "divide error", and ends
# the boot of a quiet host more often than not. They can go because the TSC's frequency is given (below).
MACHINE = "microvm,acpi=on,pcie=off,pit=off,pic=off,rtc=on,ioapic2=off,suppress-vmdesc=on"
DEVICE_MODEL = f"{MACHINE} virtio-blk virtio-net virtio-rng"
BACKING_NODE = "backing"
ROOT_NODE = "root"
MEMORY_ID = "mem"
CONSOLE_SET, KVM_SET = 1, 2  # numbers of descriptor sets
BASE_PARAMETERS = "console=ttyS0 reboot=t panic=-1 quiet loglevel=4 cryptomgr.notests random.trust_cpu=on"
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True, slots=True)
class Platform:
    """What is the same for all VMs of a node."""

    qemu: str
    accelerator: Accelerator
    cpu_model: str  # value of -cpu
    tsc_khz: int  # frequency of the host's time stamp counter, which TCG passes through


@dataclass(frozen=True, slots=True)
class BootSource:
    """What a cold boot starts from, besides memory and disk, which are named over QMP as for a restore."""

    kernel: Path
    initramfs: Path
    parameters: str


@dataclass(frozen=True, slots=True)
class Given:
    """Descriptors of what a process without rights cannot open itself; it inherits them."""

    console: int
    tap: int | None
    kvm: int | None


def escape(value: object) -> str:
    """A value inside a comma-separated QEMU option."""
    return str(value).replace(",", ",,")


def process_name(vm_id: str) -> str:
    """An argument by which a VM's process can be found."""
    return f"aenv-{vm_id}"


def kernel_parameters(platform: Platform, parameters: Mapping[str, str]) -> str:
    """The kernel command line. Raises ValueError for what would not arrive as one parameter.

    Under TCG the kernel is told the frequency of the TSC: this machine has no other clock to measure it by, and
    against an emulated PIT, were there one, the measurement fails on a busy host and the kernel hangs.
    """
    words = [BASE_PARAMETERS]
    if platform.accelerator is Accelerator.TCG:
        words.append(f"no_timer_check tsc=reliable tsc_early_khz={platform.tsc_khz}")
    for key, value in parameters.items():
        word = f"{key}={value}" if value else key
        if not key or any(c.isspace() or c == '"' or ord(c) < 32 for c in word):
            raise ValueError(f"Kernel parameter {word!r} has white space, quotes or control characters.")
        words.append(word)
    return " ".join(words)


def memory_backend(path: Path, memory_mib: int) -> dict[str, Any]:
    """``object-add`` arguments: guest RAM as a private mapping of a file that QEMU itself cannot write.

    ``rom=off`` is what makes "a read-only file, mapped writable and private" of ``readonly=on``.
    """
    return {
        "qom-type": "memory-backend-file",
        "id": MEMORY_ID,
        "size": memory_mib << 20,
        "mem-path": str(path),
        "share": False,
        "readonly": True,
        "rom": "off",
        "dump": False,
        "merge": False,
    }


def disk_node(path: Path, node: str, form: str, **more: Any) -> dict[str, Any]:
    """``blockdev-add`` arguments of the writable root.

    ``no-flush``: a guest's fsync reaches the host's page cache, not its disk. The sandbox survives the death of
    QEMU and of the server; after a power loss of the host a running sandbox is lost with its memory anyway, and
    whoever promises durability of a frozen overlay syncs it then.
    """
    cache = {"no-flush": True}
    return {
        "driver": form,
        "node-name": node,
        "discard": "unmap",
        "detect-zeroes": "unmap",
        "cache": cache,
        "file": {"driver": "file", "filename": str(path), "discard": "unmap", "cache": cache},
        **more,
    }


def backing_node(path: Path, node: str) -> dict[str, Any]:
    """``blockdev-add`` arguments of a frozen qcow2 layer that is to go below the root."""
    return {
        "driver": "qcow2",
        "node-name": node,
        "read-only": True,
        "file": {"driver": "file", "filename": str(path), "read-only": True},
    }


def is_ours(node: str) -> bool:
    """Whether a block node got its name from here, and not from QEMU."""
    return node.startswith((ROOT_NODE, BACKING_NODE))


def accelerator_option(accelerator: Accelerator, vcpus: int, given: Given | None = None) -> str:
    if accelerator is Accelerator.KVM:
        return "kvm" if given is None or given.kvm is None else f"kvm,device=/dev/fdset/{KVM_SET}"
    return f"tcg,thread={'multi' if vcpus > 1 else 'single'}"


def command(
    platform: Platform,
    vm_id: str,
    shape: MachineShape,
    network: NetworkAttachment | None,
    console: Path,
    qmp_fd: int,
    boot: BootSource | None,
    given: Given | None = None,
    control_fd: int | None = None,
) -> list[str]:
    """The whole command line of a process that waits, to boot a kernel or for a snapshot when ``boot`` is None.

    The devices are the same in both, which is what lets a snapshot of one load in the other. ``drive=root`` and the
    memory backend are resolved when the machine is made, so the process gets them over QMP before that. Without
    ``given`` it opens console, tap and accelerator itself, which needs root.

    ``qmp_fd`` listens, for who comes later. Who starts QEMU and wants to talk to it at once does so over
    ``control_fd``, which is connected: a connection that waits when QEMU starts may be accepted by two of its threads
    (``monitor_init_qmp`` leaves the socket to the main loop until the monitor's own thread has got round to taking
    it). Both then read from it, and commands are mixed up or lost.
    """
    argv = [
        platform.qemu, "-name", escape(process_name(vm_id)),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", SANDBOX,
        "-M", MACHINE,
        "-accel", accelerator_option(platform.accelerator, shape.vcpus, given),
        "-cpu", platform.cpu_model,
        "-smp", f"cpus={shape.vcpus}",
        "-m", f"size={shape.memory_mib}M",
        "-global", "migration.send-configuration=off", "-global", "migration.x-events=on",
        "-chardev", f"socket,id=qmp,fd={qmp_fd},server=on,wait=off",
        "-mon", "chardev=qmp,mode=control",
    ]  # fmt: skip
    if control_fd is not None:
        argv += ["-chardev", f"socket,id=control,fd={control_fd}", "-mon", "chardev=control,mode=control"]
    path = escape(console)
    if given is not None:
        # The path is a note for who lists processes.
        argv += ["-add-fd", f"fd={given.console},set={CONSOLE_SET},opaque={path}"]
        path = f"/dev/fdset/{CONSOLE_SET}"
        if given.kvm is not None:
            argv += ["-add-fd", f"fd={given.kvm},set={KVM_SET}"]
    argv += ["-chardev", f"file,id=console,path={path},append=on", "-serial", "chardev:console", "-preconfig", "-S"]
    if boot is None:
        argv += ["-incoming", "defer"]
    else:
        argv += ["-kernel", str(boot.kernel), "-initrd", str(boot.initramfs), "-append", boot.parameters]
    # enospc: on a full host disk the VM stops and keeps its write (``QemuVm`` lets it go on later); other errors
    # reach the guest.
    argv += ["-device", f"virtio-blk-device,drive={ROOT_NODE},werror=enospc,rerror=report"]
    if network is not None:
        tap = f"tap,id=net,ifname={escape(network.tap)},script=no,downscript=no"
        if given is not None and given.tap is not None:
            tap = f"tap,id=net,fd={given.tap}"
        argv += ["-netdev", tap, "-device", f"virtio-net-device,netdev=net,mac={network.mac}"]
    return [*argv, "-device", "virtio-rng-device"]


def probe_command(platform: Platform, kernel: Path, initramfs: Path, console: Path) -> list[str]:
    """The same machine without disk and network, with the kernel talking from its first instruction on."""
    parameters = kernel_parameters(platform, {}).replace("quiet loglevel=4", "earlyprintk=ttyS0 loglevel=7")
    return [
        platform.qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-sandbox", SANDBOX,
        "-M", MACHINE,
        "-accel", accelerator_option(platform.accelerator, 1),
        "-cpu", platform.cpu_model,
        "-m", "256M",
        "-kernel", str(kernel), "-initrd", str(initramfs), "-append", parameters,
        "-chardev", f"file,id=console,path={escape(console)}", "-serial", "chardev:console",
        "-device", "virtio-rng-device",
    ]  # fmt: skip
