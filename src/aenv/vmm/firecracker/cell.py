"""What a Firecracker process sees of the host's files: names in its working directory, given to it one by one.

A snapshot remembers the name of its disk, so in every cell that name must be another disk. In a jail the working
directory is the jail's root and files are mounted there; without one it is the VM's runtime directory, and they are
links.
"""

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from aenv.vmm import process

SAVE = "save"  # where device state is written, before it gets its name
LOG = "firecracker.log"  # what Firecracker logs and prints as errors
SOCKET = Path("api") / "fc.sock"


class Cell(Protocol):
    """The surroundings of one process. All methods block: call them in a worker thread."""

    def launch(self, argv: Sequence[str], netns: str, console: Path) -> int:
        """Start it; its standard output is the guest's serial console. Its pid."""

    def enclose(self) -> None:
        """It answers and has nothing of a guest yet: from here on it sees only what it is given."""

    def provide(self, files: Mapping[str, Path], *, writable: bool = False) -> None:
        """Let it open the host's files and devices by these names; a name that is taken is replaced."""

    def withdraw(self, names: Sequence[str]) -> None:
        """What it has open stays open."""

    def close(self) -> None:
        """It has ended. Idempotent."""


class OpenCell:
    """No confinement: its files are links in the VM's runtime directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def launch(self, argv: Sequence[str], netns: str, console: Path) -> int:
        directory = self._directory
        return process.launch(argv, netns, directory / LOG, [], output=console, directory=directory)

    def enclose(self) -> None:
        pass

    def provide(self, files: Mapping[str, Path], *, writable: bool = False) -> None:
        for name, path in files.items():
            temporary = self._directory / f".{name}.{uuid.uuid4().hex[:8]}"
            temporary.symlink_to(path.absolute())
            temporary.replace(self._directory / name)

    def withdraw(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()

    def close(self) -> None:
        pass
