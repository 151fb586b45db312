"""Giving back the memory of a VM that does nothing: it goes to the host's swap, and the VM takes what it needs again.

QEMU cannot discard pages of a guest whose memory is a read-only file (``ram_block_discard_range`` refuses): neither a
balloon nor free page reporting would free anything. But the kernel pages out what it is told is not needed soon:
``process_madvise(2)`` with ``MADV_PAGEOUT``. With zram or zswap as swap a zeroed page costs nothing, others a third.
Pages of the base file are left alone: they are shared, and the kernel drops them without being asked.
"""

import ctypes
import errno
import os
from pathlib import Path

import numpy as np

from aenv.errors import VmmError
from aenv.vmm.memory import IOV_MAX, PAGE, Mapping, private_runs

MADV_PAGEOUT = 21  # linux/mman.h, since Linux 5.4
SYS_PROCESS_MADVISE = 440  # since Linux 5.10, the same number on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def has_swap(table: Path = Path("/proc/swaps")) -> bool:
    """Whether the host has anywhere to page out to (proc_swaps(5): a header, then a line for each)."""
    return len(table.read_text().splitlines()) > 1


def page_out(mapping: Mapping) -> bool:
    """Let the host have the pages that are a VM's own; whether the kernel can do that. Blocks while they are written.

    Raises VmmError when the process is gone.
    """
    first, length = private_runs(mapping)
    page = np.uint64(PAGE)
    ranges = np.ascontiguousarray(np.stack((first * page + np.uint64(mapping.bias), length * page), axis=1))
    try:
        descriptor = os.pidfd_open(mapping.pid)
    except ProcessLookupError as error:
        raise VmmError(f"Process {mapping.pid} is gone.") from error
    try:
        for at in range(0, len(ranges), IOV_MAX):
            part = ranges[at : at + IOV_MAX]  # of struct iovec
            done = _libc.syscall(
                SYS_PROCESS_MADVISE, descriptor, ctypes.c_void_p(part.ctypes.data), len(part), MADV_PAGEOUT, 0
            )
            if done < 0:
                code = ctypes.get_errno()
                if code in (errno.ENOSYS, errno.EPERM, errno.EINVAL):
                    return False
                raise VmmError(f"Memory of process {mapping.pid} cannot be paged out: {os.strerror(code)}.")
    finally:
        os.close(descriptor)
    return True


def cpu_seconds(pid: int) -> float | None:
    """Processor time that a process has used, all threads together; None when it is gone (proc_pid_stat(5))."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
