"""Many callers doing anything to the same few sandboxes at once: no deadlock, no wrong error, nothing left behind."""

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from e2b import NotFoundException, Sandbox, SandboxException
from e2b.exceptions import SandboxNotFoundException, ServiceBusyException

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for
from tests.node.test_recovery import assert_nothing_leaked, names, states

SECONDS = 25.0
MOST = 8  # sandboxes at once


class Crowd:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ids: list[str] = []
        self.snapshots: list[str] = []
        self.lock = threading.Lock()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def pick(self, among: list[str]) -> str:
        with self.lock:
            return self.random.choice(among) if among else "none"

    def run(self, until: float) -> None:
        while time.monotonic() < until:
            with self.lock:
                name = self.random.choice(
                    ["pause", "pause_disk", "connect", "connect", "reboot", "fork", "save", "save_disk", "create",
                     "forget", "kill", "network", "use", "use", "timeout"]
                )  # fmt: skip
            try:
                getattr(self, name)(self.pick(self.ids))
                self.done[name] += 1
            except (NotFoundException, SandboxNotFoundException, ServiceBusyException):
                self.done[f"{name} refused"] += 1
            except SandboxException as error:
                status = getattr(error, "status_code", None)
                if status not in (404, 409):
                    self.wrong.append(f"{name}: {status} {error}")
                self.done[f"{name} refused"] += 1
            except Exception as error:
                self.wrong.append(f"{name}: {error!r}")

    def pause(self, sandbox: str) -> None:
        Sandbox.pause(sandbox)

    def pause_disk(self, sandbox: str) -> None:
        Sandbox.pause(sandbox, mode="filesystem", retries=0)

    def connect(self, sandbox: str) -> None:
        Sandbox.connect(sandbox, timeout=300)

    def reboot(self, sandbox: str) -> None:
        Sandbox.connect(sandbox, timeout=300, on_resume="reboot")

    def fork(self, sandbox: str) -> None:
        if len(self.ids) < MOST:
            self.ids += [child.sandbox_id for child in Sandbox.fork(sandbox) if isinstance(child, Sandbox)]

    def save(self, sandbox: str) -> None:
        self.snapshots.append(Sandbox.create_snapshot(sandbox).snapshot_id)

    def save_disk(self, sandbox: str) -> None:
        self.snapshots.append(Sandbox.create_snapshot(sandbox, name="shared", mode="filesystem").snapshot_id)

    def create(self, _: str) -> None:
        if len(self.ids) < MOST:
            self.ids.append(Sandbox.create(self.pick([*self.snapshots, "base"]), timeout=300).sandbox_id)

    def forget(self, _: str) -> None:
        Sandbox.delete_snapshot(self.pick(self.snapshots))

    def kill(self, sandbox: str) -> None:
        if len(self.ids) > 2 and Sandbox.kill(sandbox):
            with self.lock:
                self.ids.remove(sandbox)

    def network(self, sandbox: str) -> None:
        Sandbox.update_network(sandbox, {"deny_out": ["192.0.2.0/24"]})

    def timeout(self, sandbox: str) -> None:
        Sandbox.set_timeout(sandbox, 300)

    def use(self, sandbox: str) -> None:
        """Runs a command in it, as far as somebody else does not take it away meanwhile."""
        try:
            Sandbox.connect(sandbox, timeout=300).commands.run("echo $((6*7)) > used; cat used", timeout=20)
        except SandboxException as error:
            if getattr(error, "status_code", None) not in (None, 404, 409, 502):
                raise


def test_many_hands_at_once(create: Create, node: NodeProcess) -> None:
    kept = {table: set(node.records(table)) for table in TABLES}
    crowd = Crowd(seed=7)
    crowd.ids += [create().sandbox_id for _ in range(3)]
    until = time.monotonic() + SECONDS
    with ThreadPoolExecutor(6) as executor:
        list(executor.map(lambda _: crowd.run(until), range(6)))
    assert crowd.wrong == []
    assert sum(crowd.done.values()) > 20, crowd.done
    wait_for(lambda: set(states(node).values()) <= {"running", "paused"}, "all transitions to end")
    wait_for(lambda: files(node) == recorded(node), "files that no row names to go")
    assert_nothing_leaked(node)
    for sandbox in set(crowd.ids) & set(states(node)):
        assert Sandbox.connect(sandbox).commands.run("echo alive").stdout == "alive\n"
        Sandbox.kill(sandbox)
    for snapshot in node.records("saved_snapshots"):
        assert Sandbox.delete_snapshot(snapshot)
    wait_for(
        lambda: all(set(node.records(table)) == before for table, before in kept.items()), "everything to be freed"
    )
    wait_for(lambda: files(node) == recorded(node), "files that no row names to go")
    assert_nothing_leaked(node)


TABLES = ("snapshots", "layers", "memory")


def files(node: NodeProcess) -> set[str]:
    """Of every snapshot, layer and base; they are removed behind the answer."""
    return {name.split(".")[0] for table in TABLES for name in names(node.home / table)}


def recorded(node: NodeProcess) -> set[str]:
    return {key for table in TABLES for key in node.records(table) if not key.startswith("v-")}  # v-: of images
