"""The repository beside the same done by hand: storing and fetching a layer; 10,000 committed snapshots.

    python -m bench.repository [--snapshots 10000] [--mib 400] [--folder FOLDER]

The snapshots are made in memory (/dev/shm): what is measured is reading and deciding, and their making would be syncs
of a disk. Storing and fetching are measured in ``--folder``, on the disk that it is on.
"""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from aenv.snapshot.manifest import LayerRef, Manifest, Volume, dump
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.shared import SharedRepository, file_digest
from aenv.vmm.protocol import Accelerator, Fingerprint, MachineShape
from bench.report import Report, Row

MIB = 1 << 20
SHARED = 5  # layers that all snapshots have in common; each has one more of its own
FINGERPRINT = Fingerprint("qemu", "10.0.2", Accelerator.TCG, "max", "microvm", "00" * 32)


def timed(action: Callable[[], object]) -> float:
    """Milliseconds."""
    start = time.perf_counter()
    action()
    return (time.perf_counter() - start) * 1000


def copy_synced(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def transfers(report: Report, folder: Path, mib: int) -> None:
    """One layer into the repository and out of it, against ``cp`` and SHA-256 alone."""
    source = folder / "source"
    with source.open("wb") as file:
        for _ in range(mib // 8):
            file.write(os.urandom(8 * MIB))
    repository = SharedRepository(PosixStore(folder / "repository"))
    digest = file_digest(source)
    ref = LayerRef(digest, source.stat().st_size)
    actions: dict[str, Callable[[], object]] = {
        "cp": lambda: copy_synced(source, folder / "copy"),
        "hash": lambda: file_digest(source),
        "put": lambda: repository.put_layer(source, digest, replace=True),
        "fetch": lambda: repository.fetch(ref, folder / "fetched"),
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(3):
        for name, action in actions.items():
            times[name].append(timed(action))
    best = {name: min(values) for name, values in times.items()}
    note = f"SHA-256 alone {best['hash']:.0f} ms"
    report.add(Row(f"store a layer of {mib} MiB, verified", best["put"], best["cp"], note=f"cp and fsync; {note}"))
    report.add(Row(f"fetch a layer of {mib} MiB, verified", best["fetch"], best["cp"], note=f"cp and fsync; {note}"))


def fill(store: PosixStore, count: int) -> list[Manifest]:
    """Snapshots as commits leave them, written without their protocol."""

    def layer(name: str) -> LayerRef:
        content = name.encode()
        digest = hashlib.sha256(content).hexdigest()
        store.put(f"layers/{digest[:2]}/{digest}", content)
        return LayerRef(f"sha256:{digest}", len(content))

    shared = tuple(layer(f"shared {number}") for number in range(SHARED))
    made = []
    for number in range(count):
        own = layer(f"own {number}")
        value = Manifest(
            id=f"{number:020x}",
            created_at=datetime(2030, 1, 1, tzinfo=UTC) + timedelta(seconds=number),
            parent=None,
            disk=Volume(4 << 30, (*shared, own)),
            memory=Volume(512 << 20, (*shared, own)),
            state=own,
            shape=MachineShape(1, 512),
            disk_mib=4096,
            fingerprint=FINGERPRINT,
        )
        store.put(f"snapshots/{value.id}.json", dump(value))
        made.append(value)
    return made


def many(report: Report, folder: Path, count: int) -> None:
    store = PosixStore(folder / "many")
    made = fill(store, count)
    paths = [folder / "many/snapshots" / f"{value.id}.json" for value in made]
    by_hand = timed(lambda: [json.loads(path.read_bytes()) for path in paths])
    cold = SharedRepository(store)
    report.add(
        Row(
            f"list {count} snapshots, first time",
            timed(lambda: list(cold.list())),
            by_hand,
            note="read and json.loads",
        )
    )
    scan = timed(lambda: [entry.stat() for entry in os.scandir(folder / "many/snapshots")])
    report.add(Row(f"list {count} snapshots, again", timed(lambda: list(cold.list())), scan, note="scandir and stat"))
    names = SharedRepository(store)
    for value in made[:: max(1, count // 100)]:
        names.set_name(f"team/{value.id}", "default", value.id)
    rounds = 200
    resolve = (
        timed(lambda: [names.get(names.resolve("team/" + made[0].id, "default")) for _ in range(rounds)]) / rounds
    )
    report.add(Row(f"resolve a name among {count} and read it", resolve, None))

    def commit() -> None:
        value = replace(made[0], id="ff" * 10)
        with names.claim(value.digests(), "bench") as claim:
            names.commit(value, claim=claim)

    report.add(Row("commit one more, its layers there", timed(commit), None))
    node = SharedRepository(store)
    report.add(
        Row(
            f"collect, nothing to free, first time, {count}",
            timed(lambda: node.gc(timedelta(0))),
            by_hand,
            note="read and json.loads",
        )
    )
    report.add(Row("the same again, manifests known", timed(lambda: node.gc(timedelta(0))), None))
    for value in made[::2]:
        store.delete(f"snapshots/{value.id}.json")
    freed = 0

    def collect() -> None:
        nonlocal freed
        freed = node.gc(timedelta(0)).layers_deleted

    took = timed(collect)
    report.add(Row(f"collect {count // 2} layers", took, None, note=f"{freed} deleted"))
    assert node.verify(deep=False).clean


def repository(report: Report, folder: Path, mib: int = 400, snapshots: int = 10_000) -> None:
    """Both measurements; layers are stored and fetched in ``folder``."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        transfers(report, folder, mib)
        many(report, Path(memory), snapshots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--snapshots", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=400, help="size of the layer that is stored and fetched")
    parser.add_argument(
        "--folder", type=Path, help="where layers are stored and fetched; a temporary one when not given"
    )
    arguments = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as disk:
        repository(report, Path(disk), arguments.mib, arguments.snapshots)
    report.show()


if __name__ == "__main__":
    main()
