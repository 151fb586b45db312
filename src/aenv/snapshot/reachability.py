"""Which files are garbage: pure reachability over snapshots, disk layers and memory bases."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from aenv.snapshot.model import DiskLayer, Snapshot


@dataclass(frozen=True, slots=True)
class Garbage:
    """Ids that nothing names any more."""

    snapshots: frozenset[str]
    layers: frozenset[str]
    memory: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.snapshots or self.layers or self.memory)


def find_garbage(
    snapshots: Mapping[str, Snapshot],
    layers: Mapping[str, DiskLayer],
    memory: Collection[str],
    *,
    named_snapshots: Iterable[str],
    named_layers: Iterable[str],
    named_memory: Iterable[str],
) -> Garbage:
    """Everything not reachable from the snapshots, layers and memory bases that sandboxes, templates and saved
    snapshots name.

    A snapshot keeps its memory base, if it has one, and its disk layer; a layer keeps its parents.
    """
    live_snapshots = {name for name in named_snapshots if name in snapshots}
    live_memory = {*named_memory, *(base for name in live_snapshots if (base := snapshots[name].memory_base))}
    live_layers: set[str] = set()
    pending = [*named_layers, *(snapshots[name].disk for name in live_snapshots)]
    while pending:
        name = pending.pop()
        if name in live_layers:
            continue
        live_layers.add(name)
        layer = layers.get(name)
        if layer is not None and layer.parent is not None:
            pending.append(layer.parent)
    return Garbage(
        snapshots=frozenset(snapshots.keys() - live_snapshots),
        layers=frozenset(layers.keys() - live_layers),
        memory=frozenset(set(memory) - live_memory),
    )


def chain(layers: Mapping[str, DiskLayer], top: str) -> list[DiskLayer]:
    """The layers of a disk from ``top`` down to its base. Raises KeyError when one is not recorded."""
    found: list[DiskLayer] = []
    name: str | None = top
    while name is not None:
        layer = layers[name]
        found.append(layer)
        name = layer.parent
    return found
