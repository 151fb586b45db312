"""Writing layers: what comes out is what went in, and nothing that need not be there."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.errors import CorruptFileError
from aenv.storage import layers, lsmt
from aenv.storage.source import FileSource
from aenv.storage.stack import LayerView, Stack, open_layer
from tests.storage import spec

PAGE = 4096
PAGES = 24

# Each page: not there, zeros, or its fill byte.
contents = st.lists(st.one_of(st.none(), st.just(0), st.integers(1, 9)), min_size=PAGES, max_size=PAGES)


def page(fill: int | None) -> bytes:
    return bytes([fill or 0]) * PAGE


def write_layer(path: Path, content: list[int | None]) -> LayerView:
    with lsmt.LayerWriter(path, PAGES * PAGE) as writer:
        for number, fill in enumerate(content):
            at, size = np.array([number * PAGE], dtype=np.uint64), np.array([PAGE], dtype=np.uint64)
            if fill == 0:
                writer.add_zeroed(at, size)
            elif fill is not None:
                writer.add(at, size, page(fill))
        writer.commit()
    return open_layer(FileSource(path), path.name)


def data_pages(path: Path) -> int:
    with lsmt.Layer(path) as layer:
        return int(layer.extents.length[~layer.extents.zeroed].sum()) // PAGE


def flat(stack: list[list[int | None]]) -> list[int]:
    out = [0] * PAGES
    for content in stack:
        out = [old if new is None else new for old, new in zip(out, content, strict=True)]
    return out


@given(contents, st.integers(0, PAGE * 2))
@settings(max_examples=30, deadline=None)
def test_flat_file(tmp_path_factory: pytest.TempPathFactory, content: list[int | None], tail: int) -> None:
    """Any size, also one that is no multiple of a sector; holes and zeros are not stored."""
    folder = tmp_path_factory.mktemp("flat")
    size = PAGES * PAGE - tail
    with (folder / "flat").open("wb") as file:
        for number, fill in enumerate(content):
            if fill is not None:
                file.seek(number * PAGE)
                file.write(page(fill))
        file.truncate(size)
    layers.from_flat(folder / "flat", folder / "layer")
    whole = b"".join(page(fill) for fill in content)[:size]
    assert spec.read_layers([(folder / "layer").read_bytes()]) == whole + bytes(-size % 512)
    assert data_pages(folder / "layer") <= sum(fill not in (None, 0) for fill in content)


@given(st.lists(contents, min_size=1, max_size=3), st.lists(contents, min_size=1, max_size=3), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_difference(
    tmp_path_factory: pytest.TempPathFactory, one: list[list[int | None]], two: list[list[int | None]], shared: int
) -> None:
    """``old`` and the difference make ``new``; only pages that differ are stored. Some layers are in both stacks."""
    folder = tmp_path_factory.mktemp("difference")
    shared = min(shared, len(one))
    two = [*one[:shared], *two]
    views = [write_layer(folder / f"one{i}", content) for i, content in enumerate(one)]
    others = [write_layer(folder / f"two{i}", content) for i, content in enumerate(two)]
    others[:shared] = views[:shared]
    old, new = Stack(views), Stack(others)
    written = layers.difference(old, new, folder / "out")
    was, now = flat(one), flat(two)
    assert (
        written == data_pages(folder / "out") * PAGE == sum(a != b != 0 for a, b in zip(was, now, strict=True)) * PAGE
    )
    both = Stack([*views, open_layer(FileSource(folder / "out"))])
    assert both.read(0, both.size) == b"".join(page(fill) for fill in now) == new.read(0, new.size)
    if was == now and one == two:
        assert written == 0


@given(contents, contents)
@settings(max_examples=25, deadline=None)
def test_difference_of_files(
    tmp_path_factory: pytest.TempPathFactory, one: list[int | None], two: list[int | None]
) -> None:
    folder = tmp_path_factory.mktemp("difference")
    for name, content in (("one", one), ("two", two)):
        with (folder / name).open("wb") as file:
            for number, fill in enumerate(content):
                if fill is not None:
                    file.seek(number * PAGE)
                    file.write(page(fill))
            file.truncate(PAGES * PAGE)
    with FileSource(folder / "one") as old, FileSource(folder / "two") as new:
        layers.difference(old, new, folder / "out")
        lsmt.compose(folder / "one", folder / "out", folder / "composed", durable=False)
        assert (folder / "composed").read_bytes() == (folder / "two").read_bytes()
    was, now = flat([one]), flat([two])
    assert data_pages(folder / "out") == sum(a != b != 0 for a, b in zip(was, now, strict=True))


def test_a_flat_file_below_layers(tmp_path: Path) -> None:
    """A flat base under a layer is read as it is, and is equal to itself without being read."""
    (tmp_path / "base").write_bytes(bytes([8]) * PAGE + bytes(PAGE * (PAGES - 2)) + bytes([9]) * (PAGE - 100))
    hole: list[int | None] = [None] * PAGES
    one, two = (write_layer(tmp_path / str(fill), [fill, *hole[1:]]) for fill in (5, 6))
    with FileSource(tmp_path / "base") as file:
        base = layers.flat_view(file, "base")
        stack = Stack([base, one])
        assert stack.read(0, stack.size) == page(5) + bytes(PAGE * (PAGES - 2)) + bytes([9]) * (PAGE - 100) + bytes(
            100
        )
        assert layers.difference(stack, Stack([base, two]), tmp_path / "out") == PAGE


def test_difference_reads_nothing_that_is_shared(tmp_path: Path) -> None:
    class Unreadable:
        size = 1 << 30

        def read(self, offset: int, length: int) -> bytes:
            raise AssertionError("a shared layer was read")

    base = write_layer(tmp_path / "base", list(range(1, PAGES + 1)))
    base = LayerView(Unreadable(), base.virtual_size, base.extents, "base")
    again = LayerView(Unreadable(), base.virtual_size, base.extents, "base")
    hole: list[int | None] = [None] * PAGES
    upper = write_layer(tmp_path / "upper", [7, *hole[1:-1], 0])
    lower = write_layer(tmp_path / "lower", [0, *hole[1:-1], 0])
    assert layers.difference(Stack([base, lower]), Stack([again, upper]), tmp_path / "out") == PAGE
    assert data_pages(tmp_path / "out") == 1


@given(st.lists(contents, min_size=1, max_size=5), contents)
@settings(max_examples=30, deadline=None)
def test_compaction(
    tmp_path_factory: pytest.TempPathFactory, middle: list[list[int | None]], below: list[int | None]
) -> None:
    folder = tmp_path_factory.mktemp("compact")
    views = [write_layer(folder / f"layer{i}", content) for i, content in enumerate(middle)]
    base = write_layer(folder / "base", below)
    layers.compact(views, folder / "bottom", bottom=True)
    layers.compact(views, folder / "middle", bottom=False)
    bottom, stacked = open_layer(FileSource(folder / "bottom")), open_layer(FileSource(folder / "middle"))
    assert Stack([bottom]).read(0, PAGES * PAGE) == Stack(views).read(0, PAGES * PAGE)
    assert Stack([base, stacked]).read(0, PAGES * PAGE) == Stack([base, *views]).read(0, PAGES * PAGE)
    assert not bottom.extents.zeroed.any()


def test_equal_contents_are_equal_bytes(tmp_path: Path) -> None:
    (tmp_path / "flat").write_bytes(os.urandom(PAGE) + bytes(PAGE) + os.urandom(PAGE))
    for name in ("one", "two"):
        layers.from_flat(tmp_path / "flat", tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def qemu_img(*argv: object) -> None:
    subprocess.run(["qemu-img", *map(str, argv)], check=True, capture_output=True)


def qemu_io(path: Path, *commands: str) -> None:
    subprocess.run(["qemu-io", "-f", "qcow2", *(part for c in commands for part in ("-c", c)), path], check=True)


@pytest.mark.parametrize("cluster", [4096, 65536, 2 << 20])
def test_qcow2_overlay(tmp_path: Path, cluster: int) -> None:
    """An overlay that QEMU wrote: data, zeros over data, zero clusters, a cluster of which a page was written."""
    size = 64 << 20
    base = bytearray(os.urandom(1 << 20) * 64)
    (tmp_path / "base").write_bytes(base)
    image = tmp_path / "overlay"
    qemu_img(
        "create", "-q", "-f", "qcow2", "-F", "raw", "-b", tmp_path / "base", "-o", f"cluster_size={cluster}", image
    )
    qemu_io(
        image,
        "write -P 7 50M 5M", "write -P 3 1M 4k", "write -P 0 2M 128k", "write -z 4M 4M", "write -z -u 20M 2M",
        "discard 12M 1M", "write -P 9 67104768 4k", "write -P 1 513k 512",
    )  # fmt: skip
    layers.from_qcow2(image, tmp_path / "layer")
    lsmt.compose(tmp_path / "base", tmp_path / "layer", tmp_path / "composed", durable=False)
    qemu_img("convert", "-O", "raw", image, tmp_path / "flat")
    assert (tmp_path / "composed").read_bytes() == (tmp_path / "flat").read_bytes()
    with lsmt.Layer(tmp_path / "layer") as layer:
        assert layer.virtual_size == size
        assert layer.read(2 << 20, 128 << 10) == bytes(128 << 10)
        zeroed = layer.extents.length[layer.extents.zeroed].sum()
        assert zeroed >= (4 << 20) + (128 << 10)


def test_an_empty_overlay(tmp_path: Path) -> None:
    qemu_img("create", "-q", "-f", "qcow2", tmp_path / "overlay", "1T")
    layers.from_qcow2(tmp_path / "overlay", tmp_path / "layer")
    with lsmt.Layer(tmp_path / "layer") as layer:
        assert (layer.virtual_size, len(layer.extents)) == (1 << 40, 0)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("compat=0.10", "version 3"),
        ("extended_l2=on", "subclusters"),
        ("data_file=DATA", "external data file"),
        ("cluster_size=512", "clusters of"),
        ("compression_type=zstd", "another compression"),
    ],
)
def test_other_kinds_of_qcow2_are_refused(tmp_path: Path, options: str, why: str) -> None:
    options = options.replace("DATA", str(tmp_path / "data"))
    qemu_img("create", "-q", "-f", "qcow2", "-o", options, tmp_path / "image", "8M")
    with pytest.raises(CorruptFileError, match=why):
        layers.from_qcow2(tmp_path / "image", tmp_path / "layer")
    assert not (tmp_path / "layer").exists()


def test_an_encrypted_overlay_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(OVERLAY[:32] + bytes([0, 0, 0, 2]) + OVERLAY[36:])
    with pytest.raises(CorruptFileError, match="encrypted"):
        layers.from_qcow2(tmp_path / "image", tmp_path / "layer")


def test_compressed_clusters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "flat").write_bytes(b"x" * (1 << 20))
    qemu_img("convert", "-c", "-O", "qcow2", tmp_path / "flat", tmp_path / "image")
    with pytest.raises(CorruptFileError, match="compressed clusters"):
        layers.from_qcow2(tmp_path / "image", tmp_path / "layer")


@given(st.lists(st.tuples(st.integers(0, 5 * 65536), st.binary(min_size=1, max_size=9)), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_a_damaged_overlay_is_an_error_or_a_layer(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    image = bytearray(OVERLAY)
    for at, data in damage:
        image[at : at + len(data)] = data
    (folder / "image").write_bytes(image)
    try:
        layers.from_qcow2(folder / "image", folder / "layer")
    except CorruptFileError:
        assert not (folder / "layer").exists()
    else:
        assert (folder / "layer").stat().st_size < 2 * len(image)
        lsmt.Layer(folder / "layer").__exit__()


def _overlay() -> bytes:
    folder = Path(os.environ.get("TMPDIR", "/tmp")) / f"aenv-qcow2-{os.getpid()}"
    try:
        qemu_img("create", "-q", "-f", "qcow2", folder, "4M")
        qemu_io(folder, "write -P 5 0 200k", "write -P 6 2M 64k", "write -z 3M 64k")
        return folder.read_bytes()
    finally:
        folder.unlink(missing_ok=True)


OVERLAY = _overlay()
