"""Confinement of VMM processes: a guest that breaks out of its VMM finds an empty jail.

A confined process has a user of its own and no capability, its own mount, PID, IPC and UTS namespaces, an empty root
with nothing but the files of its VM, and a control group. How, why so, and what it costs:
``docs/internals/confinement.md``. All methods block, mostly for less than a millisecond: call them in a worker
thread.
"""

import contextlib
import os
import platform
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import structlog

from aenv import mountinfo
from aenv.errors import VmmError
from aenv.vmm import jail_calls as calls
from aenv.vmm import jail_filter, process
from aenv.vmm import jail_root as root
from aenv.vmm.cgroup import Cgroups
from aenv.vmm.cgroup_limits import Limits
from aenv.vmm.jail_root import Content, Share, Visitors
from aenv.vmm.jail_settings import ADVICE, JailSettings, rehearse, rehearse_user
from aenv.vmm.jail_users import Users

log = structlog.get_logger()

# Where a process that is not enclosed yet finds the one folder of the host that it may write to: a folder that any
# user can reach, that is there wherever there are network slots, and that is of no use to a VMM.
LOBBY = process.NETNS_DIRECTORY
FILTER = jail_filter.program() if platform.machine() in jail_filter.DENIED else b""
THREADS = 128  # of a VMM besides its virtual CPUs: QEMU's block layer starts up to 64 for itself


class Jail:
    """The confinement of one VM's process. Made by ``Jailer`` only."""

    def __init__(self, jailer: "Jailer", vm_id: str, directory: Path, user: int | None) -> None:
        self._jailer = jailer
        self._vm_id = vm_id
        self._directory = directory
        self._lock = threading.Lock()
        self._pid = 0
        self._pidfd = -1
        self._present: dict[str, Content] = {}
        self.user = user
        self.enclosed = False

    def launch(
        self,
        argv: Sequence[str],
        netns: str | None,
        errors: Path,
        pass_fds: Iterable[int],
        *,
        output: Path | None = None,
        lobby: Path | None = None,
        directory: Path = Path("/"),
        before: Callable[[], None] = lambda: None,
    ) -> int:
        """Start the process; its pid. As ``process.launch``, confined but for its root, which ``enclose`` takes.

        ``lobby`` is a folder, made the process's own, that it finds at ``lobby_path`` until then: for a socket. It
        works in its root, or in ``directory`` where that will be the host's. ``before`` is called in the network
        namespace, with the server's rights still. Whoever calls this calls ``limit`` too. Raises VmmError.
        """
        if lobby is not None and self.user is not None:
            os.chown(lobby, self.user, self.user)
            lobby.chmod(0o700)

        def prepare() -> None:
            before()
            if self._jailer.isolates:
                self._prepare(lobby)

        try:
            place = Path("/") if self._jailer.isolates else directory
            pid = process.launch(argv, netns, errors, pass_fds, output=output, directory=place, prepare=prepare)
        finally:
            self._jailer.restore_dumpable()
        self._watch(pid)
        return pid

    def limit(self) -> None:
        """Put the process into its control group. Raises VmmError.

        The kernel may wait some 10 ms for that: do it while the process loads its program.
        """
        self._jailer.limit(self._vm_id, self._pid)

    def _prepare(self, lobby: Path | None) -> None:
        try:
            calls.leave_namespaces()
            if lobby is not None:
                calls.bind(lobby, LOBBY)
            calls.become(self.user)
            calls.restrict(FILTER)
        except OSError as error:
            raise VmmError(f"VM {self._vm_id} cannot be confined: {error}.", ADVICE) from error

    def lobby_path(self, file: Path) -> Path:
        """How the process calls a file in its ``lobby`` before it is enclosed."""
        return LOBBY / file.name if self._jailer.isolates else file

    def enclose(self, shares: Iterable[Share] = ()) -> None:
        """Take the host's files from the process, but for ``shares``. It must have loaded its program by now.

        Raises VmmError.
        """
        if self._jailer.isolates:
            mount_point = str(self._directory)
            self._change(shares, before=lambda: root.empty_root(mount_point))
            self.enclosed = True

    def provide(self, shares: Iterable[Share]) -> None:
        """Give files, folders and devices to the running process. At a path where something is, it is replaced.

        Raises VmmError.
        """
        if self.enclosed:
            self._change(shares)

    def withdraw(self, paths: Iterable[str]) -> None:
        """Take away what was provided at these paths; what the process has open stays open. Raises VmmError."""
        with self._lock:
            gone = [path for path in paths if path in self._present]
            if self.enclosed and gone:
                self._inside(lambda: root.take_away(gone))
                for path in gone:
                    del self._present[path]

    @property
    def provided(self) -> set[str]:
        """Paths that the process has now; empty when it is not enclosed, and finds what the host has."""
        with self._lock:
            return set(self._present)

    def may_write(self, path: str) -> bool:
        """Whether the process was given the file at that path to write; True when it finds what the host has."""
        with self._lock:
            return not self.enclosed or (path in self._present and self._present[path].writable)

    def close(self) -> None:
        """Give back user and control group of a process that has ended; idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        self._jailer.sweep(self._vm_id, self._directory)

    def take_over(self, pid: int) -> bool:
        """For ``Jailer.adopt``: whether the process is as confined as it was going to be."""
        self._watch(pid)
        try:
            self.enclosed = root.is_enclosed(pid)
            if self.enclosed:
                self._present = root.contents(pid)
        except OSError:
            return False
        return self.enclosed or self.user is None

    def _watch(self, pid: int) -> None:
        self._pid = pid
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def _change(self, shares: Iterable[Share], before: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            try:
                with root.opened(shares, self.user, self._present) as wanted:

                    def work() -> None:
                        before()
                        root.place(wanted, self.user)

                    self._inside(work)
                    for share in wanted:
                        self._present[share.path] = share.content
            except OSError as error:
                raise VmmError(f"VM {self._vm_id} cannot be given its files: {error}.") from error

    def _inside(self, work: Callable[[], None]) -> None:
        if self._pidfd < 0:
            raise VmmError(f"Process {self._pid} is gone.")
        self._jailer.visitors.inside(self._pid, self._pidfd, work)


class Jailer:
    """Makes jails, as far as this host and this server's rights allow."""

    def __init__(self, settings: JailSettings, home: Path, runtime: Path) -> None:
        """Blocks for some milliseconds. Raises VmmError in mode ``on`` when something does not work."""
        self.gaps: list[str] = []  # what does not work, as sentences
        self.isolates = False  # namespaces and an empty root
        self.visitors = Visitors()
        self._own_users = False
        self._limits = False
        self._settings = settings
        self._in_memory = mountinfo.kind_of(home) in ("tmpfs", "ramfs")
        self._dumpable = calls.dumpable()
        self._users = Users(settings.first_user, settings.users)
        self._cgroups = Cgroups.find(settings.cgroup, settings.node, home, settings.io)
        if settings.mode != "off":
            self._assess(home)
        self._tidy(runtime / "vms")

    def _assess(self, home: Path) -> None:
        settings = self._settings
        if (why := rehearse(home)) is not None:
            self.gaps.append(why)
        else:
            self.isolates = True
            if (why := rehearse_user(settings.first_user + settings.users - 1)) is not None:
                self.gaps.append(why)
            else:
                self._own_users = True
            self.restore_dumpable()
        self._limits = True
        self.gaps += self._cgroups.prepare(Limits(cpus=1, memory=1 << 30, pids=64, io=settings.io))
        if self.gaps and settings.mode == "on":
            raise VmmError(f"VM processes cannot be confined as jail = on demands: {'; '.join(self.gaps)}.", ADVICE)
        for gap in self.gaps:
            log.warning("VM processes are less confined than they could be", missing=gap)

    def limits(self, vcpus: int, memory: int) -> Limits:
        """Of a VM with ``memory`` bytes for its guest and its VMM together.

        One processor more than it has virtual ones, for what the VMM does itself. No limit of memory where the node's
        files are in memory too: they would count.
        """
        return Limits(
            cpus=vcpus + 1,
            weight=vcpus,
            memory=None if self._in_memory else memory,
            pids=THREADS + vcpus,
            io=self._settings.io,
        )

    def prepare(self, vm_id: str, directory: Path, limits: Limits) -> Jail:
        """A jail for a process that is to be launched. ``directory`` is its runtime folder, which exists.

        Raises VmmError. Whatever happens afterwards, ``close`` the jail.
        """
        try:
            if self._limits:
                self._cgroups.create(vm_id, limits)
            user = self._users.claim(directory) if self._own_users else None
        except BaseException:
            self.sweep(vm_id, directory)
            raise
        return Jail(self, vm_id, directory, user)

    def adopt(self, vm_id: str, directory: Path, pid: int, user: int | None) -> Jail | None:
        """The jail of a process that outlived the server, whatever the settings say now.

        ``user`` is what its jail had. None when the server died before it was enclosed: it must be ended.
        """
        jail = Jail(self, vm_id, directory, user)
        return jail if jail.take_over(pid) else None

    def sweep(self, vm_id: str, directory: Path) -> None:
        """Give back user and control group of a VM whose process has ended."""
        self._cgroups.remove(vm_id)
        self._users.release(directory)

    def limit(self, vm_id: str, pid: int) -> None:
        """Put a new process into its control group."""
        if self._limits:
            self._cgroups.enter(vm_id, pid)

    def restore_dumpable(self) -> None:
        """A thread that took on another user took from the whole server that it may be debugged."""
        if self._own_users and self._dumpable == 1:
            calls.set_dumpable(1)

    def groups(self, vm_id: str) -> list[Path]:
        """The control groups of a VM."""
        return self._cgroups.folders(vm_id)

    def close(self) -> None:
        """Jails stay. Idempotent."""
        self.visitors.close()

    def _tidy(self, vms: Path) -> None:
        """Remove groups and users of VMs that the last server did not get to remove."""
        for name in self._cgroups.names():
            if not (vms / name).exists():
                self._cgroups.remove(name, timeout=0)
        self._users.forget_dead()
