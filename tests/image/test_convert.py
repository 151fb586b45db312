"""Converted layers are shared, whole after every crash, and show what a container runtime shows."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aenv.config import Settings
from aenv.errors import CapacityError
from aenv.image import layerstore, rootfs, unpacker
from aenv.image.chain import MAX_STEPS
from aenv.image.errors import ImageError, ImageTooLargeError, UnsafeArchiveError
from aenv.image.gc import collect
from aenv.image.layerstore import LayerStore
from aenv.image.rootfs import ConvertedImage
from aenv.image.store import BlobStore
from aenv.image.unpacker import Unpackers
from tests.image.conftest import MakeSettings
from tests.image.disks import flat, mounted, paths, pull
from tests.image.registries import Registry
from tests.image.test_umoci import FIRST, SECOND
from tests.image.trees import describe, differences
from tests.image.writer import Image, archive, digest_of, folder, member, push, write_layout

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="unpacking needs root"),
    pytest.mark.timeout(60),
]

SIZE = 64  # MiB
BASE = [archive([folder("etc"), member("etc/one", os.urandom(200_000))]), archive([member("two", b"2" * 5000)])]


def image(top: bytes, below: list[bytes] | None = None, **config: Any) -> Image:
    layers = BASE if below is None else below
    return Image([*layers, archive([member("top", top)])], config, compression=("gzip", "none"))


def content(home: Path, converted: ConvertedImage, path: str) -> str:
    disk = flat(home, converted, home / "flat.img")
    done = subprocess.run(["debugfs", "-R", f"cat {path}", disk], capture_output=True, text=True, check=True)
    return done.stdout


def is_whole(home: Path, converted: ConvertedImage) -> bool:
    disk = flat(home, converted, home / "flat.img")
    return subprocess.run(["e2fsck", "-fn", disk], capture_output=True).returncode == 0


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


async def test_a_second_image_begins_where_the_first_one_is(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)
    push(registry.base, "shared/app", "1", [image(b"first")])
    push(registry.base, "shared/app", "2", [image(b"second", Env=["PATH=/opt/bin"], User="4321")])
    one = await pull(f"{registry.host}/shared/app:1", settings, SIZE)
    before = {path: path.stat().st_ino for path in LayerStore(settings.home).paths()}
    # What is converted already is not even downloaded again.
    for layer in BASE:
        BlobStore(settings.home).remove(digest_of(stored(image(b"first"), layer)))
    lines: list[str] = []
    two = await pull(f"{registry.host}/shared/app:2", settings, SIZE, progress=lines.append)
    assert "2 of 3 layers are converted already" in lines
    assert [line for line in lines if "unpacking" in line] == ["unpacking layer 3 of 3"]
    assert any("1 layers" in line for line in lines if "pulling" in line)
    assert one.layers[:3] == two.layers[:3] and len(one.layers) == 5
    assert before.items() <= {path: path.stat().st_ino for path in LayerStore(settings.home).paths()}.items()
    assert content(settings.home, one, "/top") == "first"
    assert content(settings.home, two, "/top") == "second"
    assert two.config.user == "uid4321" and "uid4321" in content(settings.home, two, "/etc/passwd")
    assert is_whole(settings.home, one) and is_whole(settings.home, two)
    # An image that differs in its configuration alone shares all of its own layers.
    push(registry.base, "shared/app", "3", [image(b"second", Env=["OTHER=1"])])
    three = await pull(f"{registry.host}/shared/app:3", settings, SIZE)
    assert three.layers[:4] == two.layers[:4] and three.config.user == ""


def stored(whole: Image, layer: bytes) -> bytes:
    at = list(whole.layers).index(layer)
    return list(whole.blobs.values())[at]


async def test_two_pulls_convert_what_they_share_once(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)
    lines: list[str] = []
    for name in ("1", "2", "3"):
        push(registry.base, "shared/together", name, [image(name.encode())])
    made = await asyncio.gather(
        *(
            pull(f"{registry.host}/shared/together:{n}", settings, SIZE, progress=lines.append)
            for n in ("1", "2", "3")
        )
    )
    for number in (1, 2):
        assert sum(line == f"unpacking layer {number} of 3" for line in lines) == 1
    assert len({each.layers[:3] for each in made}) == 1
    assert [content(settings.home, each, "/top") for each in made] == ["1", "2", "3"]


async def test_one_that_gives_up_does_not_hold_up_the_other(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)
    for name in ("1", "2"):
        push(registry.base, "shared/cancelled", name, [image(name.encode())])
    begun = asyncio.Event()
    first = asyncio.ensure_future(
        pull(f"{registry.host}/shared/cancelled:1", settings, SIZE,
             progress=lambda line: begun.set() if "layer 1" in line else None)
    )  # fmt: skip
    await begun.wait()
    second = asyncio.ensure_future(pull(f"{registry.host}/shared/cancelled:2", settings, SIZE))
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert content(settings.home, await second, "/top") == "2"
    assert not list((settings.home / "images/work").iterdir())


@pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed")
async def test_the_disk_shows_what_umoci_unpacks(tmp_path: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    made = Image([archive(FIRST), archive(SECOND)])
    write_layout(made, tmp_path / "layout")
    theirs = tmp_path / "theirs"
    run("umoci", "raw", "unpack", "--image", f"{tmp_path}/layout:latest", str(theirs))
    converted = await pull(f"oci:{tmp_path}/layout", settings, SIZE, allow_local=True)
    # Without the layer with what the platform adds.
    store = LayerStore(settings.home)
    unprepared = ConvertedImage(converted.config, converted.layers[:-1], converted.size)
    assert len(store.paths()) == 4
    listed = {info.name for info, _ in [*FIRST, *SECOND]}
    with mounted(flat(settings.home, unprepared, tmp_path / "disk.img"), tmp_path / "ours") as ours:
        trees = [describe(path) for path in (ours, theirs)]
    for tree in trees:
        for path, value in tree.items():
            # Directories that no layer lists: see test_umoci.
            if str(value[0]).startswith("4") and path not in listed:
                tree[path] = (*value[:3], None, *value[4:])
    assert differences(*trees) == []
    assert len(trees[0]) > 45 and is_whole(settings.home, converted)


async def test_more_layers_than_a_stack_has(tmp_path: Path, make_settings: MakeSettings) -> None:
    settings = make_settings()
    count = MAX_STEPS + 3
    layers = [archive([member(f"f{number}", str(number).encode())]) for number in range(count)]
    write_layout(Image(layers, compression=("none",)), tmp_path / "layout")
    converted = await pull(f"oci:{tmp_path}/layout", settings, SIZE, allow_local=True)
    assert len(converted.layers) == MAX_STEPS + 2
    assert content(settings.home, converted, "/f0") == "0"
    assert content(settings.home, converted, f"/f{count - 1}") == str(count - 1)
    assert is_whole(settings.home, converted)


async def test_a_digest_that_nobody_verifies_names_nothing(registry: Registry, make_settings: MakeSettings) -> None:
    """Two images that claim the same SHA-512 for different layers do not get each other's."""
    settings = make_settings(registry.host)
    for name in (b"honest", b"evil"):
        made = Image([archive([member("f", name)])])
        config = next(data for data in made.blobs.values() if b"diff_ids" in data)
        claimed = config.replace(digest_of(made.layers[0]).encode(), b"sha512:" + b"ab" * 64)
        made.blobs[digest_of(claimed)] = claimed
        made.manifest = made.manifest.replace(digest_of(config).encode(), digest_of(claimed).encode()).replace(
            f'"size": {len(config)}'.encode(), f'"size": {len(claimed)}'.encode()
        )
        push(registry.base, "shared/claims", name.decode(), [made])
        found = await pull(f"{registry.host}/shared/claims:{name.decode()}", settings, SIZE)
        assert content(settings.home, found, "/f") == name.decode()


async def test_damaged_layers_of_the_cache_are_made_anew(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)
    for name in ("1", "2"):
        push(registry.base, "shared/torn", name, [image(name.encode())])
    one = await pull(f"{registry.host}/shared/torn:1", settings, SIZE)
    store = LayerStore(settings.home)
    torn = store.path(one.layers[1].digest)
    size = torn.stat().st_size
    torn.write_bytes(torn.read_bytes()[: size // 2] + bytes(size - size // 2))
    lines: list[str] = []
    two = await pull(f"{registry.host}/shared/torn:2", settings, SIZE, progress=lines.append)
    assert any("damaged" in line for line in lines)
    assert content(settings.home, two, "/top") == "2" and is_whole(settings.home, two)
    short = store.path(two.layers[2].digest)
    short.write_bytes(short.read_bytes()[:100])
    again = await pull(f"{registry.host}/shared/torn:2", settings, SIZE)
    assert is_whole(settings.home, again)


async def test_hostile_layers_leave_what_is_below_them(
    registry: Registry, make_settings: MakeSettings, tmp_path: Path
) -> None:
    settings = make_settings(registry.host)
    (tmp_path / "victim").write_text("untouched")
    refused: list[tuple[list[Any], type[Exception]]] = [
        ([member("../../victim", b"x")], UnsafeArchiveError),
        ([folder("/".join("d" * 300))], UnsafeArchiveError),
        ([member("noise", os.urandom(80 << 20))], ImageTooLargeError),
        ([member(f"f{number}") for number in range(SIZE * 64 + 100)], ImageTooLargeError),
    ]
    for number, (members, kind) in enumerate(refused):
        push(
            registry.base,
            "hostile/app",
            str(number),
            [Image([*BASE, archive(members)], compression=("gzip", "none"))],
        )
        with pytest.raises(kind):
            await pull(f"{registry.host}/hostile/app:{number}", settings, SIZE)
        assert not list((settings.home / "images/work").iterdir())
    assert (tmp_path / "victim").read_text() == "untouched"
    push(registry.base, "hostile/app", "good", [image(b"good")])
    lines: list[str] = []
    found = await pull(f"{registry.host}/hostile/app:good", settings, SIZE, progress=lines.append)
    assert "2 of 3 layers are converted already" in lines and content(settings.home, found, "/top") == "good"
    # A device that a layer makes and a later one opens by its name is opened by nobody.
    device = Image([archive([member("null", kind=tarfile.CHRTYPE, device=(1, 3), mode=0o666)]),
                    archive([member("null", b"a file now")])])  # fmt: skip
    push(registry.base, "hostile/app", "device", [device])
    found = await pull(f"{registry.host}/hostile/app:device", settings, SIZE)
    assert content(settings.home, found, "/null") == "a file now"


async def test_an_image_that_does_not_fit_gets_the_larger_disk(
    registry: Registry, make_settings: MakeSettings
) -> None:
    settings = make_settings(registry.host)
    push(registry.base, "shared/large", "1", [Image([archive([member("f", os.urandom(30 << 20))])])])
    name = f"{registry.host}/shared/large:1"
    found = await pull(name, settings, 32, larger_mib=96)
    assert found.size == 96 << 20
    lines: list[str] = []
    assert await pull(name, settings, 32, larger_mib=96, progress=lines.append) == found and not lines
    with pytest.raises(ImageTooLargeError):
        await pull(name, settings, 32)
    push(registry.base, "shared/small", "1", [image(b"x")])
    assert (await pull(f"{registry.host}/shared/small:1", settings, 32, larger_mib=96)).size == 32 << 20


async def test_a_disk_that_fills_up_meanwhile(
    registry: Registry, make_settings: MakeSettings, tmp_path: Path
) -> None:
    """What is written is noticed to be lost only by the process that keeps it."""
    home = tmp_path / "home"
    home.mkdir()
    layers = [archive([member("small")]), archive([member("large", b"a" * (200 << 20))])]
    push(registry.base, "shared/full", "1", [Image(layers)])
    run("mount", "-t", "tmpfs", "-o", "size=270m", "none", str(home))
    try:

        def fill(line: str) -> None:
            if "layer 2" in line:
                (home / "ballast").write_bytes(bytes(120 << 20))

        settings = make_settings(registry.host)
        with pytest.raises(CapacityError):
            await pull(f"{registry.host}/shared/full:1", settings, 512, progress=fill)
        assert all_whole(home) and not list((home / "images/work").iterdir())
        (home / "ballast").unlink()
        found = await pull(f"{registry.host}/shared/full:1", settings, 512)
        assert all_whole(home) and len(found.layers) == 4
    finally:
        run("umount", str(home))


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


async def test_a_process_serves_one_pull_after_the_other(registry: Registry, make_settings: MakeSettings) -> None:
    settings = make_settings(registry.host)
    processes = Unpackers(keep=60)
    used: list[int] = []
    for name in ("1", "2", "3"):
        push(registry.base, "shared/ready", name, [image(name.encode())])
        found = await pull(f"{registry.host}/shared/ready:{name}", settings, SIZE, processes=processes)
        assert content(settings.home, found, "/top") == name
        await processes._background.settle()
        assert processes._spare is not None
        used.append(processes._spare.pid)
        assert not list((settings.home / "images/work").iterdir())
    assert len(set(used)) == 1
    # One that failed or was given up is not used again.
    push(registry.base, "shared/ready", "bad", [Image([archive([member("../x")])])])
    with pytest.raises(UnsafeArchiveError):
        await pull(f"{registry.host}/shared/ready:bad", settings, SIZE, processes=processes)
    await processes._background.settle()
    assert processes._spare is None
    await pull(f"{registry.host}/shared/ready:1", settings, 2 * SIZE, processes=processes)
    await processes.close()
    assert processes._spare is None
    brief = Unpackers(keep=0.01)
    await pull(f"{registry.host}/shared/ready:2", settings, 2 * SIZE, processes=brief)
    await brief._background.settle()
    spare = brief._spare
    assert spare is None or await spare.wait() is not None
    spare = await brief.take()
    assert spare.stdin is not None
    spare.stdin.close()
    assert await spare.wait() == 0, "it ends with its input"
    await brief.close()


def all_whole(home: Path) -> bool:
    return all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in LayerStore(home).paths())


class Counter:
    """Kills this process at the n-th of the moments that it is told of."""

    def __init__(self, fatal: int) -> None:
        self._left = fatal

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)
        if asyncio.iscoroutinefunction(inner):

            async def wrapped(*args: Any, **more: Any) -> Any:
                self()
                result = await inner(*args, **more)
                self()
                return result

            setattr(owner, name, wrapped)
            return

        def plain(*args: Any, **more: Any) -> Any:
            self()
            result = inner(*args, **more)
            self()
            return result

        setattr(owner, name, plain)


@contextlib.contextmanager
def pulling(name: str, settings: Settings, fatal: int) -> Iterator[int]:
    """A process that pulls and is killed at a moment: its id."""
    child = os.fork()
    if not child:
        try:
            os.environ["AENV_TEST_MARK"] = str(settings.home)
            counter = Counter(fatal)
            counter.around(unpacker.Unpacker, "_call")
            counter.around(LayerStore, "add")
            counter.around(layerstore, "write_record")
            counter.around(rootfs, "write_record")
            asyncio.run(pull(name, settings, SIZE))
        finally:
            os._exit(0)
    yield child


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_at_any_step_it_leaves_nothing_half_done(
    registry: Registry, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = make_settings(registry.host)
    home, name = settings.home, f"{registry.host}/shared/killed:1"
    push(registry.base, "shared/killed", "1", [image(b"killed")])
    later = time.time() + 3600
    killed = 0
    for fatal in range(1, 200):
        shutil.rmtree(home, ignore_errors=True)
        with pulling(name, settings, fatal) as child:
            _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        killed += 1
        wait_for(lambda: not orphans(f"AENV_TEST_MARK={home}"), "what it started to end")
        assert all_whole(home), fatal
        for path in (home / "images/chains").glob("*.json"):
            hold = LayerStore(home).find(path.stem)
            assert hold is not None, "a record is there when all of its layers are"
            hold.close()
        if fatal % 4:
            continue
        with monkeypatch.context() as patch:
            patch.setattr("aenv.image.workspace.time.time", lambda: later)
            found = asyncio.run(pull(name, settings, SIZE))
        assert not list((home / "images/work").iterdir()), "what it left is gone"
        assert content(home, found, "/top") == "killed" and is_whole(home, found)
    assert killed > 20


def orphans(mark: str) -> list[int]:
    """Processes that were started with ``mark`` in their environment, and still are there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def children(process: int) -> list[int]:
    """Processes of conversions that a process started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"aenv.image.worker" in path.read_bytes() and parent_of(int(path.parent.name)) == process:
                found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("whom", [("worker",), ("disk",), ("worker", "disk"), ("disk", "worker")])
@pytest.mark.parametrize("moment", ["layer 1", "layer 2", "writing"])
async def test_its_processes_are_killed(
    registry: Registry, make_settings: MakeSettings, whom: tuple[str, ...], moment: str
) -> None:
    """While much is to be written out. Nothing waits for ever, and the kernel lets go of everything."""
    settings = make_settings(registry.host)
    name = f"{registry.host}/shared/shot:1"
    large = archive([member(f"large{number}", os.urandom(1 << 20)) for number in range(40)])
    push(registry.base, "shared/shot", "1", [image(b"shot", [large, *BASE[1:]])])
    shot: list[int] = []

    def shoot(line: str) -> None:
        if moment in line and not shot:
            (worker,) = children(os.getpid())
            (disk,) = children(worker)
            shot.extend({"worker": worker, "disk": disk}[each] for each in whom)
            for process in shot:
                os.kill(process, signal.SIGKILL)

    with pytest.raises(ImageError):
        await pull(name, settings, 128, progress=shoot)
    wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in shot), "the processes to end")
    found = await pull(name, settings, 128)
    assert content(settings.home, found, "/top") == "shot" and all_whole(settings.home)
    assert not list((settings.home / "images/work").iterdir())


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


async def test_collecting_takes_the_top_first_and_spares_what_is_shared(
    registry: Registry, make_settings: MakeSettings
) -> None:
    settings = make_settings(registry.host)
    home = settings.home
    for name in ("1", "2"):
        push(registry.base, "shared/gc", name, [image(name.encode())])
    one, two = [await pull(f"{registry.host}/shared/gc:{name}", settings, SIZE) for name in ("1", "2")]
    for blob in BlobStore(home).blobs():
        BlobStore(home).remove(blob.digest)
    store = LayerStore(home)
    for path in store.paths():
        status = path.stat()
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 3600 * 10**9))
    sizes = sum(path.stat().st_size for path in store.paths())
    assert sizes == sum({layer.digest: layer.size for layer in (*one.layers, *two.layers)}.values())
    own = sum(layer.size for layer in one.layers[3:])
    done = collect(home, sizes - own)
    assert (done.removed, done.freed_bytes) == (2, own), "counted once, and the longest unused first"
    assert store.has(two.layers) and store.has(one.layers[:3])
    assert not any(path.exists() for path in paths(home, one.layers[3:]))
    hold = store.hold(two.layers)
    assert hold is not None
    with hold:
        assert collect(home, 0).removed == 0, "they are held"
    for path in store.paths():
        os.utime(path, (1, 1))
    assert collect(home, 0).kept_bytes == 0 and not store.paths()
    assert not list((home / "images/chains").iterdir()) and not list((home / "images/rootfs").iterdir())
    assert content(home, await pull(f"{registry.host}/shared/gc:1", settings, SIZE), "/top") == "1"
