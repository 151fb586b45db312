"""The server: takes requests from /dev/fuse and answers them. It may be killed at any moment (see ``shared``)."""

import errno
import os
import threading
from collections import deque

import structlog

from aenv.storage.layerd import protocol
from aenv.storage.layerd.filesystem import Filesystem, Payload
from aenv.storage.layerd.protocol import FuseError, Session
from aenv.storage.layerd.shared import SLOT, Shared

log = structlog.get_logger()

MIN_THREADS, MAX_THREADS = 4, 512
# Requests of one file under way at once: a file whose source hangs keeps no more threads than these.
PER_FILE = 32


class Worker:
    """Threads that read requests, one more whenever all are busy. ``ended`` is set when the mount is gone."""

    def __init__(self, device: int, session: Session, shared: Shared, filesystem: Filesystem) -> None:
        self._device = device
        self._session = session
        self._shared = shared
        self._filesystem = filesystem
        self._lock = threading.Lock()
        self._threads = 0
        self._idle = 0
        self._busy: dict[int, int] = {}  # requests under way per inode
        self._parked: dict[int, deque[int]] = {}  # slots of further ones
        self.ended = threading.Event()

    def start(self) -> None:
        """Answer what a former server left, then serve."""
        left = list(self._shared.unanswered())
        if left:
            log.info("requests of the former server are answered", requests=len(left))
        for slot in left:
            threading.Thread(target=self._serve, args=(slot,), daemon=True).start()
        if not left and self._session.resends:
            # None can be missing; if one were, the kernel would send it now. While others are under way they would
            # come again, too.
            self._notify(protocol.resend())
        for _ in range(MIN_THREADS):
            self._spawn()

    def forget_pages(self, inode: int) -> None:
        """Let the kernel drop what it caches of a file that nobody has open."""
        self._notify(protocol.forget_pages(inode))

    def _notify(self, message: bytes) -> None:
        try:
            os.write(self._device, message)
        except OSError as error:  # ENOENT: the kernel knows no such file
            if error.errno not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):
                raise

    def _spawn(self) -> None:
        with self._lock:
            self._threads += 1
            self._idle += 1
        threading.Thread(target=self._run, daemon=True, name="fuse").start()

    def _run(self) -> None:
        rest = bytearray(protocol.MIN_READ_BUFFER - SLOT)  # of requests that are longer than a slot: not of interest
        shared, device = self._shared, self._device
        while True:
            slot = shared.take()
            request = shared.request(slot)
            try:
                os.readv(device, (request, rest))
            except OSError as error:
                shared.done(slot)
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # the request was taken back
                    continue
                if error.errno != errno.ENODEV:
                    log.error("the FUSE device cannot be read", error=str(error))
                self.ended.set()
                return
            with self._lock:
                self._idle -= 1
                alone = not self._idle and self._threads < MAX_THREADS
            if alone:
                self._spawn()
            self._serve(slot)
            with self._lock:
                if self._idle >= MIN_THREADS:
                    self._threads -= 1
                    return
                self._idle += 1

    def _serve(self, slot: int) -> None:
        """Answer a request, and then those of the same file that waited for a turn."""
        turn: int | None = slot
        while turn is not None:
            request = self._shared.request(turn)
            _, opcode, unique, node, *_ = protocol.IN_HEADER.unpack_from(request)
            if opcode != protocol.Op.READ:
                self._answer(turn, opcode, unique, node, request)
                return
            if not self._begin(node, turn):
                return
            try:
                self._answer(turn, opcode, unique, node, request)
            finally:
                turn = self._end(node)

    def _begin(self, node: int, slot: int) -> bool:
        """Whether a read may go on now; else it waits in its slot for one of the same file to end."""
        with self._lock:
            busy = self._busy.get(node, 0)
            if busy >= PER_FILE:
                self._parked.setdefault(node, deque()).append(slot)
                return False
            self._busy[node] = busy + 1
            return True

    def _end(self, node: int) -> int | None:
        """A read has ended; the slot of one that waited for that."""
        with self._lock:
            if self._busy[node] == 1:
                del self._busy[node]
            else:
                self._busy[node] -= 1
            waiting = self._parked.get(node)
            if waiting is None:
                return None
            slot = waiting.popleft()
            if not waiting:
                del self._parked[node]
            return slot

    def _answer(self, slot: int, opcode: int, unique: int, node: int, request: memoryview) -> None:
        try:
            if opcode in protocol.NO_REPLY:
                return
            try:
                payload = self._filesystem.answer(opcode, node, unique, request[protocol.IN_HEADER.size :])
            except FuseError as error:
                self._write((protocol.error_reply(unique, error.number),))
                return
            except Exception:
                log.exception("a request failed", opcode=opcode, inode=node)
                self._write((protocol.error_reply(unique, errno.EIO),))
                return
            self._write((protocol.reply_header(unique, len(payload)), payload))
        finally:
            self._shared.done(slot)

    def _write(self, parts: tuple[Payload, ...]) -> None:
        try:
            os.writev(self._device, parts)
        except OSError as error:
            # ENOENT: answered already, by a server that was killed before it could note that, or taken back.
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                log.error("an answer was refused by the kernel", error=str(error))
