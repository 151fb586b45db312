"""Which kernel modules a guest needs, and in what order they load.

A package's ``modules.dep`` is written by ``depmod`` when the package is installed, and ours never is. The same
facts are in each module's ``.modinfo`` section (``depends=`` from modpost, ``softdep=`` from the author), so they
are read from there; ``modules.builtin`` comes with the package and names what needs no loading.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aenv.guest.bzimage import decompress, is_elf
from aenv.guest.commands import GuestArtifactError

REQUIRED = ("virtio_mmio", "virtio_blk", "virtio_net")
"""Without these a guest has no disk or no network."""

OPTIONAL = ("virtio_rng", "virtio_balloon", "overlay", "erofs", "fuse", "vmw_vsock_virtio_transport")
"""Loaded where the kernel has them."""

_SUFFIX = re.compile(r"\.ko(\.(xz|zst|gz))?$")
_SIGNATURE_MAGIC = b"~Module signature appended~\n"


@dataclass(frozen=True)
class Module:
    """One loadable module: its canonical name, its uncompressed contents, the modules that go before it."""

    name: str
    data: bytes
    depends: tuple[str, ...]


def canonical(name: str) -> str:
    """A module's name as the kernel spells it: file names may have dashes, names never do."""
    return _SUFFIX.sub("", name.rsplit("/", 1)[-1]).replace("-", "_")


def load_order(wanted: Iterable[str], depends: Callable[[str], Sequence[str]]) -> list[str]:
    """``wanted`` and all they need, each once, each after everything it depends on.

    The order is a function of the input alone. Raises GuestArtifactError on a cycle.
    """
    order: list[str] = []
    state: dict[str, bool] = {}

    def visit(name: str, chain: tuple[str, ...]) -> None:
        if state.get(name):
            return
        if name in state:
            raise GuestArtifactError(
                f"kernel modules depend on each other: {' -> '.join((*chain, name))}",
                hint="the kernel package is damaged: fetch it again",
            )
        state[name] = False
        for needed in depends(name):
            visit(needed, (*chain, name))
        state[name] = True
        order.append(name)

    for name in wanted:
        visit(name, ())
    return order


def modinfo(module: bytes) -> dict[str, list[str]]:
    """The ``key=value`` strings of a module's ``.modinfo`` section, by key (64-bit little-endian ELF)."""
    found: dict[str, list[str]] = {}
    for item in _section(module, b".modinfo").split(b"\x00"):
        key, equals, value = item.partition(b"=")
        if equals:
            found.setdefault(key.decode(), []).append(value.decode(errors="replace"))
    return found


def _section(elf: bytes, wanted: bytes) -> bytes:
    """One section's contents; empty where the file has none of that name."""
    if not is_elf(elf):
        raise GuestArtifactError("a kernel module is not an ELF file", hint="fetch the kernel package again")
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)

    def header(index: int) -> tuple[int, int, int]:
        name, _, _, _, offset, size = struct.unpack_from("<IIQQQQ", elf, table + index * entry_size)
        return name, offset, size

    _, names_offset, names_size = header(names_index)
    names = elf[names_offset : names_offset + names_size]
    for index in range(count):
        name, offset, size = header(index)
        if names[name : names.index(b"\x00", name)] == wanted:
            return elf[offset : offset + size]
    return b""


def unsigned(module: bytes) -> bytes:
    """The module without an appended signature (include/linux/module_signature.h).

    The file is ``module, signature, struct module_signature (12 bytes, big-endian length last), magic``.
    """
    if not module.endswith(_SIGNATURE_MAGIC):
        return module
    trailer = len(module) - len(_SIGNATURE_MAGIC)
    (length,) = struct.unpack_from(">I", module, trailer - 4)
    return module[: trailer - 12 - length]


def collect(tree: Path, required: Sequence[str] = REQUIRED, optional: Sequence[str] = OPTIONAL) -> list[Module]:
    """The guest's modules from a ``lib/modules/<release>`` directory, in load order.

    Raises GuestArtifactError where one of ``required`` is neither there nor built in.
    """
    files = {canonical(path.name): path for path in sorted(tree.rglob("*.ko*")) if _SUFFIX.search(path.name)}
    builtin_list = tree / "modules.builtin"
    builtin = {canonical(line) for line in builtin_list.read_text().splitlines()} if builtin_list.exists() else set()
    loaded: dict[str, Module] = {}

    def load(name: str) -> Module:
        if name not in loaded:
            data = decompress(files[name].read_bytes())
            info = modinfo(data)
            hard = [canonical(item) for line in info.get("depends", []) for item in line.split(",") if item]
            soft = [canonical(item) for line in info.get("softdep", []) for item in _soft_pre(line)]
            for needed in hard:
                if needed not in files and needed not in builtin:
                    raise GuestArtifactError(
                        f"kernel module {name} needs {needed}, which is missing",
                        hint="use a kernel with its complete modules package",
                    )
            needs = dict.fromkeys(item for item in (*hard, *soft) if item in files and item not in builtin)
            loaded[name] = Module(name, data, tuple(needs))
        return loaded[name]

    missing = [name for name in required if name not in files and name not in builtin]
    if missing:
        raise GuestArtifactError(
            f"the kernel has no {', '.join(missing)}", hint="use a kernel with virtio drivers and its modules"
        )
    wanted = [name for name in (*required, *optional) if name in files and name not in builtin]
    return [load(name) for name in load_order(wanted, lambda name: load(name).depends)]


def _soft_pre(line: str) -> list[str]:
    """The modules that a ``softdep`` line wants loaded before: ``pre: a b post: c`` gives a and b."""
    match = re.search(r"\bpre:\s*(.*?)\s*(?:\bpost:|$)", line)
    return match.group(1).split() if match else []
