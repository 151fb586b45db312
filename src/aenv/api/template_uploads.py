"""Where the SDK puts the archives of COPY steps: ``PUT /template-files/{digest}`` with a signed, expiring URL.

The SDK sends no API key there, as it would not to an object store. So this is outside of the API's gate and of its
limit on bodies: the signature lets in, the archive is streamed to disk and bounded by its own limit.
"""

import asyncio
import hashlib
import hmac
import os
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import parse_qs, urlencode

from starlette.types import Receive, Scope, Send

from aenv.api.errors import Error, describe, respond
from aenv.errors import AenvError, CapacityError
from aenv.template.archives import Archives

PREFIX = "/template-files/"
LIFETIME = 3600  # seconds; as long as the SDK gives an upload
_BUFFER = 1 << 20  # bytes collected before one write on a worker thread


class UploadLinks:
    """Makes and checks URLs. They end with the process that made them."""

    def __init__(self) -> None:
        self._secret = os.urandom(32)

    def make(self, base: str, digest: str) -> str:
        expires = str(int(time.time()) + LIFETIME)
        query = urlencode({"expires": expires, "signature": self._sign(digest, expires)})
        return f"{base.rstrip('/')}{PREFIX}{digest}?{query}"

    def valid(self, digest: str, query: str) -> bool:
        fields = parse_qs(query)
        expires, signature = fields.get("expires", [""])[0], fields.get("signature", [""])[0]
        if not hmac.compare_digest(self._sign(digest, expires).encode(), signature.encode()):
            return False
        return int(expires) >= time.time()

    def _sign(self, digest: str, expires: str) -> str:
        return hmac.new(self._secret, f"{digest}:{expires}".encode(), hashlib.sha256).hexdigest()


class _RefusedError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Uploads:
    """The ASGI application under ``PREFIX``."""

    def __init__(self, links: UploadLinks, archives: Archives, *, limit: int, reserve: int) -> None:
        """``limit`` is bytes of one archive, ``reserve`` bytes of disk that an upload must leave free."""
        self._links = links
        self._archives = archives
        self._limit = limit
        self._reserve = reserve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._receive(scope, receive)
        except _RefusedError as error:
            # What is left of the body is not read.
            answer = respond(Error(code=error.status, message=str(error)), {"connection": "close"})
        except (AenvError, OSError) as error:
            answer = respond(describe(error), {"connection": "close"})
        else:
            answer = respond(Error(code=200, message="uploaded"))
        await answer(scope, receive, send)

    async def _receive(self, scope: Scope, receive: Receive) -> None:
        digest = scope["path"].removeprefix(PREFIX)
        if not self._links.valid(digest, scope["query_string"].decode("ascii", "replace")):
            raise _RefusedError(403, "The upload link is not valid or has expired; ask for a new one.")
        if scope["method"] != "PUT":
            raise _RefusedError(405, "Upload with PUT.")
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        self._check(int(announced) if announced.isdigit() else 0)
        part = self._archives.part()
        try:
            with part.open("xb") as file:
                await self._copy(receive, file.fileno())
            await asyncio.to_thread(self._archives.commit, part, digest)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    async def _copy(self, receive: Receive, descriptor: int) -> None:
        size, buffer = 0, bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _RefusedError(400, "The upload broke off.")
            buffer += message.get("body", b"")
            more = message.get("more_body", False)
            if len(buffer) >= _BUFFER or (buffer and not more):
                size += len(buffer)
                self._check(size)
                await asyncio.to_thread(_write_all, descriptor, bytes(buffer))
                buffer.clear()
            if not more:
                break
        if size == 0:
            raise _RefusedError(400, "The archive is empty.")

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise _RefusedError(
                413,
                f"The archive is larger than {self._limit >> 20} MiB (max_upload). Ignore files, or copy in parts.",
            )
        info = os.statvfs(self._folder)
        if info.f_bavail * info.f_frsize < size + self._reserve:
            raise CapacityError("No room for the archive on this node.", "Free disk space under its home.")

    @property
    def _folder(self) -> Path:
        return self._archives.part().parent


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
