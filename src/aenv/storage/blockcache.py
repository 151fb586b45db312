"""A bounded local cache of blocks of layers that are far away: what the layer server reads through.

It caches *stored* bytes, by layer digest, so that compressed layers take their compressed size and all snapshots that
share a layer share its blocks. A read looks in the server's own memory (small), on the local disk (``cachefile``),
and then asks the source: one fetch per block, however many readers wait for it, neighbouring blocks in one range
read, large ones in several at once. Reads from front to back are fetched ahead (``readahead``).

Eviction is by least recent use, from the high watermark down to the low one. Blocks that were used again, some time
after they came, count as younger by ``PROTECTED`` of the cache: one pass over something large does not push out what
every start needs.

No failure of the local disk is one of the reader: without room, or read-only, blocks are served and not kept.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import structlog
from numpy.typing import NDArray

from aenv.errors import SourceError
from aenv.storage import cachefile
from aenv.storage.cacheaccount import Account, current
from aenv.storage.cachefile import CacheFile
from aenv.storage.fetching import FetchPolicy, fetch
from aenv.storage.readahead import ReadAhead
from aenv.storage.source import Source, check_range

log = structlog.get_logger()

BLOCK = 16384  # bytes; chosen in docs/internals/layer-server.md
LARGEST_FETCH = 1 << 20  # bytes of one range read; longer ones are split, and go on side by side
PER_SOURCE = 16  # fetches of one layer at once
FETCHERS = 512  # fetches at once; a hanging source keeps at most PER_SOURCE of them per layer
HIGH, LOW = 0.95, 0.85  # of the capacity
PROTECTED = 0.5
MAX_TICK = (1 << 32) - 1  # beyond it (256 TiB of blocks) all are equally young
AGAIN = 64  # blocks that must have come since a block did before a second use counts as one
DISK_PAUSE = 5.0  # seconds without writing to the cache after it failed


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Bytes and blocks of the cache as a whole."""

    capacity: int
    used: int
    memory: int
    evictions: int  # blocks
    layers: int
    writing: bool  # False: blocks are not kept now, because the disk is full or cannot be written


class BlockCache:
    """Thread-safe. ``folder`` of None, or one that cannot be written: memory only."""

    def __init__(
        self,
        folder: Path | None,
        *,
        capacity: int,
        memory: int,
        reserve: int = 0,
        block: int = BLOCK,
        policy: FetchPolicy | None = None,
        free_space: Callable[[Path], int] | None = None,
    ) -> None:
        """``capacity``, ``memory``, ``reserve`` (kept free on the disk) are bytes; ``free_space`` measures a disk."""
        self.block = block
        self.policy = policy or FetchPolicy()
        self.total = Account()
        self._folder = folder
        self._capacity = capacity // block  # blocks
        self._reserve = reserve
        self._free_space = free_space or _free_space
        self._lock = threading.Lock()
        self._files: dict[str, CacheFile] = {}
        self._open: dict[str, CachedSource] = {}
        self._used = 0  # blocks on disk
        self._tick = 1  # counts blocks that came
        self._bonus = int(self._capacity * PROTECTED)
        self._evictions = 0
        self._evicting = threading.Lock()
        self._disk_again = 0.0
        self._room_checked = 0.0
        self.memory = _Memory(memory)
        self.pool = ThreadPoolExecutor(FETCHERS, thread_name_prefix="fetch")
        if folder is not None and self._capacity:
            self._load(folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, digest: str, source: Source) -> "CachedSource":
        """The layer, read through the cache. Opening it again gives the same object: ``close`` it as often."""
        with self._lock:
            cached = self._open.get(digest)
            if cached is None:
                cached = self._open[digest] = CachedSource(self, digest, source, self._file(digest, source.size))
            cached.users += 1
            return cached

    def release(self, source: "CachedSource") -> None:
        """Called by ``CachedSource.close``."""
        with self._lock:
            source.users -= 1
            if not source.users:
                self._open.pop(source.digest, None)

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                capacity=self._capacity * self.block,
                used=self._used * self.block,
                memory=self.memory.size,
                evictions=self._evictions,
                layers=len(self._files),
                writing=self._folder is not None and self._capacity > 0 and time.monotonic() >= self._disk_again,
            )

    def can_hold(self, size: int) -> bool:
        """Whether bytes that are read ahead would still be here when they are asked for."""
        return 4 * size <= self.memory.capacity or (self._folder is not None and time.monotonic() >= self._disk_again)

    def save(self) -> None:
        """Write down when blocks were used, so that the next server evicts the right ones."""
        for file in list(self._files.values()):
            try:
                file.save()
            except OSError as error:
                self._disk_failed(error)

    def close(self) -> None:
        """Wait for fetches under way, then save. Sources are not closed."""
        self.pool.shutdown(wait=True, cancel_futures=True)
        for file in self._files.values():
            file.close()
        self._files.clear()

    # The disk

    def _load(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for digest, size, block in cachefile.known(folder):
                if block == self.block:
                    self._files[digest] = CacheFile(folder, digest, size, block)
                else:
                    for path in cachefile.paths(folder, digest):
                        path.unlink(missing_ok=True)
        except OSError as error:
            self._disk_failed(error)
        self._used = sum(file.cached() for file in self._files.values())
        newest = max((int(f.entries["used"].max()) for f in self._files.values() if f.blocks), default=0)
        self._tick = min(newest + 1, MAX_TICK - self._bonus)
        self._evict_if_needed(0)  # the capacity may have been larger

    def _file(self, digest: str, size: int) -> CacheFile | None:
        if self._folder is None or not self._capacity:
            return None
        file = self._files.get(digest)
        if file is None or file.size != size:
            try:
                file = self._files[digest] = CacheFile(self._folder, digest, size, self.block)
            except OSError as error:
                self._disk_failed(error)
                return None
        return file

    def keep(self, file: CacheFile, first: int, data: bytes) -> None:
        """Put fetched blocks on the disk, if it has room. Never raises OSError."""
        count = -(-len(data) // self.block)
        with self._lock:
            room = self._used + count <= self._capacity
            if room:
                self._used += count  # so that others, who write now, too, see it
            self._tick = tick = min(self._tick + count, MAX_TICK - self._bonus)
        if not room:
            self._evict_if_needed(count)
            return
        new = 0
        try:
            if time.monotonic() >= self._disk_again and self._disk_has_room():
                new = file.write(first, data, tick)
        except OSError as error:
            self._disk_failed(error)
        finally:
            with self._lock:
                self._used += new - count
        self._evict_if_needed(0)

    def used_again(self, file: CacheFile, first: int, count: int) -> None:
        """Blocks were read from the disk: if they have been here for a while, they are younger than new ones."""
        tick, used = self._tick, file.entries["used"]
        if count == 1:
            if used[first] < tick - AGAIN:
                used[first] = tick + self._bonus
        else:
            part = used[first : first + count]
            part[part < max(tick - AGAIN, 0)] = tick + self._bonus

    def lost(self, file: CacheFile, numbers: list[int]) -> None:
        """Blocks are not what they should be, or were evicted while they were read."""
        try:
            gone = file.evict(np.array(numbers, dtype=np.intp))
        except OSError as error:
            self._disk_failed(error)
            return
        with self._lock:
            self._used -= gone
        if gone:
            log.warning("cached blocks are damaged, fetched anew", layer=file.digest, blocks=numbers[:8])
            self.count(damaged=gone)

    def count(self, **values: int) -> None:
        self.total.add(**values)
        if (account := current()) is not None:
            account.add(**values)

    def _disk_has_room(self) -> bool:
        now = time.monotonic()
        if now < self._room_checked + 1.0 or self._folder is None:
            return True
        self._room_checked = now
        try:
            free = self._free_space(self._folder)
        except OSError:
            free = 0
        if free >= self._reserve:
            return True
        # Somebody else needs the disk: give back an eighth, and keep nothing for now.
        self._disk_again = now + DISK_PAUSE
        self._evict(min(self._used * 7 // 8, int(self._capacity * LOW)))
        return False

    def _disk_failed(self, error: OSError) -> None:
        if time.monotonic() >= self._disk_again:
            log.warning("the block cache cannot be written; blocks are served and not kept", error=str(error))
        self._disk_again = time.monotonic() + DISK_PAUSE

    def _evict_if_needed(self, more: int) -> None:
        if self._used + more > self._capacity * HIGH:
            self._evict(int(self._capacity * LOW))

    def _evict(self, target: int) -> None:
        """Down to ``target`` blocks. One thread does; the others go on."""
        if not self._evicting.acquire(blocking=False):
            return
        try:
            with self._lock:
                files = list(self._files.items())
                excess = self._used - target
            for digest, numbers in choose([(digest, file.entries) for digest, file in files], excess).items():
                file = self._files[digest]
                gone = file.evict(numbers)
                with self._lock:
                    self._used -= gone
                    self._evictions += gone
                    if not file.cached() and digest not in self._open:
                        del self._files[digest]
                        file.remove()
                        file.close(save=False)
        except OSError as error:
            self._disk_failed(error)
        finally:
            self._evicting.release()


def choose(layers: list[tuple[str, NDArray[np.void]]], count: int) -> dict[str, NDArray[np.intp]]:
    """Of each layer the numbers of the blocks to evict: the ``count`` least recently used of all. Pure."""
    if not layers or count <= 0:
        return {}
    numbers = [np.flatnonzero(entries["crc"]) for _, entries in layers]
    used = np.concatenate([entries["used"][n] for n, (_, entries) in zip(numbers, layers, strict=True)])
    if not len(used):
        return {}
    owner = np.repeat(np.arange(len(layers)), [len(n) for n in numbers])
    number = np.concatenate(numbers)
    oldest = np.argpartition(used, count - 1)[:count] if count < len(used) else np.arange(len(used))
    chosen = {}
    for i in np.unique(owner[oldest]).tolist():
        chosen[layers[i][0]] = np.sort(number[oldest[owner[oldest] == i]])
    return chosen


class CachedSource:
    """A Source: one layer's stored bytes, through the cache. Every reader of the layer shares it."""

    def __init__(self, cache: BlockCache, digest: str, source: Source, file: CacheFile | None) -> None:
        self.digest = digest
        self.users = 0
        self._cache = cache
        self._source = source
        self._size = source.size
        self._block = cache.block
        self._blocks = -(-self._size // self._block)
        self._file = file
        self._lock = threading.Lock()
        self._flights: dict[int, Flight] = {}
        self._limit = threading.BoundedSemaphore(PER_SOURCE)
        self._ahead_lock = threading.Lock()
        self._ahead = ReadAhead()
        self._crc = file.crc if file is not None else np.zeros(self._blocks, dtype=np.uint32)

    @property
    def size(self) -> int:
        return self._size

    def close(self) -> None:
        self._cache.release(self)

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, self.digest)
        if not length:
            return b""
        first, last = offset // self._block, (offset + length - 1) // self._block
        begin = offset - first * self._block
        with self._ahead_lock:
            ahead = self._ahead.after(offset, offset + length)
        if (data := self._from_disk(first, last + 1 - first)) is None:
            data = self._assemble(first, last + 1, ahead)
        else:
            self._read_ahead(*ahead)
        return data if len(data) == length else data[begin : begin + length]

    def _from_disk(self, first: int, count: int) -> bytes | None:
        """Blocks that are all on the disk."""
        crc, file = self._crc, self._file
        if file is None or not (crc[first] if count == 1 else crc[first : first + count].all()):
            return None
        try:
            data, bad = file.read(first, count)
        except OSError:
            return None
        if bad:
            self._cache.lost(file, bad)
            return None
        self._cache.count(hits=count)
        self._cache.used_again(file, first, count)
        return data

    def _assemble(self, first: int, end: int, ahead: tuple[int, int]) -> bytes:
        """Blocks of which some are not on the disk."""
        deadline = time.monotonic() + self._cache.policy.deadline
        parts: dict[int, bytes] = {}
        waits: list[Flight] = []  # one per block
        with self._lock:
            missing = []
            for number in range(first, end):
                if (kept := self._cache.memory.get((self.digest, number))) is not None:
                    parts[number] = kept
                elif number in self._flights:
                    waits.append(self._flights[number])
                elif not self._crc[number]:
                    missing.append(number)
            self._cache.count(misses=len(missing), hits=len(parts) + len(waits))
            waits += self._depart(missing)
        self._read_ahead(*ahead)  # behind what is asked for now
        for number in range(first, end):
            if self._crc[number] and number not in parts and (data := self._from_disk(number, 1)) is not None:
                parts[number] = data
        for flight in dict.fromkeys(waits):
            self._land(flight, deadline)
            for number in range(max(first, flight.first), min(end, flight.end)):
                parts[number] = flight.block(number, self._block)
        again = [number for number in range(first, end) if number not in parts]
        for number in again:  # evicted or found damaged meanwhile
            with self._lock:
                flight = self._flights.get(number) or self._depart([number])[0]
            self._land(flight, deadline)
            parts[number] = flight.block(number, self._block)
        return b"".join([parts[number] for number in range(first, end)])

    def _land(self, flight: "Flight", deadline: float) -> None:
        """Wait for a fetch. One that takes too long is left alone: the next reader begins another."""
        try:
            flight.result.result(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            self._arrive(flight)
            raise SourceError(f"{self.digest} has not answered in time.", "The read may be repeated.") from None

    def _depart(self, numbers: list[int], *, ahead: bool = False) -> list["Flight"]:
        """Start fetching blocks, neighbours together. With the lock held."""
        flights = []
        longest = LARGEST_FETCH // self._block
        at = 0
        while at < len(numbers):
            stop = at + 1
            while stop < len(numbers) and numbers[stop] == numbers[stop - 1] + 1 and stop - at < longest:
                stop += 1
            flight = Flight(numbers[at], numbers[stop - 1] + 1)
            for number in range(flight.first, flight.end):
                self._flights[number] = flight
            flights.append(flight)
            self._cache.pool.submit(self._fly, flight, current(), ahead)
            at = stop
        return flights

    def _fly(self, flight: "Flight", account: Account | None, ahead: bool) -> None:
        start = flight.first * self._block
        length = min(flight.end * self._block, self._size) - start
        policy = self._cache.policy
        try:
            if not self._limit.acquire(timeout=policy.deadline):
                raise SourceError(f"{self.digest} has not answered for {policy.deadline:.0f} seconds.")
            try:
                data = fetch(self._source, start, length, policy)
            finally:
                self._limit.release()
        except BaseException as error:
            self._arrive(flight)
            flight.result.set_exception(error if isinstance(error, SourceError) else SourceError(str(error)))
            return
        for values in (self._cache.total, account):
            if values is not None:
                values.add(fetched=length, ahead=length if ahead else 0)
        try:
            for number in range(flight.first, flight.end):
                at = (number - flight.first) * self._block
                self._cache.memory.put((self.digest, number), data[at : at + self._block])
            flight.result.set_result(data)
            if self._file is not None:
                self._cache.keep(self._file, flight.first, data)
        finally:
            self._arrive(flight)

    def _arrive(self, flight: "Flight") -> None:
        with self._lock:
            for number in range(flight.first, flight.end):
                if self._flights.get(number) is flight:
                    del self._flights[number]

    def _read_ahead(self, start: int, end: int) -> None:
        """Fetch these bytes, nobody waits for it."""
        begin, stop = start // self._block, min(-(-end // self._block), self._blocks)
        if start >= end or begin >= stop or not self._cache.can_hold(end - start):
            return
        with self._lock:
            crc, memory = self._crc, self._cache.memory
            wanted = [
                number
                for number in range(begin, stop)
                if not crc[number] and number not in self._flights and not memory.has((self.digest, number))
            ]
            self._depart(wanted, ahead=True)


class Flight:
    """A fetch under way, of blocks ``first`` … ``end``."""

    __slots__ = ("end", "first", "result")

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.result: Future[bytes] = Future()

    def block(self, number: int, size: int) -> bytes:
        at = (number - self.first) * size
        return self.result.result(0)[at : at + size]


class _Memory:
    """The most recently fetched blocks, at most ``capacity`` bytes of them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self.size = 0

    def get(self, key: tuple[str, int]) -> bytes | None:
        with self._lock:
            if (data := self._blocks.get(key)) is not None:
                self._blocks.move_to_end(key)
            return data

    def has(self, key: tuple[str, int]) -> bool:
        return key in self._blocks

    def put(self, key: tuple[str, int], data: bytes) -> None:
        with self._lock:
            if (old := self._blocks.pop(key, None)) is not None:
                self.size -= len(old)
            self._blocks[key] = data
            self.size += len(data)
            while self.size > self.capacity:
                self.size -= len(self._blocks.popitem(last=False)[1])


def _free_space(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
