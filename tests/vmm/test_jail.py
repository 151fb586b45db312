"""Jails: what a program in one can do, which is nothing, and what is left of one, which is nothing as well."""

import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.vmm import jail_calls, process
from aenv.vmm.jail import Jailer
from aenv.vmm.jail_root import Share, prepare_visitor
from aenv.vmm.jail_settings import JailSettings
from aenv.vmm.jail_users import Users
from tests.vmm import inmate
from tests.vmm.inmate import MIB, Inmate

Launch = Callable[..., Inmate]
NODE = f"jailtest{os.getpid()}"


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: " ".join(value.split()) for name, _, value in (line.partition(":") for line in lines)}


def mounts_of(pid: int) -> dict[str, list[str]]:
    """Options by mount point."""
    lines = [line.split(" ") for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
    return {fields[4]: fields[5].split(",") for fields in lines}


def reached_the_host(folder: Path) -> list[str]:
    """Mounts of jails, or of anything below ``folder``, in the namespace of the server."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if " - tmpfs jail " in line or f" {folder}/" in line]


@pytest.fixture(scope="module")
def open_folder(root_only: None) -> Iterator[Path]:
    """Where every user gets to. pytest's folders are its user's alone, and each of its runs makes them so again."""
    folder = Path(tempfile.mkdtemp(prefix="aenv-jail-", dir="/var/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def program(open_folder: Path) -> Path:
    if (built := inmate.build(open_folder)) is None:
        pytest.skip("needs a C compiler")
    return built


@pytest.fixture
def jailer(root_only: None, tmp_path: Path) -> Iterator[Jailer]:
    made = Jailer(JailSettings(mode="on", node=NODE), tmp_path, tmp_path)
    yield made
    made.close()


@pytest.fixture
def launch(jailer: Jailer, program: Path, tmp_path: Path) -> Iterator[Launch]:
    made: list[Inmate] = []
    (tmp_path / "vms").mkdir()

    def start(name: str, *shares: Share, by: Jailer = jailer, memory: int = 512 * MIB) -> Inmate:
        made.append(Inmate(by, program, tmp_path / "vms" / name, list(shares), memory=memory))
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture
def secret(open_folder: Path) -> Path:
    """A file that nothing but the jail protects."""
    file = open_folder / "secret"
    file.write_text("secret")
    file.chmod(0o666)
    return file


def test_the_same_program_without_a_jail_gets_at_everything(
    launch: Launch, secret: Path, open_folder: Path, tmp_path: Path
) -> None:
    """Or else the refusals below would prove nothing."""
    free = launch("free", by=Jailer(JailSettings(mode="off", node=NODE), tmp_path, tmp_path))
    with socket.socket(socket.AF_UNIX) as api, socket.socket() as server:
        api.bind(str(open_folder / "api.sock"))
        api.listen()
        server.bind(("127.0.0.1", 0))
        server.listen()
        for attempt in (
            f"read {secret}", f"write {open_folder}/made", f"connect {open_folder}/api.sock",
            f"tcp {server.getsockname()[1]}", "netlink", "read /etc/shadow", "become 0", "unshare",
        ):  # fmt: skip
            assert free.ask(attempt).startswith("ok"), attempt
    (open_folder / "api.sock").unlink()
    assert "etc" in free.ask("list /").split()


def test_an_escaped_guest_finds_nothing(launch: Launch, secret: Path, open_folder: Path, tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.write_text("own")
    other.write_text("other")
    neighbour = launch("neighbour", Share(other, writable=True))
    guest = launch("guest", Share(own, "/disk", writable=True), Share(secret, "/memory"))
    with socket.socket(socket.AF_UNIX) as api, socket.socket() as server:
        api.bind(str(open_folder / "api.sock"))
        api.listen()
        (open_folder / "api.sock").chmod(0o777)
        server.bind(("127.0.0.1", 0))
        server.listen()
        expected = {
            "list /": "ok",
            "list /dev": "ok",
            "read /disk": "ok",
            "write /disk": "ok",
            "read /memory": "ok",
            "write /memory": "EROFS",
            "read /etc/shadow": "ENOENT",
            f"read {secret}": "ENOENT",
            f"read {other}": "ENOENT",
            f"write {open_folder}/made": "ENOENT",
            "write /made": "EACCES",
            "write /dev/made": "EACCES",
            "list /proc": "ENOENT",
            "list /sys": "ENOENT",
            f"connect {open_folder}/api.sock": "ENOENT",
            "connect /run/docker.sock": "ENOENT",
            f"tcp {server.getsockname()[1]}": "EPERM",
            "netlink": "EPERM",
            f"kill {os.getpid()}": "ESRCH",
            f"kill {neighbour.pid}": "ESRCH",
            f"trace {neighbour.pid}": "EPERM",
            f"peek {os.getpid()}": "EPERM",
            "become 0": "EPERM",
            f"become {neighbour.jail.user}": "EPERM",
            "mknod /dev/vda": "EPERM",
            "mount": "EPERM",
            "chroot": "EPERM",
            "unshare": "EPERM",
            "userns": "EPERM",
            "uring": "EPERM",
            "raise": "EPERM",
        }
        answers = {line: guest.ask(line) for line in expected}
    (open_folder / "api.sock").unlink()
    inside = sorted(answers["list /"].split()[1:])
    assert inside == ["dev", "disk", "memory"]
    assert answers["list /dev"] == "ok null"
    assert {line: answer.split()[0] for line, answer in answers.items()} == expected
    assert sorted(guest.ask("up").split()[1:]) == inside, "there is a way up, or out by an open folder"
    assert guest.ask("ids") == f"ok 1 0 {guest.jail.user} {guest.jail.user} vm"
    assert other.read_text() == "other" and own.read_text() == "xwn"


def test_what_the_kernel_says_of_it(launch: Launch, jailer: Jailer) -> None:
    guest = launch("guest", memory=300 * MIB)
    status = status_of(guest.pid)
    user = guest.jail.user
    assert user is not None and user >= 1_880_000_000
    assert status["Uid"] == status["Gid"] == " ".join([str(user)] * 4) and status["Groups"] == ""
    for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[kind], 16) == 0, kind
    assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
    assert status["NSpid"].split() == [str(guest.pid), "1"]
    for kind in ("mnt", "pid_for_children", "ipc", "uts"):
        theirs = Path(f"/proc/{guest.pid}/ns/{kind}").readlink()
        assert theirs != Path(f"/proc/self/ns/{kind}").readlink(), kind
    assert mounts_of(guest.pid).keys() == {"/", "/dev"}
    assert "Max core file size 0 0 bytes" in " ".join(Path(f"/proc/{guest.pid}/limits").read_text().split())
    for folder in jailer.groups("guest"):
        assert str(guest.pid) in (folder / "cgroup.procs").read_text().split()
    names = ("memory.limit_in_bytes", "memory.max", "pids.max", "cpu.cfs_quota_us", "cpu.max")
    files = [folder / name for folder in jailer.groups("guest") for name in names]
    values = {file.name: file.read_text().strip() for file in files if file.exists()}
    assert values["pids.max"] == "129"
    assert values.get("memory.max", values.get("memory.limit_in_bytes")) == str(300 * MIB)
    assert values.get("cpu.max", values.get("cpu.cfs_quota_us", "")).split()[0] == "200000"


def test_its_limits_hold(launch: Launch) -> None:
    guest = launch("guest", memory=64 * MIB)
    failed, started = guest.ask("threads 1000").split()
    assert failed == "EAGAIN" and int(started) == 128
    assert guest.ask("grow 20") == "ok"
    assert guest.ask("grow 200") == "", "it did not get it"
    assert guest.wait() == -9


def test_files_come_and_go_while_it_runs(launch: Launch, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text("1")
    two.write_text("2")
    folder = tmp_path / "folder"
    (folder / "below").mkdir(parents=True)
    guest = launch("guest")
    jail = guest.jail
    assert jail.provided == set()
    jail.provide([Share(one, "/a/b/drive", writable=True), Share(folder), Share(Path("/dev/zero"))])
    assert guest.ask("write /a/b/drive") == "ok" and one.read_text() == "x"
    assert (one.stat().st_uid, stat.S_IMODE(one.stat().st_mode)) == (jail.user, 0o600)
    assert guest.ask(f"list {folder}") == "ok below" and guest.ask(f"write {folder}/made") == "EROFS"
    assert guest.ask("read /dev/zero") == "ok" and sorted(guest.ask("list /dev").split()[1:]) == ["null", "zero"]
    jail.provide([Share(two, "/a/b/drive", writable=True)])
    assert guest.ask("write /a/b/drive") == "ok" and two.read_text() == "x"
    # Given to be read, it is the server's again.
    jail.provide([Share(one, "/frozen"), Share(two, "/a/b/drive")])
    assert (one.stat().st_uid, stat.S_IMODE(one.stat().st_mode) & 0o444) == (os.getuid(), 0o444)
    assert guest.ask("read /frozen") == "ok" and guest.ask("write /a/b/drive") == "EACCES"
    assert "ro" in mounts_of(guest.pid)["/a/b/drive"]
    assert jail.may_write("/a/b/drive") is False and jail.may_write("/etc/passwd") is False
    jail.withdraw(["/a/b/drive", "/frozen", str(folder), "/never/there"])
    assert guest.ask("read /a/b/drive") == "ENOENT" and guest.ask("list /") == "ok dev"
    assert jail.provided == {"/dev/zero"}
    with pytest.raises(VmmError, match="missing"):
        jail.provide([Share(tmp_path / "missing")])
    guest.kill()
    with pytest.raises(VmmError, match="gone"):
        jail.provide([Share(one)])


def test_a_visitor_whose_directories_are_shared_sends_another(launch: Launch, tmp_path: Path) -> None:
    (disk := tmp_path / "disk").write_text("disk")
    guest, leave = launch("guest"), threading.Event()

    def visit() -> None:
        (friend := threading.Thread(target=leave.wait)).start()  # it has what the thread that started it has
        try:
            guest.jail.provide([Share(disk, "/disk")])
        finally:
            leave.set()
            friend.join()

    with ThreadPoolExecutor(1, initializer=prepare_visitor) as executor:
        executor.submit(visit).result()
    assert guest.ask("read /disk") == "ok"


def test_it_is_found_again(launch: Launch, jailer: Jailer, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.write_text("disk")
    guest = launch("guest", Share(disk, "/disk", writable=True), Share(Path("/dev/zero")))
    other = Jailer(JailSettings(mode="off", node=NODE), tmp_path, tmp_path)  # whatever the settings say by then
    jail = other.adopt("guest", guest.folder, guest.pid, guest.jail.user)
    assert jail is not None and jail.enclosed and jail.provided == guest.jail.provided == {"/disk", "/dev/zero"}
    assert jail.may_write("/disk")
    jail.provide([Share(disk)])
    assert guest.ask(f"read {disk}") == "ok"
    guest.kill()
    jail.close()
    assert not any(folder.exists() for folder in jailer.groups("guest"))
    other.close()


@pytest.mark.parametrize("name", ["Übung 资料", "back\\slash", "tab\there"])
def test_files_of_any_name_are_known_after_adoption(
    launch: Launch, jailer: Jailer, tmp_path: Path, name: str
) -> None:
    disk = tmp_path / name
    disk.write_text("ours")
    guest = launch("guest", Share(disk))
    jail = jailer.adopt("guest", guest.folder, guest.pid, guest.jail.user)
    assert jail is not None and jail.provided == {str(disk)}
    jail.withdraw([str(disk)])
    assert jail.provided == set()


def test_one_that_was_never_enclosed_is_not_taken_over(
    launch: Launch, jailer: Jailer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("aenv.vmm.jail.Jail.enclose", lambda *_: None)
        guest = launch("guest")
    assert jailer.adopt("guest", guest.folder, guest.pid, guest.jail.user) is None


def test_nothing_is_left(launch: Launch, jailer: Jailer, tmp_path: Path) -> None:
    (tmp_path / "disk").touch()
    guests = [launch(f"g{number}", Share(tmp_path / "disk")) for number in range(3)]
    groups = [folder for guest in guests for folder in jailer.groups(guest.folder.name)]
    assert groups and all(folder.exists() for folder in groups)
    users = {guest.jail.user for guest in guests}
    assert len(users) == 3
    assert reached_the_host(tmp_path) == []
    links = [Path("/run/aenv-users") / str(user) for user in users]
    assert all(link.is_symlink() for link in links)
    for guest in guests:
        guest.close()
        guest.jail.close()  # again
    assert not any(folder.exists() for folder in groups)
    assert not any(link.is_symlink() for link in links)
    assert reached_the_host(tmp_path) == []


def test_a_start_removes_what_a_crash_left(launch: Launch, jailer: Jailer, tmp_path: Path) -> None:
    guest = launch("guest")
    guest.kill()
    groups, link = jailer.groups("guest"), Path("/run/aenv-users") / str(guest.jail.user)
    Jailer(JailSettings(node=NODE), tmp_path, tmp_path).visitors.close()
    assert link.is_symlink() and all(folder.exists() for folder in groups), "its runtime folder is there"
    (guest.folder / "log").unlink()
    guest.folder.rmdir()
    Jailer(JailSettings(node=NODE), tmp_path, tmp_path).visitors.close()
    assert not link.is_symlink() and not any(folder.exists() for folder in groups)


def test_a_program_that_users_may_not_start(launch: Launch, jailer: Jailer, program: Path, tmp_path: Path) -> None:
    (tmp_path / "vms" / "guest").mkdir()
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    (hidden / "escape").symlink_to(program)
    jail = jailer.prepare("guest", tmp_path / "vms" / "guest", jailer.limits(1, MIB))
    with pytest.raises(VmmError, match="Permission denied"):
        jail.launch([str(hidden / "escape"), "0"], None, tmp_path / "log", [])
    jail.close()


def test_the_server_stays_who_it_is(launch: Launch) -> None:
    launch("guest")
    status = status_of(os.getpid())
    assert status["Uid"].split()[0] == str(os.getuid()) and int(status["CapEff"], 16)
    assert jail_calls.dumpable() == 1
    ours = Path("/proc/self/ns/mnt").readlink()
    assert all(task.joinpath("ns/mnt").readlink() == ours for task in Path("/proc/self/task").iterdir())
    assert Path("/etc/passwd").exists()


def test_a_server_without_rights_says_what_is_missing(root_only: None, tmp_path: Path) -> None:
    def without() -> tuple[Jailer, str]:
        jail_calls.become(None)  # this thread
        with pytest.raises(VmmError) as refused:
            Jailer(JailSettings(mode="on", node=NODE), tmp_path, tmp_path)
        return Jailer(JailSettings(mode="auto", node=NODE), tmp_path, tmp_path), str(refused.value)

    made, refused = process.apart(without)
    assert not made.isolates
    assert "no isolation: the server lacks CAP_MKNOD, CAP_SYS_ADMIN, CAP_SYS_CHROOT" in made.gaps
    assert made.gaps[0] in refused and "jail = auto" in refused
    made.close()


def test_users_are_never_shared(tmp_path: Path) -> None:
    owners = [tmp_path / str(number) for number in range(4)]
    for owner in owners:
        owner.mkdir()
    one, other = Users(70_000, 4, tmp_path / "users"), Users(70_000, 4, tmp_path / "users")
    taken = [one.claim(owners[0]), other.claim(owners[1]), one.claim(owners[2]), other.claim(owners[3])]
    assert sorted(taken) == [70_000, 70_001, 70_002, 70_003]
    with pytest.raises(VmmError, match="taken"):
        one.claim(tmp_path)
    one.release(tmp_path / "nobody")
    other.release(owners[2])
    assert one.claim(tmp_path) == taken[2]
    owners[1].rmdir()  # its VM is gone with all it had
    assert other.claim(tmp_path) == taken[1]
    owners[0].rmdir()
    one.forget_dead()
    assert sorted(link.name for link in (tmp_path / "users").iterdir()) == sorted(map(str, taken[1:]))
