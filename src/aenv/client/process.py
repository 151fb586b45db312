"""Runs commands in a guest through envd's ``process.Process/Start`` (Connect protocol, JSON codec).

The platform's own use, such as template builds; users go through the E2B SDK.
"""

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from aenv.client.guest import ENVD_PORT
from aenv.errors import AenvError, SandboxUnreachableError

# Connect's streaming frames: one flag byte and a big-endian length; flag bit 1 marks the end of the stream.
# https://connectrpc.com/docs/protocol/#streaming-rpcs
_HEADER = struct.Struct(">BI")
_END_OF_STREAM = 0x02


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Started:
    pid: int


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes as they came; a chunk may end within a line or a character."""

    stream: str  # "stdout" or "stderr"
    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """``status`` is in words: ``exit status 1``, ``signal: killed``; the code is -1 after a signal."""

    exit_code: int
    status: str


class CommandRefusedError(AenvError):
    """envd did not start the command: the user, the folder or the program does not exist in the guest."""


async def run(host: str, command: str, *, user: str, token: str | None = None, timeout: float) -> CommandResult:
    """Run ``command`` in a login shell as ``user``; its output and exit code, whatever they are.

    Raises SandboxUnreachableError when envd cannot be reached, refuses, or ``timeout`` (seconds) passes.
    """
    request = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}}).encode()
    headers = _headers(user, token)
    url = f"http://{host}:{ENVD_PORT}/process.Process/Start"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=timeout)) as session,
            session.post(url, data=_HEADER.pack(0, len(request)) + request, headers=headers) as answer,
        ):
            if answer.status != 200:
                raise SandboxUnreachableError(f"envd refused the command: {(await answer.text())[:500]}")
            return await _collect(answer.content, command)
    except (TimeoutError, aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise SandboxUnreachableError(f"The command {command!r} got no answer from the guest: {error!r}.") from error


async def _collect(stream: aiohttp.StreamReader, command: str) -> CommandResult:
    output = {"stdout": bytearray(), "stderr": bytearray()}
    while True:
        flags, size = _HEADER.unpack(await stream.readexactly(_HEADER.size))
        message = json.loads(await stream.readexactly(size))
        if flags & _END_OF_STREAM:
            reason = message.get("error", {}).get("message", "the stream ended early")
            raise SandboxUnreachableError(f"The command {command!r} could not be run: {reason}.")
        event = message.get("event", {})
        for name, text in event.get("data", {}).items():
            output[name] += base64.b64decode(text)
        if (end := event.get("end")) is not None:
            texts = {name: data.decode(errors="replace") for name, data in output.items()}
            return CommandResult(int(end.get("exitCode", 0)), **texts)


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
    request = json.dumps({"process": config, "stdin": False}).encode()
    url = f"http://{host}:{ENVD_PORT}/process.Process/Start"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url, data=_HEADER.pack(0, len(request)) + request, headers=_headers(user, token)) as answer,
        ):
            if answer.status != 200:
                raise CommandRefusedError((await answer.text())[:500])
            async for event in _events(answer.content):
                yield event
    except (TimeoutError, aiohttp.ClientError, OSError, asyncio.IncompleteReadError) as error:
        raise SandboxUnreachableError(f"The guest stopped answering: {error!r}.") from error


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[Started | Output | Ended]:
    while True:
        flags, size = _HEADER.unpack(await stream.readexactly(_HEADER.size))
        message = json.loads(await stream.readexactly(size))
        if flags & _END_OF_STREAM:
            raise CommandRefusedError(message.get("error", {}).get("message", "the stream ended early"))
        event = message.get("event", {})
        if "start" in event:
            yield Started(int(event["start"].get("pid", 0)))
        for name, text in event.get("data", {}).items():
            yield Output(name, base64.b64decode(text))
        if (end := event.get("end")) is not None:
            code = int(end.get("exitCode", 0))
            yield Ended(code, end.get("status") or f"exit status {code}")
            return


def _headers(user: str, token: str | None) -> dict[str, str]:
    return {
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
        "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
    } | ({"X-Access-Token": token} if token else {})
