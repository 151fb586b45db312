"""What a Firecracker process sees of the host's files: names in its working directory, given to it one by one.

A snapshot remembers the name of its disk, so in every cell that name must be another disk. In a jail the working
directory is the jail's root and files are mounted there. Where processes cannot be enclosed it is the VM's runtime
directory, and they are links. All methods block: call them in a worker thread.
"""

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from aenv.vmm import process
from aenv.vmm.firecracker import requests
from aenv.vmm.jail import Jail
from aenv.vmm.jail_root import Share

DEVICES = ("/dev/kvm", "/dev/net/tun", "/dev/urandom")
LOBBY = Path("api")  # the folder that the process may write to until it is enclosed
SOCKET = LOBBY / "fc.sock"
LOG = LOBBY / "firecracker.log"
ERRORS = Path("errors.log")  # what it prints


class Cell:
    """The surroundings of one process: its jail, its runtime ``directory``, and where its guest's console goes."""

    def __init__(self, jail: Jail, directory: Path, console: Path) -> None:
        self._jail = jail
        self._directory = directory
        self._console = console

    @property
    def user(self) -> int | None:
        """Whom the process runs as, if not as the server."""
        return self._jail.user

    def lobby_path(self, file: Path) -> str:
        """How the process calls a file of its lobby before it is enclosed."""
        return str(self._jail.lobby_path(self._directory / file))

    def launch(self, argv: Sequence[str], netns: str, tap: str) -> int:
        """Start it, in a network namespace with its tap. Its pid."""
        directory, user = self._directory, self._jail.user

        def give_tap() -> None:
            if user is not None:
                process.give_tap(netns, tap, user)

        return self._jail.launch(
            argv, netns, directory / ERRORS, [], lobby=directory / LOBBY, directory=directory, before=give_tap
        )

    def limit(self) -> None:
        """See ``Jail.limit``."""
        self._jail.limit()

    def prepare(self) -> None:
        """Make the files that it needs, before it is launched."""
        self._console.parent.mkdir(parents=True, exist_ok=True)
        self._console.touch()
        (self._directory / LOBBY).mkdir(0o700)
        os.mkfifo(self._directory / requests.SAVE, 0o600)
        if self._jail.user is not None:
            os.chown(self._directory / requests.SAVE, self._jail.user, self._jail.user)

    def enclose(self) -> None:
        """It answers and has nothing of a guest yet: from here on it sees only what it is given."""
        devices = [Share(Path(path)) for path in DEVICES if Path(path).exists()]
        save = self._directory / requests.SAVE
        console = Share(self._console, f"/{requests.CONSOLE}", writable=True)
        self._jail.enclose([*devices, Share(save, f"/{requests.SAVE}", writable=True), console])
        if not self._jail.enclosed:
            self.provide({requests.CONSOLE: self._console}, writable=True)

    def provide(self, files: Mapping[str, Path], *, writable: bool = False) -> None:
        """Let it open the host's files and devices by these names; a name that is taken is replaced."""
        if self._jail.enclosed:
            self._jail.provide([Share(path, f"/{name}", writable) for name, path in files.items()])
            return
        for name, path in files.items():
            link = self._directory / name
            link.parent.mkdir(exist_ok=True)
            temporary = link.with_name(f".{link.name}.{uuid.uuid4().hex[:8]}")
            temporary.symlink_to(path.absolute())
            temporary.replace(link)

    def withdraw(self, names: Sequence[str]) -> None:
        """What it has open stays open."""
        self._jail.withdraw([f"/{name}" for name in names])
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()

    def outside(self, name: str, pid: int) -> Path:
        """Where the server finds what the process has by that name."""
        return Path(f"/proc/{pid}/root") / name if self._jail.enclosed else self._directory / name

    def close(self) -> None:
        """It has ended. Idempotent."""
        self._jail.close()
