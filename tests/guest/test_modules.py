"""Load order and dependencies of kernel modules."""

import lzma
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.guest.commands import GuestArtifactError
from aenv.guest.modules import canonical, collect, load_order, unsigned
from tests.guest import elf


@st.composite
def acyclic(draw: st.DrawFn) -> tuple[dict[str, list[str]], list[str]]:
    """A dependency graph whose modules depend on earlier ones only, and some wanted modules of it."""
    graph: dict[str, list[str]] = {}
    for index in range(draw(st.integers(1, 12))):
        earlier = list(graph)
        graph[f"m{index}"] = draw(st.lists(st.sampled_from(earlier), unique=True)) if earlier else []
    return graph, draw(st.lists(st.sampled_from(list(graph)), unique=True))


@given(acyclic())
def test_every_module_follows_what_it_needs(case: tuple[dict[str, list[str]], list[str]]) -> None:
    graph, wanted = case
    order = load_order(wanted, graph.__getitem__)
    assert len(order) == len(set(order))
    assert set(wanted) <= set(order)
    for name in order:
        assert all(order.index(needed) < order.index(name) for needed in graph[name])
    needed_by_some = {needed for name in order for needed in graph[name]}
    assert set(order) == set(wanted) | needed_by_some


def test_a_cycle_is_an_error() -> None:
    with pytest.raises(GuestArtifactError, match="a -> b -> a"):
        load_order(["a"], {"a": ["b"], "b": ["a"]}.__getitem__)


def test_canonical_names() -> None:
    assert canonical("kernel/drivers/char/hw_random/virtio-rng.ko.xz") == "virtio_rng"


def test_signature_is_cut_off() -> None:
    signature = b"s" * 64
    trailer = struct.pack(">8xI", len(signature)) + b"~Module signature appended~\n"
    assert unsigned(b"module" + signature + trailer) == b"module"
    assert unsigned(b"module") == b"module"


def make_tree(tree: Path, modules: dict[str, dict[str, str]], builtin: str = "") -> Path:
    for name, info in modules.items():
        path = tree / "kernel" / f"{name}.ko.xz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(lzma.compress(elf.module(info)))
    (tree / "modules.builtin").write_text(builtin)
    return tree


def test_collect_orders_and_skips_what_is_built_in(tmp_path: Path) -> None:
    tree = make_tree(
        tmp_path,
        {
            "virtio_blk": {},
            "virtio_net": {"depends": "net_failover,crc"},
            "net_failover": {"depends": "failover"},
            "failover": {},
            "virtio-rng": {"softdep": "pre: failover absent"},
            "erofs": {},
        },
        builtin="kernel/drivers/virtio/virtio_mmio.ko\nkernel/lib/crc.ko\n",
    )
    names = [module.name for module in collect(tree)]
    assert names == ["virtio_blk", "failover", "net_failover", "virtio_net", "virtio_rng", "erofs"]


def test_a_missing_required_module_is_named(tmp_path: Path) -> None:
    with pytest.raises(GuestArtifactError, match="no virtio_net"):
        collect(make_tree(tmp_path, {"virtio_mmio": {}, "virtio_blk": {}}))


def test_a_missing_dependency_is_named(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"virtio_mmio": {}, "virtio_blk": {}, "virtio_net": {"depends": "net_failover"}})
    with pytest.raises(GuestArtifactError, match="virtio_net needs net_failover"):
        collect(tree)
