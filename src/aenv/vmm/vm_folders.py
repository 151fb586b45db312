"""Where the files of VMs are: what goes with a process below the runtime folder, its console in the node's home."""

from pathlib import Path

from aenv.errors import VmmError


class VmFolders:
    def __init__(self, home: Path, runtime: Path) -> None:
        self._home = home / "vms"
        self._runtime = runtime / "vms"

    def runtime(self, vm_id: str) -> Path:
        return self._runtime / vm_id

    def console(self, vm_id: str) -> Path:
        return self._home / vm_id / "console.log"

    def memory(self, vm_id: str) -> Path:
        """Guest RAM of a first boot, where that is a file."""
        return self._home / vm_id / "memory"

    def make(self, vm_id: str) -> Path:
        """The runtime folder of a new VM. Raises VmmError when there is one of that name, OSError."""
        directory = self.runtime(vm_id)
        try:
            directory.mkdir(parents=True)
        except FileExistsError as error:
            raise VmmError(f"VM {vm_id} exists already.") from error
        return directory

    def known(self) -> list[str]:
        """Ids of all VMs that have a runtime folder."""
        try:
            return sorted(entry.name for entry in self._runtime.iterdir())
        except FileNotFoundError:
            return []
