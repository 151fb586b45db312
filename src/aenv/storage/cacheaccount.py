"""What reads cost, per export and in all. Counters of the present server: a restart begins at zero.

A thread that serves an export reads on its account; code below, which sees only layers, charges the account of its
thread.
"""

import threading
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Account:
    """Bytes, except the blocks counted by ``hits``, ``misses`` and ``damaged``, and the errors. Thread-safe."""

    asked: int = 0  # bytes of all reads by the kernel
    fetched: int = 0  # stored bytes that came from sources, reads ahead included
    ahead: int = 0  # of those, read before they were asked for
    hits: int = 0
    misses: int = 0
    damaged: int = 0  # cached blocks whose checksum was wrong; fetched anew
    errors: int = 0  # reads that failed
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(
        self, *, asked: int = 0, fetched: int = 0, ahead: int = 0, hits: int = 0, misses: int = 0, damaged: int = 0,
        errors: int = 0,
    ) -> None:  # fmt: skip
        with self._lock:
            self.asked += asked
            self.fetched += fetched
            self.ahead += ahead
            self.hits += hits
            self.misses += misses
            self.damaged += damaged
            self.errors += errors

    def values(self) -> dict[str, int]:
        with self._lock:
            return {f.name: getattr(self, f.name) for f in fields(self) if not f.name.startswith("_")}


class _Current(threading.local):
    account: Account | None = None


_current = _Current()


def charge(account: Account | None) -> None:
    """From now on, what this thread reads is on ``account``."""
    _current.account = account


def current() -> Account | None:
    return _current.account
