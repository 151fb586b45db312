"""Runs programs over one store in every order of their operations that can make a difference.

Stateless exploration: each order is a run from the start. Of orders that differ only in neighbouring operations that
commute (both read, or of different keys) one is run; which, sleep sets decide (Godefroid, "Partial-Order Methods for
the Verification of Concurrent Systems", 1996).
"""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aenv.snapshot.clock import Clock
from tests.snapshot.memory import MemoryStore, Operation

MAX_OPERATIONS = 400  # of one run: more is a loop without end


class Crashed(BaseException):
    """The program was killed: none of its handlers changes anything any more."""


@dataclass
class Actor:
    name: str
    run: Callable[[], None]
    crash_at: int | None = None  # the number of operations after which it is killed
    pending: Operation | None = None
    waits: bool = False  # it sleeps until somebody has written something, or time has passed
    finished: bool = False
    dead: bool = False
    done: int = 0
    error: BaseException | None = None
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None


class World:
    """One run. ``programs`` get a clock; each is a thread that goes on only when it is its turn."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.clock = Clock(now=store.now, sleep=self._sleep)
        self.actors: dict[str, Actor] = {}
        self._back = threading.Semaphore(0)
        self._here = threading.local()

    def add(self, name: str, run: Callable[[], None], crash_at: int | None = None) -> None:
        self.actors[name] = Actor(name, run, crash_at)

    def start(self) -> None:
        self.store.before = self._before
        for actor in self.actors.values():
            actor.thread = threading.Thread(target=self._main, args=(actor,), daemon=True)
            actor.thread.start()
            self._back.acquire()

    def enabled(self) -> list[str]:
        ready = [a.name for a in self.actors.values() if not a.finished and not a.waits]
        if not ready and any(not a.finished for a in self.actors.values()):
            self.store.seconds += 30.0  # nobody else will wake them: time passes
            for actor in self.actors.values():
                actor.waits = False
            return self.enabled()
        return ready

    def operation(self, name: str) -> Operation:
        pending = self.actors[name].pending
        assert pending is not None
        return pending

    def step(self, name: str) -> None:
        """Let an actor do its pending operation and run to the next one, or its end."""
        actor = self.actors[name]
        if self.operation(name).writes:
            for other in self.actors.values():
                other.waits = False
        actor.turn.release()
        self._back.acquire()

    def end(self) -> None:
        """Kill what still runs, and leave the store to who looks at it."""
        for actor in self.actors.values():
            while not actor.finished:
                actor.dead = True
                actor.turn.release()
                self._back.acquire()
        self.store.before = _free

    def _main(self, actor: Actor) -> None:
        self._here.actor = actor
        try:
            actor.run()
        except Crashed:
            pass
        except BaseException as error:
            actor.error = error
        actor.finished, actor.pending = True, None
        self._back.release()

    def _before(self, operation: Operation) -> None:
        actor: Actor | None = getattr(self._here, "actor", None)
        if actor is None or operation.keys == ("clock",):
            return
        if actor.dead or (actor.crash_at is not None and actor.done >= actor.crash_at):
            actor.dead = True
            raise Crashed
        actor.pending = operation
        self._back.release()
        actor.turn.acquire()
        if actor.dead:
            raise Crashed
        actor.done += 1

    def _sleep(self, _: float) -> None:
        actor: Actor = self._here.actor
        actor.waits = True
        actor.pending = Operation("sleep", (), False)
        self._back.release()
        actor.turn.acquire()
        if actor.dead:
            raise Crashed


def _free(_: Operation) -> None:
    pass


Build = Callable[[], World]
Check = Callable[[World, str], None]


def explore(build: Build, check: Check, limit: int = 20_000) -> int:
    """Run every order, and check each; how many there were. Fails when there are more than ``limit``."""
    runs = 0

    def descend(world: World, prefix: Sequence[str], sleeping: Mapping[str, Operation]) -> None:
        nonlocal runs
        enabled = world.enabled()
        if not enabled:
            runs += 1
            assert runs <= limit, "more orders than expected"
            world.end()
            check(world, " ".join(prefix))
            return
        operations = {name: world.operation(name) for name in enabled}
        sleeping = dict(sleeping)
        awake = [name for name in enabled if name not in sleeping]
        if not awake:  # each order that goes on from here is like one that was run
            world.end()
        for index, name in enumerate(awake):
            if index:
                world = _replay(build, prefix)
            world.step(name)
            mine = operations[name]
            descend(world, [*prefix, name], {who: op for who, op in sleeping.items() if not op.conflicts(mine)})
            sleeping[name] = mine

    descend(_replay(build, []), [], {})
    return runs


def sample(build: Build, check: Check, runs: int, seed: int) -> None:
    """Run that many orders chosen at random, and check each."""
    chance = random.Random(seed)
    for _ in range(runs):
        world = _replay(build, [])
        order: list[str] = []
        while enabled := world.enabled():
            # Long turns and short ones: a race needs both.
            name = order[-1] if order and order[-1] in enabled and chance.random() < 0.6 else chance.choice(enabled)
            order.append(name)
            assert len(order) < MAX_OPERATIONS, "it does not end"
            world.step(name)
        world.end()
        check(world, " ".join(order))


def _replay(build: Build, order: Sequence[str]) -> World:
    assert len(order) < MAX_OPERATIONS, "it does not end"
    world = build()
    world.start()
    for name in order:
        assert name in world.enabled()
        world.step(name)
    return world
