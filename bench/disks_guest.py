"""``python -m bench.disks_guest``: fio inside a guest, on a raw file and on each export of a disk, in one run.

The guest is the node's kernel with an initramfs of busybox and fio. QEMU opens the exported path as a raw disk
through the page cache, as Firecracker does; with ``--firecracker`` it is Firecracker itself. Ratios compare with the
raw file in the same guest; larger is better. Needs root, KVM, fio and busybox.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from aenv.guest.initramfs import Entry, write_cpio
from aenv.guest.kernel import Kernel, ensure_kernel
from aenv.vmm.qemu_command import BASE_PARAMETERS, MACHINE
from bench.disks import MIB, Disks, available
from bench.report import Report, Row, console

JOBS = ("read 1m 1", "randread 4k 8", "randwrite 4k 8", "randwrite 4k 8", "write 1m 1")
NAMES = (
    "sequential reads, 1 MiB", "random reads, 4 KiB", "random writes, 4 KiB, first time",
    "random writes, 4 KiB, again", "sequential writes, 1 MiB",
)  # fmt: skip
INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev; /bin/busybox mount -t proc none /proc; /bin/busybox mount -t sysfs none /sys
/bin/busybox mount -t tmpfs none /tmp
while read module; do /bin/busybox insmod /modules/$module; done </modules/order
while [ ! -b /dev/vda ]; do /bin/busybox usleep 1000; done
while read rw bs part; do
  fio --name=job --filename=/dev/vda --rw=$rw --bs=$bs --ioengine=libaio --iodepth=8 --direct=1 --end_fsync=1 \\
    --size=SIZE --io_size=$((SIZE / part)) --randrepeat=1 --output-format=json --output=/tmp/out
  echo "fio: $(/bin/busybox tr -d '\\n ' </tmp/out)"
done </jobs
/bin/busybox reboot -f
"""


def libraries(program: str) -> list[Path]:
    said = subprocess.run(["ldd", program], check=False, capture_output=True, text=True).stdout
    return [Path(path) for path in re.findall(r"(/\S+) \(0x", said)]


def archive(kernel: Kernel, size: int) -> bytes:
    """The guest's whole file system."""
    fio, busybox = shutil.which("fio"), shutil.which("busybox")
    assert fio and busybox
    files = {"bin/fio": Path(fio), "bin/busybox": Path(busybox)}
    for library in {*libraries(fio), *libraries(busybox)}:
        files[str(library).lstrip("/")] = library
    folders = {"dev", "proc", "sys", "tmp", "modules"}
    for name in files:
        folders |= {str(parent) for parent in Path(name).parents} - {"."}
    executable = stat.S_IFREG | 0o755
    return write_cpio(
        [
            *(Entry(name, stat.S_IFDIR | 0o755) for name in sorted(folders)),
            Entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1)),
            *(Entry(name, executable, path.read_bytes()) for name, path in files.items()),
            *(Entry(f"modules/{module.name}.ko", executable, module.data) for module in kernel.modules),
            Entry("modules/order", executable, "".join(f"{module.name}.ko\n" for module in kernel.modules).encode()),
            Entry("jobs", executable, "".join(f"{job}\n" for job in JOBS).encode()),
            Entry("init", executable, INIT.replace("SIZE", str(size)).encode()),
        ]
    )


def qemu(kernel: Path, initramfs: Path, disk: Path) -> list[str]:
    return [
        "qemu-system-x86_64", "-M", MACHINE, "-accel", "kvm", "-m", "512M",
        "-cpu", "host", "-nodefaults", "-no-user-config", "-no-reboot",
        "-display", "none", "-serial", "stdio",
        "-kernel", str(kernel), "-initrd", str(initramfs), "-append", BASE_PARAMETERS,
        "-blockdev", f"driver=raw,node-name=d,file.driver={'host_device' if disk.is_block_device() else 'file'},"
        f"file.filename={disk}", "-device", "virtio-blk-device,drive=d",
    ]  # fmt: skip


def firecracker(program: Path, kernel: Path, initramfs: Path, disk: Path) -> list[str]:
    config = initramfs.with_name("firecracker.json")
    drive = {"drive_id": "d", "path_on_host": str(disk), "is_root_device": False, "is_read_only": False}
    source = {
        "kernel_image_path": str(kernel),
        "initrd_path": str(initramfs),
        "boot_args": BASE_PARAMETERS.replace("reboot=t", "reboot=k"),
    }
    machine = {"vcpu_count": 1, "mem_size_mib": 512}
    config.write_text(json.dumps({"boot-source": source, "drives": [drive], "machine-config": machine}))
    return [str(program), "--no-api", "--config-file", str(config)]


def guest(argv: list[str]) -> dict[str, float]:
    """MB/s of each job."""
    output = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False).stdout
    said = output.decode("utf-8", "replace")
    found = [json.loads(line[line.index("{") :]) for line in said.splitlines() if line.startswith("fio: ")]
    if len(found) != len(JOBS):
        raise SystemExit(f"the guest did not finish: {said[-2000:]}")
    return {
        name: max(job["jobs"][0]["read"]["bw_bytes"], job["jobs"][0]["write"]["bw_bytes"]) / 1e6
        for name, job in zip(NAMES, found, strict=True)
    }


async def run(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    kernel = await ensure_kernel(arguments.artifacts, None, progress=print)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="aenv-bench-disks-") as name:
        disks = Disks(Path(name), arguments.size * MIB)
        initramfs = Path(name) / "initramfs"
        initramfs.write_bytes(archive(kernel, disks.size))

        async def measured(path: Path) -> dict[str, float]:
            if arguments.firecracker:
                argv = firecracker(arguments.firecracker, kernel.vmlinux, initramfs, path)
            else:
                argv = qemu(kernel.vmlinux, initramfs, path)
            return await asyncio.to_thread(guest, argv)

        figures = {"raw": await measured(await asyncio.to_thread(disks.raw))}
        for kind in await available(arguments.kinds):
            async with disks.exported(kind) as path:
                figures[kind] = await measured(path)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=128, help="MiB of disk")
    parser.add_argument("--artifacts", type=Path, default=Path("/var/lib/aenv-dev/artifacts"), help="kernel")
    parser.add_argument("--firecracker", type=Path, help="its binary; QEMU without it")
    parser.add_argument("kinds", nargs="*", default=["ublk", "fuse", "nbd"])
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not shutil.which("fio") or not shutil.which("busybox"):
        parser.exit(2, "This needs root, fio and busybox (apt-get install fio busybox).\n")
    figures = asyncio.run(run(arguments))
    console.print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    table = Report()
    for kind, speeds in figures.items():
        if kind != "raw":
            for name, speed in speeds.items():
                table.add(Row(f"{kind}: {name}", speed, figures["raw"][name], "MB/s"))
    table.show()


if __name__ == "__main__":
    main()
