"""Runs commands in a guest through envd's ``process.Process/Start`` (Connect protocol, JSON codec).

The platform's own use, such as template builds; users go through the E2B SDK.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from aenv.client import connect
from aenv.client.connect import CommandRefusedError, Ended, Output, Started
from aenv.client.guest import ENVD_PORT
from aenv.errors import SandboxUnreachableError

__all__ = ["CommandRefusedError", "CommandResult", "Ended", "Output", "Started", "events", "run"]


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int
    stdout: str
    stderr: str


async def run(host: str, command: str, *, user: str, token: str | None = None, timeout: float) -> CommandResult:
    """Run ``command`` in a login shell as ``user``; its output and exit code, whatever they are.

    Raises SandboxUnreachableError when envd cannot be reached, refuses, or ``timeout`` (seconds) passes.
    """
    request = connect.pack({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}})
    headers = connect.headers(user=user, token=token)
    url = f"http://{host}:{ENVD_PORT}/process.Process/Start"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.post(url, data=request, headers=headers) as answer,
        ):
            if answer.status != 200:
                raise SandboxUnreachableError(f"envd refused the command: {(await answer.text())[:500]}")
            return await _collect(answer.content, command)
    except (TimeoutError, aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise SandboxUnreachableError(f"The command {command!r} got no answer from the guest: {error!r}.") from error


async def _collect(stream: aiohttp.StreamReader, command: str) -> CommandResult:
    output = {"stdout": bytearray(), "stderr": bytearray()}
    try:
        async for event in _events(stream):
            if isinstance(event, Output):
                output[event.stream] += event.data
            elif isinstance(event, Ended):
                texts = {name: data.decode(errors="replace") for name, data in output.items()}
                return CommandResult(event.exit_code, **texts)
    except CommandRefusedError as error:
        raise SandboxUnreachableError(f"The command {command!r} could not be run: {error.message}.") from error
    raise SandboxUnreachableError(f"The command {command!r} could not be run: the stream ended early.")


async def events(
    host: str,
    argv: Sequence[str],
    *,
    user: str,
    envs: Mapping[str, str] | None = None,
    cwd: str | None = None,
    token: str | None = None,
) -> AsyncIterator[Started | Output | Ended]:
    """Run a program and yield what happens to it until it ends. No time limit: that is the caller's business.

    A caller that stops listening leaves the program running. Raises CommandRefusedError when it cannot be started,
    SandboxUnreachableError when the guest stops answering.
    """
    config: dict[str, Any] = {"cmd": argv[0], "args": list(argv[1:]), "envs": dict(envs or {})}
    if cwd is not None:
        config["cwd"] = cwd
    request = connect.pack({"process": config, "stdin": False})
    headers = connect.headers(user=user, token=token)
    url = f"http://{host}:{ENVD_PORT}/process.Process/Start"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=request, headers=headers) as answer,
        ):
            if answer.status != 200:
                raise CommandRefusedError((await answer.text())[:500])
            async for event in _events(answer.content):
                yield event
    except (TimeoutError, aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise SandboxUnreachableError(f"The guest stopped answering: {error!r}.") from error


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[Started | Output | Ended]:
    """Ends after the end of the process. Raises CommandRefusedError when the stream ends without one."""
    while True:
        flags, size = connect.HEADER.unpack(await stream.readexactly(connect.HEADER.size))
        for event in connect.events(flags, json.loads(await stream.readexactly(size))):
            yield event
            if isinstance(event, Ended):
                return
        if flags & connect.END_OF_STREAM:
            raise CommandRefusedError("the stream ended early")
