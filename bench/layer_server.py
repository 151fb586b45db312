"""The layer server beside a plain file with the same contents: ``python -m bench.layer_server``.

Rounds are interleaved, and the plain file is on the disk that the block cache is on.
"""

import asyncio
import mmap
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.layerd.support import PAGE, Server, Volume, drop_page_cache

from bench.report import Report, Row, console

SIZE = 128 << 20
FAULTS = 1000
LATENCY = 0.005  # seconds, of the far source
ROUNDS = 5


def sequential(path: Path) -> float:
    """MB/s."""
    buffer = bytearray(1 << 20)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    return path.stat().st_size / 1e6 / (time.perf_counter() - begin)


def faults(path: Path, pages: list[int]) -> float:
    """Microseconds per first touch of a page."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapped:
        begin = time.perf_counter()
        for page in pages:
            mapped[page * PAGE]
        return (time.perf_counter() - begin) / len(pages) * 1e6


def restore_like(count: int) -> list[int]:
    """Pages in small clusters of which about half are touched, in no order: how a restored guest touches memory."""
    chance = random.Random(2)
    starts = chance.sample(range(SIZE // PAGE - 64), count // 32)
    pages = {start + chance.randrange(64) for start in starts for _ in range(40)}
    return chance.sample(sorted(pages), min(count, len(pages)))


async def cold(paths: list[Path], measure: Callable[[Path], float]) -> list[float]:
    """The medians of ``ROUNDS`` interleaved rounds, each without the kernel's page cache."""
    found: list[list[float]] = [[] for _ in paths]
    for _ in range(ROUNDS):
        for path, values in zip(paths, found, strict=True):
            drop_page_cache(path)
            values.append(await asyncio.to_thread(measure, path))
    return [statistics.median(values) for values in found]


async def warm(paths: list[Path]) -> list[float]:
    """The medians of interleaved rounds of sequential reads that the page cache answers."""
    found: list[list[float]] = [[] for _ in paths]
    for _ in range(ROUNDS + 1):
        for path, values in zip(paths, found, strict=True):
            values.append(await asyncio.to_thread(sequential, path))
    return [statistics.median(values[1:]) for values in found]


async def measure(report: Report, folder: Path) -> None:
    server = Server(folder, cache=1 << 30)
    # Pages of 4 KiB, as FUSE has them; ext4 may have larger ones.
    small_pages = Path("/dev/shm") / folder.name
    try:
        layer = server.far.add(SIZE, [(0, random.Random(1).randbytes(SIZE))])
        plain = folder / "plain"
        shutil.copyfile(server.far.folder / layer.digest[7:], plain)
        os.truncate(plain, SIZE)
        os.sync()
        shutil.copyfile(plain, small_pages)
        await server.ensure_running()
        volume = Volume(SIZE, (layer,))

        server.far.faults(all={"latency": LATENCY})
        disk = await server.export("far", volume, sequential=True)
        report.add(Row("sequential, from 5 ms away", await asyncio.to_thread(sequential, disk), None, "MB/s"))
        memory = await server.export("memory", volume)

        ours, raw = await cold([disk, plain], sequential)
        report.add(Row("sequential, block cache", ours, raw, "MB/s", "page cache dropped"))
        ours, raw, tmpfs = await warm([disk, plain, small_pages])
        report.add(Row("sequential, page cache", ours, raw, "MB/s", "the plain file may have large folios"))
        report.add(Row("sequential, page cache, beside tmpfs", ours, tmpfs, "MB/s", "target: 0.95"))
        scattered = random.Random(3).sample(range(SIZE // PAGE), FAULTS)
        patterns = (("scattered", scattered), ("as a restore", restore_like(4 * FAULTS)))
        for name, pages in patterns:
            before = (await server.stats())["exports"]["memory"]["asked"]
            ours, raw = await cold([memory, plain], lambda path, pages=pages: faults(path, pages))  # type: ignore[misc]
            asked = ((await server.stats())["exports"]["memory"]["asked"] - before) / ROUNDS
            note = f"kernel asked {asked / PAGE / len(pages):.1f} pages per touch"
            report.add(Row(f"page faults, {name}, block cache", ours, raw, "us", note))
        for name, pages in patterns:
            await restart_empty(server)
            memory = await server.export("memory", volume)
            taken = await asyncio.to_thread(faults, memory, pages)
            got = (await server.stats())["exports"]["memory"]
            asked, touched = got["fetched"] / got["touched"], got["fetched"] / PAGE / len(pages)
            note = f"fetched {asked:.2f} × what the kernel asked, {touched:.1f} × the pages"
            report.add(Row(f"page faults, {name}, from 5 ms away", taken, None, "us", note))
    finally:
        server.destroy()
        small_pages.unlink(missing_ok=True)


async def restart_empty(server: Server) -> None:
    await server.stop(force=True)
    assert server.config.cache is not None
    shutil.rmtree(server.config.cache)
    await server.ensure_running()


def layer_server(report: Report) -> None:
    """Add the layer server's rows."""
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as folder:
        asyncio.run(measure(report, Path(folder)))


if __name__ == "__main__":
    found = Report()
    layer_server(found)
    console.print()
    found.show()
