"""The pool of slots: hands out ready ones, refills itself, cleans up after a crash."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aenv.network import addressing, namespace
from aenv.network.errors import NetworkConflict, NetworkExhausted, NetworkUnavailable, SlotLost
from aenv.network.host import HostNetwork
from aenv.network.policy import DEFAULT_POLICY, EgressPolicy
from aenv.network.settings import NetworkSettings
from aenv.network.slot import NetworkSlot

log = logging.getLogger(__name__)
T = TypeVar("T")


class _Worker:
    """One thread with one HostNetwork: namespaces belong to threads, so no other thread enters them."""

    def __init__(self, settings: NetworkSettings, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"{settings.prefix}-net-{name}")
        self._settings = settings
        self._host: HostNetwork | None = None

    def submit(self, work: Callable[[HostNetwork], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._executor, self._run, work)

    def _run(self, work: Callable[[HostNetwork], T]) -> T:
        if self._host is None:
            self._host = HostNetwork(self._settings)
        with self._host.job():
            return work(self._host)

    async def close(self) -> None:
        if self._host is not None:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._host.close)
        self._executor.shutdown(wait=False)


class SlotPool:
    """Slots of one node. Used from one event loop; the slow work runs in two threads of its own."""

    def __init__(self, settings: NetworkSettings, warm: int) -> None:
        """`warm`: how many unused slots to keep ready (bounded by the size of the address pool)."""
        self._settings = settings
        self._capacity = addressing.capacity(settings)
        self._warm = min(warm, self._capacity)
        self._ready: deque[NetworkSlot] = deque()
        self._active: dict[int, NetworkSlot] = {}
        self._reserved: set[int] = set()  # every index that exists, is being made or is being removed
        self._doomed: deque[int] = deque()  # waiting for the remover
        self._stuck: set[int] = set()  # could not be removed
        self._cursor = 0
        self._policies: dict[int, EgressPolicy] = {}  # of slots whose current policy is known
        self._policy_locks: dict[int, asyncio.Lock] = {}
        # Removing a link waits for the kernel's RCU grace periods (tens of ms): not in the way of creations.
        self._builder = _Worker(settings, "build")
        self._remover = _Worker(settings, "remove")
        self._refill: asyncio.Task[None] | None = None
        self._lock_fd: int | None = None
        self._closed = False

    async def start(self, in_use: Collection[int] = ()) -> None:
        """Install the root rules, keep the slots in use, remove all others of this prefix, begin to fill up.

        `in_use`: indexes of slots whose virtual machine outlived the server; `adopt` returns them.
        Raises NetworkConflict (prefix or addresses taken), NetworkUnavailable (privilege, library, kernel).
        """
        self._take_lock()
        try:
            await self._builder.submit(HostNetwork.check_pool)
            await self._builder.submit(HostNetwork.install_root_table)
            existing = await self._builder.submit(HostNetwork.existing)
            for index in sorted(existing & set(in_use)):
                self._reserved.add(index)
                self._active[index] = addressing.slot_at(self._settings, index)
            stale = sorted(existing - set(in_use))
            if stale:
                log.info("removing %d network slots of an earlier run", len(stale))
            self._reserved.update(stale)
            await asyncio.gather(*(self._remove(index) for index in stale))
        except BaseException:
            self._release_lock()
            raise
        if lost := sorted(set(in_use) - existing):
            log.warning("network slots %s should be in use and are gone", lost)
        self._refill_soon()

    async def acquire(self) -> NetworkSlot:
        """A slot with the default policy; at once from the warm pool, else made now (about 10 ms).

        Raises NetworkExhausted, or what creating a slot raises.
        """
        self._check_open()
        try:
            slot = self._ready.popleft() if self._ready else await self._create()
        except NetworkExhausted:
            if self._refill is None or self._refill.done():
                raise
            await asyncio.wait({self._refill})  # the last free addresses are becoming warm slots
            if not self._ready:
                raise
            slot = self._ready.popleft()
        self._active[slot.index] = slot
        self._policies[slot.index] = DEFAULT_POLICY
        self._refill_soon()
        return slot

    async def release(self, slot: NetworkSlot) -> None:
        """Remove the slot. Harmless for one that is half gone, or was released before."""
        if self._active.pop(slot.index, None) is None:
            log.debug("network slot %d is not in use; nothing to release", slot.index)
            return
        self._policies.pop(slot.index, None)
        self._policy_locks.pop(slot.index, None)
        await asyncio.shield(self._remove(slot.index))

    async def apply_policy(self, slot: NetworkSlot, policy: EgressPolicy) -> None:
        """Make the policy hold for the slot, for connections already open as well. Free when it holds already.

        Raises SlotLost when the slot is not in use or its namespace is gone.
        """
        if slot.index not in self._active:
            raise SlotLost(f"network slot {slot.index} is not in use")
        async with self._policy_locks.setdefault(slot.index, asyncio.Lock()):
            if self._policies.get(slot.index) == policy:
                return
            self._policies.pop(slot.index, None)  # unknown should the change fail or be cancelled
            try:
                await self._builder.submit(lambda host: host.apply_policy(slot, policy))
            except FileNotFoundError as error:
                raise SlotLost(f"network slot {slot.index} has no namespace any more") from error
            if slot.index in self._active:
                self._policies[slot.index] = policy

    def adopt(self, index: int) -> NetworkSlot:
        """The slot of a virtual machine that outlived the server; its index was in `start(in_use)`.

        The rules in the namespace are as they were; `apply_policy` sets them anew. Raises SlotLost.
        """
        slot = self._active.get(index)
        if slot is None or not _is_whole(slot):
            raise SlotLost(f"network slot {index} did not survive; its sandbox can only be restored or ended")
        return slot

    async def close(self, *, remove_root_table: bool = False) -> None:
        """Remove the unused slots. Slots in use stay for the next start, and the root table as long as any do."""
        if self._closed:
            return
        self._closed = True
        if self._refill is not None:
            self._refill.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._refill
        # A creation that lost its waiter still runs in the builder: it ends before this job, and in `_ready`.
        await self._builder.submit(lambda host: None)
        await asyncio.sleep(0)
        unused = [slot.index for slot in self._ready]
        self._ready.clear()
        await asyncio.gather(*(self._remove(index) for index in unused))
        if remove_root_table and self._active:
            log.warning("%d network slots are in use: the root table that protects the host stays", len(self._active))
        elif remove_root_table:
            await self._builder.submit(HostNetwork.remove_root_table)
        await self._builder.close()
        await self._remover.close()
        self._release_lock()

    # Internals

    async def _create(self) -> NetworkSlot:
        index = self._reserve()
        future = self._builder.submit(lambda host: host.create(index))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: self._keep_orphan(done, index))
            raise
        except BaseException:
            self._reserved.discard(index)
            raise

    def _keep_orphan(self, done: asyncio.Future[NetworkSlot], index: int) -> None:
        """A slot nobody waits for any more is as good as a warm one."""
        if done.cancelled() or done.exception() is not None:
            self._reserved.discard(index)
        else:
            self._ready.append(done.result())

    def _reserve(self) -> int:
        """The next free index, in rotation: a name and its addresses rest as long as possible before reuse."""
        if len(self._reserved) >= self._capacity:
            raise NetworkExhausted(
                f"all {self._capacity} network slots of {self._settings.pool_cidr} are in use: "
                "end sandboxes, or give the node a larger slot_cidr"
            )
        while self._cursor in self._reserved:
            self._cursor = (self._cursor + 1) % self._capacity
        index = self._cursor
        self._cursor = (self._cursor + 1) % self._capacity
        self._reserved.add(index)
        return index

    async def _remove(self, index: int) -> None:
        """Never raises: what cannot be removed keeps its index reserved, and the next start tries again."""
        self._doomed.append(index)
        await self._remover.submit(self._sweep)
        if index not in self._stuck:
            self._reserved.discard(index)

    def _sweep(self, host: HostNetwork) -> None:
        """In the remover's thread: remove all that waits for it by now. Jobs already queued behind it for slots
        of the same batch find nothing left to do."""
        batch = []
        while self._doomed:
            batch.append(self._doomed.popleft())
        failures: dict[int, Exception]
        try:
            failures = host.destroy(batch)
        except Exception as error:
            failures = dict.fromkeys(batch, error)
        for index, failure in failures.items():
            self._stuck.add(index)
            log.error("network slot %d could not be removed (%s); the next start tries again", index, failure)

    def _refill_soon(self) -> None:
        if self._refill is None or self._refill.done():
            self._refill = asyncio.create_task(self._fill(), name="network-slot-refill")

    async def _fill(self) -> None:
        """One slot at a time, so that an `acquire` that finds none ready waits for one creation at most."""
        while len(self._ready) < self._warm and not self._closed:
            try:
                self._ready.append(await self._create())
            except NetworkExhausted:
                return
            except Exception:
                log.exception("cannot make a network slot; the next acquire tries again")
                return

    def _check_open(self) -> None:
        if self._lock_fd is None or self._closed:
            raise NetworkUnavailable("the network slot pool is not running: start() it first")

    def _take_lock(self) -> None:
        """Two nodes with one prefix would remove each other's slots; the lock ends with the process."""
        directory = self._settings.runtime_dir
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"network-{self._settings.prefix}.lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise NetworkConflict(
                f"another node uses the network prefix {self._settings.prefix!r}: stop it, or set slot_prefix"
            ) from error
        self._lock_fd = fd

    def _release_lock(self) -> None:
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None


def _is_whole(slot: NetworkSlot) -> bool:
    return namespace.is_namespace(slot.netns) and namespace.interface_index(slot.netns) is not None
