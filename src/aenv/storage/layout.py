"""Where everything of a node lives on disk. Paths only; nothing is created here but by ``create``.

``home`` (durable)                       ``runtime`` (transient)
  aenv.db        SQLite, WAL               vms/<vm>/     QMP socket, process record
  accounts.db    keys, tokens, secrets,    layers/<id>   committed volumes, from the layer server
                 volumes: mode 0600
  volumes/<id>/  files of volumes, as their users made them
  logs.db        sandboxes' logs: mode 0600
  api-key        mode 0600
  lock           held by the server
  artifacts/     kernel, initramfs, base root filesystems
  layers/<id>.raw|.qcow2   disk layers
  memory/<id>    full-size memory bases (sparse)
  snapshots/<id>/{state,delta}
  sandboxes/<id>/console.log
  vms/<vm>/console.log
  builds/<build>.jsonl       logs of template builds
  template-files/<sha256>    archives uploaded for template builds
  commits/       layers on their way to the repository
  node-name      what claims in the repository call this node

A file becomes part of the node by the database row that names it, written after the file is complete. So
whatever no row names when the server starts is debris of a crash and is removed.
"""

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from aenv.snapshot.model import DiskLayer, is_volume


@dataclass(frozen=True, slots=True)
class Layout:
    home: Path
    runtime: Path

    @property
    def database(self) -> Path:
        return self.home / "aenv.db"

    @property
    def accounts(self) -> Path:
        return self.home / "accounts.db"

    @property
    def logs(self) -> Path:
        return self.home / "logs.db"

    @property
    def api_key(self) -> Path:
        return self.home / "api-key"

    @property
    def lock(self) -> Path:
        return self.home / "lock"

    @property
    def vms(self) -> Path:
        return self.home / "vms"

    @property
    def node_name(self) -> Path:
        return self.home / "node-name"

    @property
    def commits(self) -> Path:
        return self.home / "commits"

    def volume(self, volume_id: str) -> Path:
        return self.runtime / "layers" / volume_id

    def image_volume(self, volume_id: str) -> Path:
        """Names of the layers of a converted image's disk (``aenv.orchestrator.ondemand``)."""
        return self.home / "images" / "volumes" / volume_id

    def layer(self, layer: DiskLayer) -> Path:
        if is_volume(layer.id):
            return self.volume(layer.id)
        return self.home / "layers" / f"{layer.id}.{layer.format}"

    def memory(self, memory_id: str) -> Path:
        return self.volume(memory_id) if is_volume(memory_id) else self.home / "memory" / memory_id

    def snapshot(self, snapshot_id: str) -> Path:
        return self.home / "snapshots" / snapshot_id

    def state(self, snapshot_id: str) -> Path:
        return self.snapshot(snapshot_id) / "state"

    def delta(self, snapshot_id: str) -> Path:
        return self.snapshot(snapshot_id) / "delta"

    def sandbox(self, sandbox_id: str) -> Path:
        return self.home / "sandboxes" / sandbox_id

    def console(self, vm_id: str) -> Path:
        return self.vms / vm_id / "console.log"

    def keep_console(self, vm_id: str, sandbox_id: str) -> None:
        """Append a VM's serial log to its sandbox's, and remove the VM's folder."""
        folder = self.sandbox(sandbox_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            with self.console(vm_id).open("rb") as source, (folder / "console.log").open("ab") as target:
                shutil.copyfileobj(source, target)
        except FileNotFoundError:
            pass
        remove(self.vms / vm_id)

    def create(self) -> None:
        """Make the folders, readable by root alone: they hold guests' memory and disks."""
        self.home.mkdir(parents=True, exist_ok=True)
        for name in ("artifacts", "layers", "memory", "snapshots", "sandboxes", "vms", "commits"):
            (self.home / name).mkdir(mode=0o700, exist_ok=True)
        self.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)

    def remove_debris(
        self,
        *,
        layers: Collection[DiskLayer],
        memory: Collection[str],
        snapshots: Collection[str],
        sandboxes: Collection[str],
        vms: Collection[str],
    ) -> list[Path]:
        """Remove every file and folder that no given record names; what was removed."""
        wanted = {
            "layers": {self.layer(layer).name for layer in layers},
            "memory": set(memory),
            "snapshots": set(snapshots),
            "sandboxes": set(sandboxes),
            "vms": set(vms),
            "commits": set(),
        }
        removed = []
        for folder, names in wanted.items():
            for path in (self.home / folder).iterdir():
                if path.name not in names:
                    remove(path)
                    removed.append(path)
        return removed


def remove(path: Path) -> None:
    """Remove a file or a folder with all in it; fine when it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def allocated_bytes(path: Path) -> int:
    """What a sparse file takes on disk (st_blocks counts 512-byte units, stat(2))."""
    return path.stat().st_blocks * 512
