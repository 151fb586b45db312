"""Where guest RAM is in a Firecracker process, and what became of its pages.

Firecracker maps RAM in one piece for each region of guest addresses: on x86-64 one below 3 GiB, and one from 4 GiB on
when there is more (``arch_memory_regions``). A restored VM has them as private mappings of the memory file; a booted
one has anonymous memory; in both a balloon puts fresh anonymous memory where it took pages of a file away
(``discard_range``). Pieces are found once, when nothing of the guest has run since they were made. All functions
block: call them in a worker thread.
"""

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from aenv.errors import VmmError
from aenv.vmm import memory as ram

X86_GAP = 3 << 30  # bytes of RAM below the addresses of devices
COMMAND_LINE = 0x20000  # guest address on x86-64; a Linux guest leaves the first MiB alone


@dataclass(frozen=True, slots=True)
class Area:
    """One line of ``/proc/PID/maps`` (proc_pid_maps(5)): [start, end), and what is mapped there."""

    start: int
    end: int
    offset: int
    file: tuple[str, int] | None  # device and inode; None for anonymous memory


def piece_sizes(memory_bytes: int, machine: str = platform.machine()) -> list[int]:
    """Sizes of the pieces in the order of the memory file."""
    if machine != "x86_64" or memory_bytes <= X86_GAP:
        return [memory_bytes]
    return [X86_GAP, memory_bytes - X86_GAP]


def parse_maps(text: str) -> list[Area]:
    found = []
    for line in text.splitlines():
        span, _, offset, device, inode = line.split(None, 5)[:5]
        start, end = (int(x, 16) for x in span.split("-"))
        found.append(Area(start, end, int(offset, 16), (device, int(inode)) if int(inode) else None))
    return found


def find_mapped(pid: int, base: Path, memory_bytes: int) -> list[ram.Mapping]:
    """The pieces of a VM that is being restored over ``base``. Raises VmmError when they are not there."""
    stat = base.stat()
    file = (f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}", stat.st_ino)
    areas = [area for area in parse_maps(_read(pid, "maps")) if area.file == file]
    pieces, offset = [], 0
    for size in piece_sizes(memory_bytes):
        # The kernel may have split it, or joined it with the next.
        inside = [area for area in areas if area.offset <= offset < area.offset + area.end - area.start]
        if len(inside) != 1:
            raise VmmError(f"Process {pid} does not map {base} as guest memory.")
        start = inside[0].start + offset - inside[0].offset
        covered = sum(
            min(area.end, start + size) - max(area.start, start)
            for area in areas
            if area.start < start + size and start < area.end and area.start - area.offset == start - offset
        )
        if covered != size:
            raise VmmError(f"Process {pid} maps {covered} of {size} bytes of {base}.")
        pieces.append(ram.Mapping(pid, start, size, offset))
        offset += size
    return pieces


def find_anonymous(
    pid: int, command_line: str, memory_bytes: int, machine: str = platform.machine()
) -> list[ram.Mapping]:
    """The pieces of a VM that has just been booted. Raises VmmError when they cannot be told from other memory.

    They are the only anonymous memory without reserved swap. The kernel joins neighbours, and puts the second piece
    below the first; where the first begins is where the kernel's command line is at its place.
    """
    areas = [area for area in _unreserved(_read(pid, "smaps")) if area.file is None]
    sizes = piece_sizes(memory_bytes, machine)
    if len(sizes) == 1 and machine != "x86_64":
        exact = [area.start for area in areas if area.end - area.start == sizes[0]]
        if len(exact) == 1:
            return [ram.Mapping(pid, exact[0], sizes[0])]
    else:
        wanted = command_line.encode()
        large = [area for area in areas if area.end - area.start >= sizes[0]]
        for first in {place for area in large for place in (area.start, area.end - sizes[0])}:
            if _peek(pid, first + COMMAND_LINE, len(wanted)) != wanted:
                continue
            pieces = [ram.Mapping(pid, first, sizes[0])]
            if len(sizes) == 1:
                return pieces
            rest = [(first - sizes[1], first), (first + sizes[0], first + sum(sizes))]
            rest += [(area.start, area.end) for area in areas if area.end - area.start == sizes[1]]
            for low, high in rest:
                if high - low == sizes[1] and any(area.start <= low and high <= area.end for area in areas):
                    return [*pieces, ram.Mapping(pid, low, sizes[1], sizes[0])]
    raise VmmError(f"Guest memory of process {pid} cannot be told from its other memory.")


def cleared(pieces: Sequence[ram.Mapping]) -> tuple[ram.Words, ram.Words]:
    """Runs of pages, as first page and length, that a balloon took away and the guest has not used since.

    Where the file is not mapped any more, memory is the process's own, and zero unless it is there.
    """
    areas = [area for area in parse_maps(_read(pieces[0].pid, "maps")) if area.file is None]
    numbers = [np.zeros(0, np.uint64)]
    for piece in pieces:
        end = piece.start + piece.size
        inside = [(max(area.start, piece.start), min(area.end, end)) for area in areas]
        inside = [(low, high) for low, high in inside if low < high]
        if inside:
            spans = np.array(inside, dtype=np.uint64) - np.uint64(piece.start)
            own = _marked(piece, spans[:, 0], spans[:, 1])
            first, length = (words * np.uint64(ram.PAGE) for words in ram.private_runs(piece))
            first -= np.uint64(piece.offset)
            own &= ~_marked(piece, first, first + length)
            numbers.append(np.flatnonzero(own).astype(np.uint64) + np.uint64(piece.offset // ram.PAGE))
    return ram.runs(np.concatenate(numbers))


def _marked(piece: ram.Mapping, starts: ram.Words, ends: ram.Words) -> NDArray[np.bool_]:
    """Which pages of a piece lie within spans of bytes that do not overlap."""
    edges = np.zeros(piece.size // ram.PAGE + 1, dtype=np.int8)
    edges[(starts // np.uint64(ram.PAGE)).astype(np.int64)] += 1
    edges[(ends // np.uint64(ram.PAGE)).astype(np.int64)] -= 1
    return np.cumsum(edges[:-1], dtype=np.int8) > 0


def _unreserved(smaps: str) -> list[Area]:
    """Mappings with MAP_NORESERVE (``nr`` of VmFlags, proc_pid_smaps(5))."""
    found, head = [], ""
    for line in smaps.splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            head = line
        elif line.startswith("VmFlags:") and "nr" in line.split():
            found += parse_maps(head)
    return found


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError as error:
        raise VmmError(f"Process {pid} is gone.") from error


def _peek(pid: int, address: int, size: int) -> bytes:
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return memory.read(size)
    except OSError as error:
        raise VmmError(f"Memory of process {pid} cannot be read: {error}.") from error
