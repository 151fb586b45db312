"""Giving back the memory of a VM that does nothing: it goes to the host's swap, and the VM takes what it needs again.

QEMU cannot discard pages of a guest whose memory is a read-only file (``ram_block_discard_range`` refuses): neither a
balloon nor free page reporting would free anything. But the kernel pages out what it is told is not needed soon:
``process_madvise(2)`` with ``MADV_PAGEOUT``. With zram or zswap as swap a zeroed page costs nothing, others a third;
without swap only pages of the shared base file are let go, which the page cache keeps anyway.
"""

import ctypes
import errno
import os

from aenv.errors import VmmError
from aenv.vmm.memory import Mapping

MADV_PAGEOUT = 21  # linux/mman.h, since Linux 5.4
SYS_PROCESS_MADVISE = 440  # since Linux 5.10, the same number on every architecture
CHUNK = 32 << 20  # bytes of one call: the kernel holds the process's memory map while it works
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def page_out(mapping: Mapping) -> bool:
    """Let the host have the pages of a VM's memory; whether the kernel can do that. Blocks while it writes to swap.

    Raises VmmError when the process is gone.
    """
    try:
        descriptor = os.pidfd_open(mapping.pid)
    except ProcessLookupError as error:
        raise VmmError(f"Process {mapping.pid} is gone.") from error
    try:
        for at in range(0, mapping.size, CHUNK):
            piece = _Range(mapping.start + at, min(CHUNK, mapping.size - at))
            done = _libc.syscall(SYS_PROCESS_MADVISE, descriptor, ctypes.byref(piece), 1, MADV_PAGEOUT, 0)
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
