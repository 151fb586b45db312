"""``python -m bench.storage_formats``: writing, composing and reading layers beside the raw operation, in one run.

Best of several rounds, page cache warm, nothing synced: what the format costs, not the disk. Wall clock, or with
``--cpu`` the CPU time of this process and its children, which says more on a busy machine.
"""

import argparse
import os
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from aenv.storage import layers, zfile
from aenv.storage.lsmt import LayerWriter
from aenv.storage.source import FileSource
from aenv.storage.stack import LayerView, Stack, open_layer
from bench.report import Report, Row, console

MIB = 1 << 20
PAGE = 4096
MEMORY = 512 * MIB


def wall() -> float:
    return time.perf_counter() * 1000


def cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used) * 1000


def fresh(path: Path) -> Path:
    """Removed before it is written: ext4 writes a file back to disk at once when another one is renamed over it."""
    path.unlink(missing_ok=True)
    return path


def run(*argv: object) -> None:
    subprocess.run([str(part) for part in argv], check=True, stdout=subprocess.DEVNULL)


def generated_memory(path: Path) -> None:
    """512 MiB of which 100 MB are not zero: runs of 1 to 64 pages of program text, repeated words and noise."""
    rng = random.Random(1)
    program = Path(shutil.which("qemu-system-x86_64") or "/usr/bin/python3").read_bytes()
    with path.open("wb") as file:
        file.truncate(MEMORY)
        written = 0
        while written < 100 * 10**6:
            length = PAGE * rng.randrange(1, 65)
            at = rng.randrange(0, len(program) - length)
            data = rng.choice([program[at : at + length], rng.randbytes(256) * (length // 256)])
            file.seek(rng.randrange(0, (MEMORY - length) // PAGE) * PAGE)
            written += file.write(data)


def dirtied(path: Path, out: Path, megabytes: int) -> None:
    """A copy of memory in which so much differs, in runs of 1 to 64 pages."""
    rng = random.Random(2)
    run("cp", "--sparse=always", path, out)
    with out.open("r+b") as file:
        left = megabytes * 10**6
        while left > 0:
            length = PAGE * rng.randrange(1, 65)
            file.seek(rng.randrange(0, (MEMORY - length) // PAGE) * PAGE)
            left -= file.write(rng.randbytes(length))


def written_layers(folder: Path, base: Path, count: int) -> list[LayerView]:
    """A base and small layers over it, each 2 MiB in runs of 1 to 8 pages."""
    rng = random.Random(3)
    views = [open_layer(FileSource(base), "base")]
    for number in range(count - 1):
        path = folder / f"small{number}"
        with LayerWriter(path, MEMORY) as writer:
            at = rng.randrange(0, 1000)
            while at < MEMORY // PAGE and writer.bytes_written < 2 * MIB:
                length = rng.randrange(1, 9)
                offsets = np.array([at * PAGE], dtype=np.uint64)
                writer.add(offsets, np.array([length * PAGE], dtype=np.uint64), rng.randbytes(64) * (64 * length))
                at += length + rng.randrange(1, 2000)
            writer.commit()
        views.append(open_layer(FileSource(path), number))
    return views


class Bench:
    def __init__(
        self, folder: Path, memory: Path, rounds: int, clock: Callable[[], float], report: Report | None = None
    ) -> None:
        self.clock = clock
        self.folder = folder
        self.memory = memory
        self.rounds = rounds
        self.report = report or Report()

    def compare(
        self, name: str, ours: Callable[[], object], raw: Callable[[], object] | None, note: str = ""
    ) -> None:
        by_hand = self.best(raw) if raw else None
        self.report.add(Row(name, self.best(ours), by_hand, note=note))

    def best(self, work: Callable[[], object]) -> float:
        """Milliseconds of the quickest round."""
        times = []
        for _ in range(self.rounds):
            start = self.clock()
            work()
            times.append(self.clock() - start)
        return min(times)

    def capture(self) -> Path:
        layer, copy = self.folder / "layer", self.folder / "copy"
        layers.from_flat(self.memory, layer)
        size = f"{layer.stat().st_size / 1e6:.0f} MB"
        self.compare(
            "flat memory to layer (cp of the layer)",
            lambda: layers.from_flat(self.memory, fresh(copy)), lambda: run("cp", layer, fresh(copy)), size,
        )  # fmt: skip
        self.compare(
            "copy of a layer by compaction (cp)",
            lambda: layers.compact([open_layer(FileSource(layer))], fresh(copy), bottom=True),
            lambda: run("cp", layer, fresh(copy)), size,
        )  # fmt: skip
        return layer

    def compress(self, layer: Path) -> None:
        cpus = os.cpu_count() or 1
        out = self.folder / "compressed"
        self._compress(layer, "zstd", ["zstd", "-q", "-1", f"-T{cpus}", layer, "-o", out], f"{cpus} threads both")
        self._compress(layer, "lz4", ["lz4", "-q", "-1", layer, out], f"{cpus} threads, lz4 one")

    def _compress(self, layer: Path, algo: zfile.Algorithm, command: list[object], note: str) -> None:
        target, out = self.folder / algo, self.folder / "compressed"

        def read() -> None:
            with FileSource(target) as file:
                source = zfile.ZFileSource(file)
                for at in range(0, source.size, MIB):
                    source.read(at, min(MIB, source.size - at))

        zfile.write_zfile(layer, target, algo)
        note += f"; {target.stat().st_size / layer.stat().st_size:.0%} of its size"

        def by_hand() -> None:
            fresh(out)
            run(*command)

        self.compare(f"ZFile of it ({algo} -1)", lambda: zfile.write_zfile(layer, fresh(target), algo), by_hand, note)
        self.compare(f"read a ZFile whole ({algo} -d)", read, lambda: run(algo, "-qdcf", out), "one thread")

    def read(self, layer: Path) -> None:
        views = written_layers(self.folder, layer, 255)
        flat = self.folder / "compacted"
        layers.compact(views, flat, bottom=True)
        # What is data in all of the stacks: a hole costs no system call.
        start = views[0].extents.offset.astype(np.int64)
        pages = np.concatenate(
            [np.arange(a, a + n, PAGE) for a, n in zip(start, views[0].extents.length.astype(np.int64), strict=True)]
        )
        offsets = random.Random(4).choices(pages.tolist(), k=20_000)
        with FileSource(self.memory) as file:
            raw = self.best(lambda: [os.pread(file.fileno(), PAGE, offset) for offset in offsets])
        for depth in (1, 50, 255):
            self._read(views[:depth], offsets, raw)
        self.compare(
            "compact 255 layers (cp of the result)",
            lambda: layers.compact(views, fresh(flat), bottom=True),
            lambda: run("cp", flat, fresh(self.folder / "copy")),
            f"{flat.stat().st_size / 1e6:.0f} MB",
        )  # fmt: skip

    def _read(self, views: list[LayerView], offsets: list[int], raw: float) -> None:
        stack = Stack(views)
        self.compare(f"compose {len(views)} layers", lambda: Stack(views), None, f"{len(stack.runs):,} runs")
        ours = self.best(lambda: [stack.read(offset, PAGE) for offset in offsets])
        note = f"{ours / len(offsets) * 1000:.1f} µs each"
        self.report.add(Row(f"20,000 random 4 KiB reads, {len(views)} layers (pread)", ours, raw, note=note))

    def difference(self, layer: Path) -> None:
        later, out, delta = self.folder / "later", self.folder / "difference", self.folder / "delta"
        dirtied(self.memory, later, 100)
        with FileSource(self.memory) as old, FileSource(later) as new:
            layers.difference(old, new, delta)
            size = f"{delta.stat().st_size / 1e6:.0f} MB"
            self.compare(
                "difference of two flat memories, 100 MB dirty (cp of it)",
                lambda: layers.difference(old, new, fresh(out)),
                lambda: run("cp", delta, fresh(self.folder / "copy")), size,
            )  # fmt: skip
        base, top = open_layer(FileSource(layer), "base"), open_layer(FileSource(delta), "delta")
        self.compare(
            "difference of two stacks that share the base (cp of it)",
            lambda: layers.difference(Stack([base]), Stack([base, top]), fresh(out)),
            lambda: run("cp", delta, fresh(self.folder / "copy")), size,
        )  # fmt: skip

    def qcow2(self) -> None:
        image, out = self.folder / "image", self.folder / "layer2"
        run("qemu-img", "convert", "-O", "qcow2", self.memory, image)
        self.compare(
            "qcow2 to layer (qemu-img convert to raw)",
            lambda: layers.from_qcow2(image, fresh(out)),
            lambda: run("qemu-img", "convert", "-O", "raw", image, fresh(self.folder / "copy")),
        )

    def run(self) -> None:
        layer = self.capture()
        self.compress(layer)
        self.read(layer)
        self.difference(layer)
        self.qcow2()


def formats(report: Report, memory: Path, rounds: int) -> None:
    """All of it, by wall clock, with the memory of a guest."""
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as name:
        Bench(Path(name), memory, rounds, wall, report).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", type=Path, help="a guest's memory of 512 MiB; one is generated otherwise")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of wall clock")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as name:
        folder = Path(name)
        memory = arguments.memory or folder / "memory"
        if not arguments.memory:
            generated_memory(memory)
        bench = Bench(folder, memory, arguments.rounds, cpu if arguments.cpu else wall)
        bench.run()
        console.print()
        bench.report.show()


if __name__ == "__main__":
    main()
