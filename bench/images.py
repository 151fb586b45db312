"""Images: pull and conversion beside ``skopeo copy`` and ``umoci unpack``, a second image of the same base, and the
cold start of an overlaybd-native image, by bytes: ``python -m bench.images``.

The registry is Debian's docker-registry on this machine, the image is made of this machine's programs. Rounds
alternate, and the best of each counts: the machine may have other work.
"""

import asyncio
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from tests.image import overlaybd, registries
from tests.image.registries import Registry
from tests.image.writer import Image, archive, folder, member, push
from tests.node import images as tiny
from tests.node.process import NodeProcess

from aenv.config import RegistrySettings, Settings
from aenv.image.rootfs import pull_image
from aenv.image.unpacker import Unpackers
from aenv.orchestrator.ondemand import SPARE
from bench.cold_start import stats
from bench.report import Report, Row, console

MIB = 1 << 20
ROUNDS = 3
SIZE = 4096  # MiB of the disk
FOLDERS = ("usr/bin", "usr/sbin", "usr/lib/python3.11", "usr/share/perl", "usr/share/doc")  # some 500 MB
NATIVE_SIZE, UNREAD = 512, 192  # MiB: of the disk, and of a file in it that nobody reads
CIDR = "10.238.0.0/16"


def _base(work: Path) -> bytes:
    present = [name for name in FOLDERS if Path("/", name).exists()]
    subprocess.run(["tar", "-C", "/", "-cf", work / "base.tar", *present], check=True, stderr=subprocess.DEVNULL)
    return (work / "base.tar").read_bytes()


def _pull(name: str, settings: Settings, run: Callable[[Any], Any], processes: Unpackers) -> float:
    """Seconds."""
    begin = time.perf_counter()
    run(pull_image(name, settings.home, size_mib=SIZE, settings=settings, processes=processes))
    return time.perf_counter() - begin


def _by_hand(name: str, work: Path) -> float:
    layout, unpacked = work / "layout", work / "unpacked"
    begin = time.perf_counter()
    source = ["skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{name}", f"oci:{layout}:latest"]
    subprocess.run(source, check=True)
    subprocess.run(["umoci", "raw", "unpack", "--image", f"{layout}:latest", unpacked], check=True)
    taken = time.perf_counter() - begin
    for path in (layout, unpacked):
        shutil.rmtree(path)
    return taken


def _timed(work: Path, registry: Registry, report: Report) -> None:
    base = _base(work)
    for number in (1, 2):
        top = archive([folder("app"), member("app/f", str(number).encode() * 100_000)])
        push(registry.base, "bench/app", str(number), [Image([base, top], compression=("gzip",))])
    first, second, by_hand, again = (list[float]() for _ in range(4))
    for number in range(ROUNDS):
        home = work / f"home{number}"
        settings = Settings(home=home, registries={registry.host: RegistrySettings(plain_http=True)}, reserve_disk=0)  # type: ignore[call-arg]
        with asyncio.Runner() as runner:
            processes = Unpackers(SPARE)  # as a node has them
            for tag, times in (("1", first), ("2", second), ("1", again)):
                times.append(_pull(f"{registry.host}/bench/app:{tag}", settings, runner.run, processes))
            runner.run(processes.close())
        by_hand.append(_by_hand(f"{registry.host}/bench/app:1", work))
        shutil.rmtree(home)
    ours, raw, other, same = (min(values) for values in (first, by_hand, second, again))
    note = f"{len(base) / 1e6:.0f} MB plain; ours also makes the file system and compresses it; target 1.2"
    report.add(Row("image: pull and convert", ours, raw, "s", note))
    note = "by hand: the first pull; target 0.05"
    report.add(Row("image: another one on the same base", other * 1000, ours * 1000, "ms", note))
    report.add(Row("image: the same again", same * 1000, ours * 1000, "ms", "by hand: the first pull"))


def _native(work: Path, registry: Registry, report: Report) -> None:
    tree = overlaybd.unpacked(tiny.tiny([]).layers, work / "tree")
    with (tree / "unread").open("wb") as file, Path("/dev/urandom").open("rb") as source:
        for _ in range(UNREAD):
            file.write(source.read(MIB))
    layer = overlaybd.layer((None, overlaybd.ext4(tree, work / "disk", NATIVE_SIZE)), work)
    push(registry.base, "bench/native", "1", [overlaybd.NativeImage([layer])])
    (work / "node").mkdir()
    plain = json.dumps({registry.host: {"plain_http": True}})
    node = NodeProcess(work / "node", prefix="aenvi", cidr=CIDR, registries=plain)
    try:
        node.start()
        with httpx.Client(base_url=node.url, headers={"X-API-Key": node.api_key}, timeout=600) as api:
            begin = time.perf_counter()
            made = api.post("/sandboxes-cold", json={"image": f"{registry.host}/bench/native:1", "timeout": 600})
            assert made.status_code == 201, made.text
            taken = time.perf_counter() - begin
            fetched = stats(node)["fetched"]
            api.delete(f"/sandboxes/{made.json()['sandboxID']}")
        report.add(Row("overlaybd image: bytes read until it answers", fetched / MIB, len(layer) / MIB, "MiB",
                       "by hand: the whole image"))  # fmt: skip
        report.add(
            Row("overlaybd image: cold start", taken * 1000, None, "ms", "the guest's boot is nearly all of it")
        )
    finally:
        node.destroy()


def images(report: Report, folder: Path) -> None:
    """Add the rows of images; those that need programs which are missing are left out, with a remark."""
    missing = [name for name in ("docker-registry", "skopeo", "umoci") if shutil.which(name) is None]
    if missing:
        console.print(f"  images: not measured without {', '.join(missing)}")
        return
    work = folder / "images"
    (work / "registry").mkdir(parents=True)
    with registries.running(work / "registry") as registry:
        parts: list[Callable[[Path, Registry, Report], None]] = [_timed, _native]
        for part in parts:
            part(work, registry, report)


if __name__ == "__main__":
    found = Report()
    with tempfile.TemporaryDirectory(prefix="aenv-bench-", dir="/var/tmp") as temporary:
        images(found, Path(temporary))
    console.print()
    found.show()
