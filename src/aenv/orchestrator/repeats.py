"""Creations that may be repeated: under one ``Idempotency-Key`` one sandbox is made, however often it is asked for.

The key is part of the sandbox's record, which is written before anything of the sandbox exists. So it holds over a
crash of the server, and for as long as the sandbox does.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from aenv.errors import ReusedKeyError
from aenv.orchestrator.model import Sandbox, SandboxSpec, SandboxState


def marker(spec: SandboxSpec) -> str | None:
    """What a sandbox's record keeps of the request that made it: the key, and a digest of all that was asked for."""
    if spec.idempotency_key is None:
        return None
    return f"{spec.idempotency_key}:{hashlib.sha256(repr(spec).encode()).hexdigest()}"


def made_before(sandboxes: Iterable[Sandbox], spec: SandboxSpec) -> Sandbox | None:
    """The sandbox that an earlier request with this key made. Raises ReusedKeyError when that asked for another."""
    wanted = marker(spec)
    assert wanted is not None
    for sandbox in sandboxes:
        if sandbox.request is None or sandbox.state in (SandboxState.STARTING, SandboxState.DELETING):
            continue
        if sandbox.request == wanted:
            return sandbox
        if sandbox.request.rpartition(":")[0] == spec.idempotency_key:
            raise ReusedKeyError(
                f"The Idempotency-Key {spec.idempotency_key!r} made sandbox {sandbox.id!r} from another request.",
                "Use a new key for each creation.",
            )
    return None


class Turns:
    """One at a time of all that have the same key."""

    def __init__(self) -> None:
        self._taken: dict[str, asyncio.Event] = {}

    @asynccontextmanager
    async def of(self, key: str) -> AsyncIterator[None]:
        while (taken := self._taken.get(key)) is not None:
            await taken.wait()
        self._taken[key] = done = asyncio.Event()
        try:
            yield
        finally:
            del self._taken[key]
            done.set()
