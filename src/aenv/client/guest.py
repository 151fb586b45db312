"""The node's own calls to a guest's envd: wait until it answers, and tell it who it is now."""

import asyncio
import base64
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import aiohttp

from aenv.errors import GuestUnresponsiveError, SandboxStartError

ENVD_PORT = 49983  # E2B's guest daemon port
ENTROPY_BYTES = 64  # two ChaCha20 keys; the kernel needs 32
CLOCK_TOLERANCE = 0.1  # seconds: a slower /init is repeated, the guest's clock is behind by up to its duration
CONNECT_TIMEOUT = 1.0  # seconds; a SYN that met no listener is worth sending again
QUIESCE_TIMEOUT = 30.0  # seconds for writing out everything that a guest holds back
RETRY_INTERVAL = 0.02  # seconds between attempts while the guest refuses connections


@dataclass(frozen=True, slots=True)
class GuestIdentity:
    """Everything a guest must learn after it starts to run, before any user's request reaches it."""

    sandbox_id: str
    template_id: str
    access_token: str | None
    env_vars: Mapping[str, str] = field(default_factory=dict)
    default_user: str = "user"
    default_workdir: str | None = None  # None: the user's home


class GuestClient:
    """Talks to envd at a slot's host address. Every connection is used once: guests come and go behind it."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), raise_for_status=False
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def wait_until_ready(self, host: str, deadline: float) -> None:
        """Return once envd answers ``GET /health``. ``deadline`` is in ``time.monotonic()`` seconds.

        Raises SandboxStartError when it passes.
        """
        last = "no attempt was made"
        while (left := deadline - time.monotonic()) > 0:
            # Once connected, a busy guest may take its time; only connecting is cut short and repeated.
            timeout = aiohttp.ClientTimeout(total=left, sock_connect=min(CONNECT_TIMEOUT, left))
            try:
                async with self._open().get(f"http://{host}:{ENVD_PORT}/health", timeout=timeout) as answer:
                    if answer.status < 300:
                        return
                    last = f"it answered {answer.status}"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                last = str(error) or type(error).__name__
            await asyncio.sleep(RETRY_INTERVAL)
        raise SandboxStartError(
            f"The guest did not come up in time ({last}).",
            "Its serial console log in the node's home tells what it did last.",
        )

    async def freeze(self, host: str, token: str | None) -> None:
        """Write the guest's root file system out, and hold back writes until ``thaw``. Idempotent.

        Raises GuestUnresponsiveError when envd does not do it in time.
        """
        await self._control(host, "fsfreeze", [token])

    async def thaw(self, host: str, tokens: Sequence[str | None]) -> None:
        """Undo ``freeze``; harmless without one. Envd may hold any of ``tokens``. Raises GuestUnresponsiveError."""
        await self._control(host, "fsthaw", tokens)

    async def _control(self, host: str, action: str, tokens: Sequence[str | None]) -> None:
        url, said = f"http://{host}:{ENVD_PORT}/{action}", ""
        timeout = aiohttp.ClientTimeout(total=QUIESCE_TIMEOUT)
        for token in dict.fromkeys(tokens):
            headers = {"X-Access-Token": token} if token else {}
            try:
                async with self._open().post(url, headers=headers, timeout=timeout) as answer:
                    if answer.status < 300:
                        return
                    said = f"{answer.status}: {(await answer.text())[:200]}"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                said = str(error) or type(error).__name__
                break
        raise GuestUnresponsiveError(f"The guest agent did not answer /{action} ({said}).")

    async def introduce(
        self, host: str, identity: GuestIdentity, tokens: Sequence[str | None], deadline: float
    ) -> None:
        """Give the guest its clock, entropy, identity and tokens (envd ``POST /init``), as soon as it answers.

        ``tokens`` are the access tokens that envd may hold now; they are tried in order. The guest's clock is
        behind by up to the duration of the call, so a call that took longer than CLOCK_TOLERANCE is repeated: on
        the same connection, with the guest's code warm, that takes a few milliseconds.
        Raises SandboxStartError when ``deadline`` (``time.monotonic()``) passes or envd refuses.
        """
        candidates = list(dict.fromkeys(tokens))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
            for _ in range(3):
                started = time.monotonic()
                candidates = [await self._init(session, host, identity, candidates, deadline)]
                if time.monotonic() - started <= CLOCK_TOLERANCE:
                    return

    async def _init(
        self,
        session: aiohttp.ClientSession,
        host: str,
        identity: GuestIdentity,
        tokens: Sequence[str | None],
        deadline: float,
    ) -> str | None:
        """One accepted ``/init``; the token that envd holds afterwards."""
        last = "no attempt was made"
        while (left := deadline - time.monotonic()) > 0:
            timeout = aiohttp.ClientTimeout(total=left, sock_connect=min(CONNECT_TIMEOUT, left))
            try:
                for token in tokens:
                    headers = {"Content-Type": "application/json"} | ({"X-Access-Token": token} if token else {})
                    async with session.post(
                        f"http://{host}:{ENVD_PORT}/init", data=_message(identity), headers=headers, timeout=timeout
                    ) as answer:
                        text = await answer.text()
                        if answer.status < 300:
                            return identity.access_token
                        refused = f"The guest refused its initialisation with {answer.status}: {text[:200]}"
                raise SandboxStartError(refused)
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                last = str(error) or type(error).__name__
            await asyncio.sleep(RETRY_INTERVAL)
        raise SandboxStartError(
            f"The guest did not come up in time ({last}).",
            "Its serial console log in the node's home tells what it did last.",
        )


def _message(identity: GuestIdentity) -> str:
    """The body of ``/init``, with the time of this moment and entropy that is used once."""
    body: dict[str, object] = {
        "timestamp": datetime.now(UTC).isoformat(),
        "entropy": base64.b64encode(os.urandom(ENTROPY_BYTES)).decode(),
        "envVars": dict(identity.env_vars),
        "sandboxId": identity.sandbox_id,
        "templateId": identity.template_id,
        "hostname": identity.sandbox_id,
        "defaultUser": identity.default_user,
    }
    if identity.access_token is not None:
        body["accessToken"] = identity.access_token
    if identity.default_workdir is not None:
        body["defaultWorkdir"] = identity.default_workdir
    return json.dumps(body)
