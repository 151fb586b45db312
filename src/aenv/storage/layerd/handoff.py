"""What keeper and server hand to each other when one starts the other: descriptors, and what they are about."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from aenv.storage.layerd.config import Config
from aenv.storage.layerd.protocol import Session

MODULE = "aenv.storage.layerd"


@dataclass(frozen=True, slots=True)
class Handoff:
    """Numbers of descriptors, the same in both processes.

    ``device``: /dev/fuse; ``shared``: see ``shared``; ``listener``: the control socket; ``lock``: held by both, so
    that it is free exactly when the mount is dead; ``alive_read`` and ``alive_write``: a pipe whose writing end the
    keeper alone has, so that the server sees the keeper die.
    """

    config: Config
    session: Session
    device: int
    shared: int
    listener: int
    lock: int
    alive_read: int
    alive_write: int = -1  # the server's is always -1
    module: str = MODULE  # what is run as another keeper

    def descriptors(self) -> tuple[int, ...]:
        fds = (self.device, self.shared, self.listener, self.lock, self.alive_read, self.alive_write)
        return tuple(fd for fd in fds if fd >= 0)

    def dump(self) -> str:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("config", "session")}
        return json.dumps({"config": self.config.dump(), "session": asdict(self.session), **numbers})

    @classmethod
    def load(cls, text: str) -> "Handoff":
        """Take over: the descriptors will not reach further children by accident."""
        value: dict[str, Any] = json.loads(text)
        config, session = Config.load(value.pop("config")), Session(**value.pop("session"))
        handoff = cls(config=config, session=session, **value)
        for fd in handoff.descriptors():
            os.set_inheritable(fd, False)
        return handoff

    def spawn_keeper(self, server: int) -> "subprocess.Popen[bytes]":
        """Start a keeper with these descriptors. ``server`` is a pidfd of the server."""
        argv = [sys.executable, "-m", self.module, "adopt", self.dump(), str(server)]
        return subprocess.Popen(argv, pass_fds=(*self.descriptors(), server), stdin=subprocess.DEVNULL)
