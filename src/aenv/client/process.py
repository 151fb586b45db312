"""Runs commands in a guest through envd's ``process.Process/Start`` (Connect protocol, JSON codec).

The platform's own use, such as template builds; users go through the E2B SDK.
"""

import asyncio
import base64
import json
import struct
from dataclasses import dataclass

import aiohttp

from aenv.client.guest import ENVD_PORT
from aenv.errors import SandboxUnreachableError

# Connect's streaming frames: one flag byte and a big-endian length; flag bit 1 marks the end of the stream.
# https://connectrpc.com/docs/protocol/#streaming-rpcs
_HEADER = struct.Struct(">BI")
_END_OF_STREAM = 0x02


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit_code: int
    stdout: str
    stderr: str


async def run(host: str, command: str, *, user: str, token: str | None = None, timeout: float) -> CommandResult:
    """Run ``command`` in a login shell as ``user``; its output and exit code, whatever they are.

    Raises SandboxUnreachableError when envd cannot be reached, refuses, or ``timeout`` (seconds) passes.
    """
    request = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", command]}}).encode()
    headers = {
        "Content-Type": "application/connect+json",
        "Connect-Protocol-Version": "1",
        "Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode(),
    } | ({"X-Access-Token": token} if token else {})
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
