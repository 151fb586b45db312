"""Sends files of the host into a guest through envd's ``POST /files``. The platform's own use."""

from pathlib import Path

import aiohttp

from aenv.client.guest import ENVD_PORT
from aenv.errors import SandboxUnreachableError


async def upload(host: str, source: Path, target: str, *, user: str, token: str | None = None) -> None:
    """Write ``source`` to the absolute path ``target`` as ``user``, streamed; missing folders are made.

    No time limit: that is the caller's business. Raises SandboxUnreachableError when envd refuses or stops answering.
    """
    headers = {"Content-Type": "application/octet-stream"} | ({"X-Access-Token": token} if token else {})
    url = f"http://{host}:{ENVD_PORT}/files"
    try:
        with source.open("rb") as file:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)) as session,
                session.post(url, params={"path": target, "username": user}, data=file, headers=headers) as answer,
            ):
                if answer.status >= 300:
                    raise SandboxUnreachableError(f"The guest refused a file: {(await answer.text())[:500]}")
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise SandboxUnreachableError(f"The guest stopped answering during an upload: {error!r}.") from error
