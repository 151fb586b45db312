"""The server process: puts its parts together, answers the control socket, and watches its keeper."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict, replace
from typing import Any

import structlog

from aenv.errors import AenvError, ConflictError, InvalidRequestError
from aenv.storage.blockcache import BlockCache
from aenv.storage.fetching import FetchPolicy
from aenv.storage.layerd import control, keeper, mount
from aenv.storage.layerd.config import VERSION
from aenv.storage.layerd.exports import Export, Exports, parse
from aenv.storage.layerd.filesystem import Filesystem
from aenv.storage.layerd.handoff import Handoff
from aenv.storage.layerd.library import Library
from aenv.storage.layerd.opening import Opener, StoredLayers
from aenv.storage.layerd.shared import Shared
from aenv.storage.layerd.worker import Worker

log = structlog.get_logger()

SAVE = 60.0  # seconds between two savings of when cached blocks were used
RELEASE = 3.0  # seconds until the kernel has told of what was closed; a busy host needs more than half of one
# The interpreter's default of 5 ms is how long one thread that computes may keep a fault waiting.
SWITCH = 0.0005


class Service:
    """Exports and figures, as clients see them. Thread-safe."""

    def __init__(self, handoff: Handoff, opener: Opener | None = None, policy: FetchPolicy | None = None) -> None:
        self._handoff = handoff
        config = handoff.config
        self._shared = Shared(handoff.shared)
        self._exports = Exports(config.exports)
        self.cache = BlockCache(
            config.cache, capacity=config.cache_size, memory=config.memory_size, reserve=config.reserve, policy=policy
        )
        self._library = Library(self.cache, opener or StoredLayers())
        self._filesystem = Filesystem(
            self._exports, self._library, self._shared, mount.ReadAhead(config.mount), self._gone
        )
        self._worker = Worker(handoff.device, handoff.session, self._shared, self._filesystem)

    def start(self) -> None:
        self._worker.start()
        for export in self._exports.all():
            if export.removed and not self._shared.is_open(export.inode):
                self._gone(export)

    def wait(self) -> None:
        """Until the mount is gone; saves from time to time what the cache learnt."""
        while not self._worker.ended.wait(SAVE):
            self.cache.save()
        self.cache.save()

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request of a client. Raises AenvError."""
        calls = {
            "ping": self._ping, "export": self._export, "unexport": self._unexport, "list": self._list,
            "stats": self._stats, "stop": self._stop,
        }  # fmt: skip
        if (call := calls.get(str(request.get("op")))) is None:
            raise InvalidRequestError(f"The layer server does not know {request.get('op')!r}.")
        return call(request)

    def _ping(self, _: dict[str, Any]) -> dict[str, Any]:
        opened = self._shared.open_inodes()
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "config": self._handoff.config.dump(),
            "open": sum(opened.values()),
            "exports": len(self._exports.all()),
        }

    def _export(self, request: dict[str, Any]) -> dict[str, Any]:
        name, size, layers, repository, sequential = parse(request)
        export, new = self._exports.add(name, size, layers, repository, sequential)
        try:
            self._library.open(export)
        except BaseException:
            if new and not self._shared.is_open(export.inode):
                self._exports.drop(export.inode)
            raise
        return {"path": str(self._handoff.config.mount / name), "new": new}

    def _unexport(self, request: dict[str, Any]) -> dict[str, Any]:
        export = self._exports.hide(str(request.get("name")))
        if self._shared.is_open(export.inode):
            return {"deferred": True}
        self._gone(export)
        return {"deferred": False}

    def _gone(self, export: Export) -> None:
        self._exports.drop(export.inode)
        self._library.drop(export)
        self._filesystem.forget(export.inode)
        self._worker.forget_pages(export.inode)

    def _list(self, _: dict[str, Any]) -> dict[str, Any]:
        opened = self._shared.open_inodes()
        return {
            "exports": [
                {
                    "name": e.name,
                    "virtual_size": e.virtual_size,
                    "layers": len(e.layers),
                    "open": opened.get(e.inode, 0),
                    "removed": e.removed,
                }
                for e in self._exports.all()
            ]
        }

    def _stats(self, _: dict[str, Any]) -> dict[str, Any]:
        exports = {}
        for export in self._exports.all():
            account = self._filesystem.account(export)
            exports[export.name] = {"touched": self._filesystem.touched[export.inode].bytes(), **account.values()}
        total = {"touched": sum(e["touched"] for e in exports.values()), **self.cache.total.values()}
        for key in ("asked", "errors"):
            total[key] = sum(e[key] for e in exports.values())
        return {"cache": asdict(self.cache.stats()), "total": total, "exports": exports}

    def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        force = bool(request.get("force"))
        # What a VMM has open in a mount namespace of its own does not keep this mount.
        if (not force and self._stays_open()) or not mount.remove(self._handoff.config.mount, force=force):
            raise ConflictError("Files of the layer server are open.", "End the sandboxes that use them first.")
        return {}

    def _stays_open(self) -> bool:
        """Whether files are open. Of one that was closed the kernel tells a moment later."""
        if mount.busy(self._handoff.config.mount):
            return True
        deadline = time.monotonic() + RELEASE
        while self._shared.open_inodes():
            if time.monotonic() > deadline:
                return True
            time.sleep(0.01)
        return False


def serve(handoff: Handoff, opener: Opener | None = None, policy: FetchPolicy | None = None) -> None:
    """Be the server until the mount is gone, then exit: threads may still wait for sources."""
    sys.setswitchinterval(SWITCH)
    threading.stack_size(512 << 10)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: meant for the keeper
    try:
        service = Service(handoff, opener, policy)
        service.start()
    except AenvError as error:
        log.error("the layer server cannot start", error=str(error))
        os._exit(1)
    listener = socket.socket(fileno=handoff.listener)
    threading.Thread(target=control.listen, args=(listener, service.call), daemon=True, name="control").start()
    threading.Thread(target=_watch_keeper, args=(handoff,), daemon=True, name="keeper").start()
    service.wait()
    os._exit(keeper.UNMOUNTED)


def _watch_keeper(handoff: Handoff) -> None:
    """Start another keeper whenever it dies."""
    alive = handoff.alive_read
    while True:
        with contextlib.suppress(OSError):
            os.read(alive, 1)  # returns at the keeper's death only
        if not mount.connected(handoff.device):
            return
        log.warning("the keeper died; starting another one")
        os.close(alive)
        alive, write = os.pipe()
        me = os.pidfd_open(os.getpid())
        process = replace(handoff, alive_read=alive, alive_write=write).spawn_keeper(me)
        os.close(me)
        os.close(write)
        threading.Thread(target=process.wait, daemon=True).start()
        time.sleep(0.5)  # between two that die at once: perhaps the program is being replaced
