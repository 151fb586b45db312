"""Boot the guest artefacts under QEMU's software emulation and say how long it took. Run by hand:

    python tests/guest/boot_check.py VMLINUX INITRAMFS [ROOT.ext4] [--append ...] [--marker TEXT] [--repeat N]

With ``--stub`` the initramfs's /init is replaced by stub_init.c, which needs no envd: it loads the modules,
mounts the root disk, prints the clock source and powers off.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from aenv.guest.initramfs import Entry, read_cpio, write_cpio

MACHINE = "microvm,acpi=on,pcie=off,rtc=on,suppress-vmdesc=on"
NETWORK = "aenv.ip=169.254.0.21/30 aenv.gw=169.254.0.22"
DEFAULT_APPEND = "console=ttyS0 reboot=t panic=-1"


def with_stub(initramfs: Path, work: Path) -> Path:
    """A copy of the initramfs whose /init is the stub."""
    stub = work / "stub"
    source = Path(__file__).with_name("stub_init.c")
    subprocess.run(["gcc", "-O2", "-static", "-o", stub, source], check=True)
    entries = [
        Entry(entry.path, entry.mode, stub.read_bytes()) if entry.path == "init" else entry
        for entry in read_cpio(initramfs.read_bytes())
    ]
    out = work / "stub.cpio"
    out.write_bytes(write_cpio(entries))
    return out


def boot(args: argparse.Namespace, initramfs: Path, work: Path) -> tuple[float, float, str]:
    """Boot once: wall time and QEMU's CPU time until the marker, both in seconds, and the console's text."""
    serial = work / "serial"
    serial.write_bytes(b"")
    argv = ["qemu-system-x86_64", "-M", MACHINE, "-accel", args.accel, "-cpu", "max", "-m", str(args.memory)]
    argv += ["-kernel", args.kernel, "-initrd", initramfs, "-nodefaults", "-no-user-config", "-nographic"]
    argv += ["-append", f"{args.append} aenv.root=/dev/vda {NETWORK}", "-serial", f"file:{serial}", "-no-reboot"]
    if args.root:
        argv += ["-drive", f"id=root,file={args.root},format=raw,if=none,snapshot=on"]
        argv += ["-device", "virtio-blk-device,drive=root"]
    argv += args.extra.split()
    start = time.monotonic()
    process = subprocess.Popen([str(item) for item in argv])
    try:
        ended = False
        while args.marker not in (text := serial.read_text(errors="replace")) and not ended:
            # One more look after the end: the console may have been written between the two checks.
            ended = process.poll() is not None or time.monotonic() - start > args.timeout
            time.sleep(0.005)
        wall = time.monotonic() - start
        stat = Path(f"/proc/{process.pid}/stat")
        fields = stat.read_text().rsplit(")", 1)[1].split() if stat.exists() else []
        cpu = (int(fields[11]) + int(fields[12])) / 100 if fields else 0.0
        return wall, cpu, text
    finally:
        process.kill()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel")
    parser.add_argument("initramfs", type=Path)
    parser.add_argument("root", nargs="?")
    parser.add_argument("--append", default=DEFAULT_APPEND)
    parser.add_argument("--marker", default="stub: done")
    parser.add_argument("--accel", default="tcg")
    parser.add_argument("--memory", type=int, default=512, help="MiB")
    parser.add_argument("--extra", default="", help="more QEMU arguments")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--stub", action="store_true")
    parser.add_argument("--verbose", action="store_true", help="print the console")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        initramfs = with_stub(args.initramfs, work) if args.stub else args.initramfs
        runs = [boot(args, initramfs, work) for _ in range(args.repeat)]
    text = runs[-1][2]
    if args.verbose:
        print(text)
    failed = [text for _, _, text in runs if args.marker not in text]
    if failed:
        print(
            f"FAILED {len(failed)} of {len(runs)}: no {args.marker!r}; the console ends with:\n{failed[0][-3000:]}",
            file=sys.stderr,
        )
        return 1
    walls = [wall for wall, _, _ in runs]
    print(
        f"wall ms: min {min(walls) * 1e3:.0f} median {statistics.median(walls) * 1e3:.0f}; "
        f"cpu ms: min {min(cpu for _, cpu, _ in runs) * 1e3:.0f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
