"""The keeper: makes the mount, holds its descriptors, and forks a server whenever the last one ended. It does little,
so that nothing can end it; when it is killed all the same, the server starts another one.

The server is a fork and not a new program: it is ready within milliseconds, and it is so while the files of the
program are being replaced. The keeper has one thread, so forking is safe.
"""

import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from aenv.errors import ConflictError
from aenv.storage.layerd import mount, shared
from aenv.storage.layerd.config import Config
from aenv.storage.layerd.handoff import Handoff

log = structlog.get_logger()

Serve = Callable[[Handoff], None]  # ends its process

UNMOUNTED = 0  # exit status of a server whose mount is gone
QUICK = 1.0  # seconds: a server that lived shorter is started again only after a wait
LONGEST_WAIT = 2.0


def start(config: Config, module: str, serve: Serve) -> None:
    """Mount, and serve until it is unmounted. Raises ConflictError when one runs already, MountError."""
    config.runtime.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(config.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConflictError(f"A layer server runs in {config.runtime} already.", "Stop it, or use it.") from None
    _prepare_process()
    config.exports.unlink(missing_ok=True)  # of a mount that is dead
    device, session = mount.make(config.mount)
    config.socket.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(config.socket))
    config.socket.chmod(0o600)
    listener.listen(128)
    alive_read, alive_write = os.pipe()
    handoff = Handoff(
        config, session, device, shared.create(), listener.detach(), lock, alive_read, alive_write, module
    )  # fmt: skip
    Keeper(handoff, serve).run(None)


def adopt(handoff: Handoff, server: int, serve: Serve) -> None:
    """Go on for a keeper that died. ``server`` is a pidfd of the server."""
    _prepare_process()
    log.warning("the keeper had died; another one goes on")
    Keeper(handoff, serve).run(server)


def _prepare_process() -> None:
    call_this_process("layerd-keeper")
    gc.freeze()  # what servers share with the keeper stays shared
    # Layers and cached blocks keep descriptors open.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.suppress(OSError):  # not as root, or in a container that forbids it
        Path("/proc/self/oom_score_adj").write_text("-900")


def call_this_process(name: str) -> None:
    """For ps and top: at most 15 bytes."""
    Path("/proc/self/comm").write_text(name)


class Keeper:
    def __init__(self, handoff: Handoff, serve: Serve) -> None:
        self._handoff = handoff
        self._serve = serve
        self._config = handoff.config

    def run(self, server: int | None) -> None:
        """Until the file system is unmounted. ``server``: a pidfd of one that runs."""
        signal.signal(signal.SIGTERM, self._terminate)
        signal.signal(signal.SIGINT, self._terminate)
        wait = 0.0
        if server is not None:
            self._await(server)
        while mount.connected(self._handoff.device):
            began = time.monotonic()
            _, ended = os.waitpid(self._fork(), 0)
            status = os.waitstatus_to_exitcode(ended)
            if status == UNMOUNTED:
                break
            log.error("the layer server ended; another one is started", status=status)
            wait = 0.0 if time.monotonic() - began > QUICK else min(wait * 2 + 0.01, LONGEST_WAIT)
            time.sleep(wait)
        self._config.socket.unlink(missing_ok=True)
        self._config.exports.unlink(missing_ok=True)
        log.info("the layer server is stopped")

    def _fork(self) -> int:
        pid = os.fork()
        if pid:
            return pid
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self._handoff.alive_write)
            call_this_process("layerd-server")
            self._serve(replace(self._handoff, alive_write=-1))
        except BaseException:
            log.exception("the layer server failed")
        finally:
            os._exit(1)

    def _await(self, server: int) -> None:
        poll = select.poll()
        poll.register(server, select.POLLIN)
        poll.poll()
        os.close(server)

    def _terminate(self, *_: object) -> None:
        # Unmounting ends the server, and that ends this. Sandboxes are not pulled from under their owners: what they
        # have open in mount namespaces of their own does not keep this mount.
        if shared.any_open(self._handoff.shared) or not mount.remove(self._config.mount):
            log.warning("files are open; the layer server goes on", mount=str(self._config.mount))
