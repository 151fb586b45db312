"""Which system calls a confined process may make: all but those that a VMM never needs and attacks on kernels do.

Over this VMMs put their own filters (QEMU's ``-sandbox``, Firecracker's), which allow less and know more. This one is
the same for all of them, holds from the first instruction of the program on, and needs no version of a library.
``program`` is pure: classic BPF as seccomp(2) takes it.
"""

import errno
import platform
import struct
from collections.abc import Mapping

# Numbers: asm/unistd_64.h of x86_64 and asm-generic/unistd.h of aarch64; from 424 on they are the same everywhere.
_COMMON = {
    "pidfd_getfd": 438, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "quotactl_fd": 443, "open_tree_attr": 467,
}  # fmt: skip
DENIED: Mapping[str, Mapping[str, int]] = {
    "x86_64": {
        "ptrace": 101, "syslog": 103, "pivot_root": 155, "chroot": 161, "acct": 163, "settimeofday": 164,
        "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169, "iopl": 172, "ioperm": 173,
        "init_module": 175, "delete_module": 176, "quotactl": 179, "clock_settime": 227, "kexec_load": 246,
        "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
        "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "finit_module": 313, "kexec_file_load": 320, "bpf": 321, "mknod": 133, "mknodat": 259, **_COMMON,
    },
    "aarch64": {
        "ptrace": 117, "syslog": 116, "pivot_root": 41, "chroot": 51, "acct": 89, "settimeofday": 170,
        "mount": 40, "umount2": 39, "swapon": 224, "swapoff": 225, "reboot": 142,
        "init_module": 105, "delete_module": 106, "quotactl": 60, "clock_settime": 112, "kexec_load": 104,
        "add_key": 217, "request_key": 218, "keyctl": 219, "unshare": 97, "perf_event_open": 241,
        "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272,
        "finit_module": 273, "kexec_file_load": 294, "bpf": 280, "mknodat": 33, **_COMMON,
    },
}  # fmt: skip
_SPECIAL = {"x86_64": {"clone": 56, "socket": 41}, "aarch64": {"clone": 220, "socket": 198}}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*, linux/audit.h
CLONE3 = 435
X32 = 0x40000000  # bit of x86_64's other system calls
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET: sched.h
AF_UNIX = 1

# linux/bpf_common.h, linux/seccomp.h; offsets in struct seccomp_data
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000


def program(machine: str | None = None) -> bytes:
    """The filter for a machine, by default this one, as an array of ``struct sock_filter``.

    clone3(2), whose flags a filter cannot see, does not exist: libraries use clone(2) then. Sockets are Unix sockets.
    """
    machine = machine or platform.machine()
    special = _SPECIAL[machine]
    tests = [
        *([(AT_LEAST, X32, "refuse")] if machine == "x86_64" else []),
        (EQUAL, special["clone"], "clone"),
        (EQUAL, special["socket"], "socket"),
        (EQUAL, CLONE3, "missing"),
        *((EQUAL, number, "refuse") for number in sorted(DENIED[machine].values())),
    ]
    # Label, code, operand, where to go if it holds, and if not; empty: on to the next line.
    lines: list[tuple[str, int, int, str, str]] = [
        ("", LOAD, ARCHITECTURE, "", ""),
        ("", EQUAL, _ARCHITECTURE[machine], "", "kill"),
        ("", LOAD, NUMBER, "", ""),
        *(("", code, operand, label, "") for code, operand, label in tests),
        ("", RETURN, ALLOW, "", ""),
        ("clone", LOAD, FIRST_ARGUMENT, "", ""),
        ("", ANY_BIT, NEW_NAMESPACES, "refuse", "pass"),
        ("socket", LOAD, FIRST_ARGUMENT, "", ""),
        ("", EQUAL, AF_UNIX, "pass", "refuse"),
        ("pass", RETURN, ALLOW, "", ""),
        ("missing", RETURN, FAIL | errno.ENOSYS, "", ""),
        ("refuse", RETURN, FAIL | errno.EPERM, "", ""),
        ("kill", RETURN, KILL, "", ""),
    ]
    places = {label: place for place, (label, *_) in enumerate(lines) if label}

    def jump(label: str, place: int) -> int:
        return places[label] - place - 1 if label else 0

    return b"".join(
        struct.pack("=HBBI", code, jump(holds, place), jump(fails, place), operand)
        for place, (_, code, operand, holds, fails) in enumerate(lines)
    )
