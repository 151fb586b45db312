"""What is on the lab's disk, and the digest that names it. Pure."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

PACKAGES = (
    # the machine itself
    "busybox-static", "openssh-server", "kmod", "iproute2", "procps", "netbase", "less", "psmisc", "lsof",
    "strace",
    # what a node needs (scripts/bootstrap.sh), and what its tests need
    "python3", "qemu-system-x86", "qemu-utils", "nftables", "e2fsprogs", "mmdebstrap", "git", "curl",
    "ca-certificates", "gcc", "libc6-dev", "openssl", "zstd", "lz4", "iputils-ping",
    # disks
    "fio", "xfsprogs", "fuse3", "nbd-client",
)  # fmt: skip

EXCLUDED = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")

BOOT_MODULES = ("virtio_mmio", "virtio_blk", "ext4")
"""What mounts the root disk; in the initramfs, with all they need."""

BOOT_MODULES_OPTIONAL = ("crc32c_generic", "crc32c_intel")
"""ext4 asks the crypto layer for crc32c by name: no dependency of the module says so."""

KERNEL_PACKAGE = "linux-image-amd64"
"""The ordinary kernel: the one for clouds, which guests boot, has neither KVM nor ublk."""

FILES = {
    "etc/hostname": "lab\n",
    "etc/hosts": "127.0.0.1 localhost lab\n::1 localhost\n",
    "etc/resolv.conf": "nameserver 10.0.2.3\n",  # QEMU's
    "etc/fstab": "",
    "etc/default/locale": "LANG=C.UTF-8\n",
    "etc/profile.d/lab.sh": "cd /aenv 2>/dev/null\n",
    # Many sessions over one connection; nobody waits for a name of the caller, which has none.
    "etc/ssh/sshd_config.d/lab.conf": "LogLevel ERROR\nUsePAM no\nUseDNS no\nMaxSessions 200\nMaxStartups 200\n",
}
"""On top of the packages, with mode 644; ``lab/guest`` has the scripts."""

DISK_MIB = 24 * 1024
"""Virtual size of the system disk. It is sparse: about 2 GiB are written."""


def preferences(codename: str) -> str:
    """apt's preferences: Debian 12's QEMU and its libraries come from the backports, where they are new enough."""
    if codename != "bookworm":
        return ""
    return f"Package: *\nPin: release n={codename}-backports\nPin-Priority: 500\n"


def digest(parts: Iterable[bytes | str | Path]) -> str:
    """16 hexadecimal digits of values and of files' contents."""
    total = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:16]
