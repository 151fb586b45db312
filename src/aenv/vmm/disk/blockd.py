"""Talking to ``aenv-blockd``: a command is a line of JSON, and so is its answer (``blockd/src/server.rs``)."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

from aenv.errors import VmmError

CONNECT_TIMEOUT = 90.0  # seconds until a daemon answers first; to notice that another died takes a kernel up to 5
COMMAND_TIMEOUT = 60.0  # seconds; a healthy daemon answers within milliseconds


class BlockdRefusedError(VmmError):
    """The daemon refused a command; the disk is as it was."""


class BlockdClient:
    """One connection, one command at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def connect(cls, path: Path) -> "BlockdClient":
        """The socket must be listening already. Raises VmmError."""
        try:
            return cls(*await asyncio.open_unix_connection(path))
        except OSError as error:
            raise VmmError(f"The disk's control socket {path} cannot be reached: {error}.") from error

    @property
    def connected(self) -> bool:
        return not self._writer.is_closing() and not self._reader.at_eof()

    async def ask(self, command: dict[str, Any], timeout: float = COMMAND_TIMEOUT) -> dict[str, Any]:
        """Raises BlockdRefusedError; VmmError when the daemon is gone or silent: the connection is closed then."""
        what = command["do"]
        try:
            async with self._turn, asyncio.timeout(timeout):
                self._writer.write(json.dumps(command).encode() + b"\n")
                await self._writer.drain()
                line = await self._reader.readline()
            answer = json.loads(line) if line else None
        except (OSError, ValueError) as error:
            self.close()
            why = f"within {timeout:g} s" if isinstance(error, TimeoutError) else f"({error})"
            raise VmmError(f"The disk's daemon did not answer {what} {why}.") from error
        except BaseException:
            self.close()  # the answer of a command that nobody waits for must not be taken for another's
            raise
        if not isinstance(answer, dict):
            self.close()
            raise VmmError(f"The disk's daemon ended during {what}.")
        if "error" in answer:
            raise BlockdRefusedError(f"The disk's daemon refused {what}: {answer['error']}.")
        return answer

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._writer.close()
