"""What a snapshot costs its guest: the stall, of which writing the memory is most."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from e2b import Sandbox
from tests.node.process import NodeProcess

from aenv.vmm import memory as ram
from bench.report import Report, Row

MIB = 1 << 20
RAM = 512 * MIB

# A process with as much of its own memory over a file as a VM has that wrote it; ends with its standard input.
_DIRTY = """
import mmap, os, sys
import numpy as np
path, size, dirty = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
memory = mmap.mmap(os.open(path, os.O_RDWR), size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
pages = np.frombuffer(memory, dtype=np.uint8).reshape(-1, 4096)
random = np.random.default_rng(1)
for run in np.sort(random.choice(len(pages) // 16, dirty // 65536, replace=False)):
    pages[run * 16 : run * 16 + 16] = random.integers(1, 255, (16, 4096), dtype=np.uint8)
print("ready", flush=True)
sys.stdin.read()
"""


def milliseconds(action: Callable[[], object], rounds: int) -> float:
    """The median of ``rounds``."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        action()
        times.append((time.perf_counter() - begin) * 1000)
    return sorted(times)[len(times) // 2]


def captures(folder: Path, report: Report, rounds: int) -> None:
    """Memory of a stopped VM to a layer, against the same bytes from memory to a file."""
    base = folder / "memory"
    with base.open("wb") as file:
        file.truncate(RAM)
    for size in (10, 100, 400):
        argv = [sys.executable, "-c", _DIRTY, str(base), str(RAM), str(size * MIB)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            mapping = ram.find_mapping(process.pid, base, RAM)
            layer, copy = folder / "layer", folder / "copy"
            data = memoryview(np.random.default_rng(2).bytes(size * MIB))

            def write(copy: Path = copy, data: memoryview = data) -> None:
                copy.unlink(missing_ok=True)
                with copy.open("wb", buffering=0) as file:
                    rest = data
                    while rest:
                        rest = rest[file.write(rest) :]

            def capture(layer: Path = layer, mapping: ram.Mapping = mapping) -> None:
                layer.unlink(missing_ok=True)
                ram.capture(mapping, layer, ram.data_of(base))

            ours, raw = milliseconds(capture, rounds), milliseconds(write, rounds)
            report.add(Row(f"capture of {size} MB dirty memory", ours, raw, note="by hand: write(2) of the bytes"))
            process.communicate()


def stalls(node: NodeProcess, create: Callable[[], Sandbox], report: Report) -> None:
    """How long a guest stands still while it is saved, by what it wrote since it was saved before."""
    for size in (10, 100, 350):
        sandbox = create()
        fill = f"head -c {size}M /dev/urandom > /dev/shm/data"
        sandbox.commands.run(fill, user="root", timeout=600)
        begin = len(node.log.read_text())
        sandbox.create_snapshot()
        stall = re.search(r"fork point.*stall_s=([0-9.]+)", node.log.read_text()[begin:])
        assert stall is not None, "the node logs stalls at level debug"
        report.add(Row(f"guest's stall, saved with {size} MB written", float(stall[1]) * 1000, None))
        sandbox.kill()
