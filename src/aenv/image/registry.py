"""Client of OCI and Docker v2 registries: manifests and blobs, with retries, mirrors and verified digests.

Protocol: OCI distribution-spec 1.1, "Pull". Only GET is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hashlib
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import aiohttp

from aenv.config import Settings
from aenv.image.auth import Authenticator, read_limited
from aenv.image.budget import no_space
from aenv.image.credentials import Credentials, docker_config_file, from_docker_config
from aenv.image.endpoints import Endpoint, check_allowed, endpoints
from aenv.image.errors import (
    DigestMismatchError,
    ImageError,
    ImageNotFoundError,
    RegistryUnauthorizedError,
    RegistryUnreachableError,
)
from aenv.image.manifest import ACCEPT, MAX_DOCUMENT, Descriptor
from aenv.image.redirects import Redirects
from aenv.image.reference import Reference
from aenv.image.store import BlobStore, Lease, Partial
from aenv.image.threads import in_thread

PARALLEL_DOWNLOADS = 4
ATTEMPTS = 5
_CONNECT_TIMEOUT_S = 15.0
_READ_TIMEOUT_S = 60.0
_MAX_WAIT_S = 30.0
_CHUNK = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Document:
    """A manifest as it was received: its bytes are what its digest is of."""

    data: bytes
    digest: str
    media_type: str


class _TransientError(Exception):
    """Worth another attempt; ``wait_s`` is how long the server asks to wait, if it does."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class RegistryClient:
    """Use as an asynchronous context manager. ``credentials`` are for the registry itself, never for its mirrors.

    ``backoff_s`` is the wait before the first repetition; it doubles each time.
    """

    def __init__(
        self, settings: Settings, credentials: tuple[str, str] | None = None, *, backoff_s: float = 0.5
    ) -> None:
        self._settings = settings
        self._given = Credentials(*credentials) if credentials else None
        self._backoff_s = backoff_s
        self._sessions: dict[Path | None, aiohttp.ClientSession] = {}
        self._authenticators: dict[tuple[str, bool], Authenticator] = {}
        self._slots = asyncio.Semaphore(PARALLEL_DOWNLOADS)
        self._redirects = Redirects()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            await session.close()

    async def manifest(self, reference: Reference, version: str | None = None) -> Document:
        """The manifest or index that ``reference`` (or ``version``, a digest, of its repository) names.

        Raises ImageNotFoundError, RegistryUnauthorizedError, RegistryUnreachableError, RegistryForbiddenError,
        DigestMismatchError.
        """
        wanted = version or reference.version

        async def fetch(endpoint: Endpoint) -> Document:
            async with self._get(endpoint, "manifests", wanted, {"Accept": ACCEPT}) as response:
                data = await read_limited(response, MAX_DOCUMENT)
                promised = wanted if ":" in wanted else response.headers.get("Docker-Content-Digest", "")
                return Document(data, _checked(data, promised), response.content_type)

        return await self._from_any(reference, fetch)

    async def part(self, reference: Reference, digest: str, offset: int, length: int) -> bytes:
        """``length`` bytes of a blob. Nothing verifies them: their format has to. Tried once at each endpoint.

        Where the registry sends such requests elsewhere, later ones go there at once (``aenv.image.redirects``).
        Raises like ``manifest``.
        """
        headers = {"Range": f"bytes={offset}-{offset + length - 1}"}

        async def fetch(endpoint: Endpoint) -> bytes:
            key = (endpoint.registry, endpoint.repository, digest)
            if (target := self._redirects.find(key, time.time())) is not None:
                data = await self._directly(endpoint, target, headers, length)
                if data is not None:
                    return data
                self._redirects.forget(key)
            async with self._get(endpoint, "blobs", digest, headers) as response:
                if response.status == 416:
                    raise ImageNotFoundError(f"{endpoint.registry} has a shorter blob {digest:.80}.")
                if response.status != 206:
                    raise RegistryUnreachableError(
                        f"{endpoint.registry} does not send parts of blobs.", "Images cannot be read on demand there."
                    )
                data = await read_limited(response, length)
                if len(data) != length:
                    raise _TransientError(f"{len(data)} of {length} bytes came")
                if response.history:
                    first = response.history[0]
                    self._redirects.note(key, str(first.url), str(response.url), first.headers, time.time())
                return data

        return await self._from_any(reference, fetch, attempts=1)

    async def _directly(
        self, endpoint: Endpoint, target: str, headers: Mapping[str, str], length: int
    ) -> bytes | None:
        """The same from where the registry sent us before; None where that does not work any more."""
        try:
            sent = {**headers, "Accept-Encoding": "identity"}
            async with self._session(endpoint.ca_file).get(target, headers=sent) as response:
                data = await read_limited(response, length) if response.status == 206 else b""
        except (aiohttp.ClientError, TimeoutError, ssl.SSLError, ImageError):
            return None
        return data if len(data) == length else None

    async def document(self, reference: Reference, descriptor: Descriptor) -> bytes:
        """A small blob, verified: an image's configuration. Raises like ``manifest``."""

        async def fetch(endpoint: Endpoint) -> bytes:
            async with self._get(endpoint, "blobs", descriptor.digest) as response:
                data = await read_limited(response, MAX_DOCUMENT)
                _checked(data, descriptor.digest)
                return data

        return await self._from_any(reference, fetch)

    async def blob(
        self, reference: Reference, descriptor: Descriptor, store: BlobStore, received: Callable[[int], None]
    ) -> Lease:
        """A blob in ``store``, downloaded unless it is there; what an interrupted download left is continued.

        ``received`` is called with the number of bytes of each piece. Raises like ``manifest``.
        """
        async with self._slots, store.writing(descriptor.digest) as partial:
            if (lease := store.lease(descriptor.digest)) is not None:
                return lease
            await in_thread(partial.resume)

            async def fetch(endpoint: Endpoint) -> Lease:
                await self._download(endpoint, descriptor, partial, received)
                return await in_thread(lambda: store.commit(partial), Lease.close)

            try:
                return await self._from_any(reference, fetch)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise no_space(store.root) from error
                raise

    async def _download(
        self, endpoint: Endpoint, descriptor: Descriptor, partial: Partial, received: Callable[[int], None]
    ) -> None:
        size = descriptor.size
        if size is not None and partial.size > size:
            await in_thread(partial.restart)
        if size is not None and partial.size == size:
            return
        headers = {"Range": f"bytes={partial.size}-"} if partial.size else {}
        async with self._get(endpoint, "blobs", descriptor.digest, headers) as response:
            if response.status == 416:  # what is here is not the start of that blob
                await in_thread(partial.restart)
                raise _TransientError("it refuses to continue the download")
            resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(
                f"bytes {partial.size}-"
            )
            if partial.size and not resumed:
                await in_thread(partial.restart)
            await self._receive(endpoint, response, size, partial, received)
        if size is not None and partial.size < size:
            raise _TransientError(f"the connection ended after {partial.size} of {size} bytes")

    async def _receive(
        self,
        endpoint: Endpoint,
        response: aiohttp.ClientResponse,
        size: int | None,
        partial: Partial,
        received: Callable[[int], None],
    ) -> None:
        """Append a body to ``partial``; also what arrived of one that breaks off, for the next attempt."""
        buffer = bytearray()
        try:
            async for data in response.content.iter_any():
                buffer += data
                received(len(data))
                if size is not None and partial.size + len(buffer) > size:
                    buffer.clear()
                    await in_thread(partial.restart)
                    raise DigestMismatchError(
                        f"{endpoint.registry} sends more than the {size} bytes that the manifest promises.",
                        "The registry or mirror is damaged: tell its operator.",
                    )
                if len(buffer) >= _CHUNK:
                    full, buffer = buffer, bytearray()
                    await in_thread(functools.partial(partial.append, full))
        finally:
            partial.append(buffer)  # less than a chunk

    async def _from_any(
        self, reference: Reference, action: Callable[[Endpoint], Awaitable[T]], *, attempts: int = ATTEMPTS
    ) -> T:
        """``action`` on the first mirror where it succeeds, else on the registry itself."""
        assert reference.registry is not None
        check_allowed(reference.registry, self._settings.registry_allow)
        places = endpoints(reference, self._settings.registries)
        for endpoint in places:
            try:
                return await self._repeated(endpoint, action, 1 if endpoint.mirror else attempts)
            except ImageNotFoundError as error:
                if not endpoint.mirror:
                    raise ImageNotFoundError(
                        f"Image {reference} not found.", "Check its name and tag; private images need credentials."
                    ) from error
            except ImageError:
                if not endpoint.mirror:
                    raise
        raise AssertionError("the registry itself is always the last endpoint")

    async def _repeated(self, endpoint: Endpoint, action: Callable[[Endpoint], Awaitable[T]], attempts: int) -> T:
        wait = self._backoff_s
        for attempt in range(1, attempts + 1):
            try:
                return await action(endpoint)
            except aiohttp.ClientConnectorCertificateError as error:
                raise RegistryUnreachableError(
                    f"The certificate of {endpoint.registry} is not valid: {error.certificate_error}.",
                    f'Name its authority in `ca_file` of `registries."{endpoint.registry}"`.',
                ) from error
            except (_TransientError, aiohttp.ClientError, TimeoutError, ssl.SSLError) as error:
                if attempt == attempts:
                    raise self._unreachable(endpoint, error) from error
                asked = error.wait_s if isinstance(error, _TransientError) else None
            await asyncio.sleep(min(asked if asked is not None else wait * (0.5 + random.random()), _MAX_WAIT_S))
            wait *= 2
        raise AssertionError("at least one attempt is made")

    def _unreachable(self, endpoint: Endpoint, error: Exception) -> RegistryUnreachableError:
        hint = "Check the name, the network and this node's proxy settings, then try again."
        if "WRONG_VERSION_NUMBER" in str(error) or "record layer" in str(error):
            hint = f'It seems to speak plain HTTP: set `plain_http` in `registries."{endpoint.registry}"`.'
        return RegistryUnreachableError(f"{endpoint.registry} cannot be used: {error or type(error).__name__}.", hint)

    @contextlib.asynccontextmanager
    async def _get(
        self, endpoint: Endpoint, kind: str, version: str, headers: Mapping[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A successful response (200 or 206), or 416 to a request for a range. Answers one challenge."""
        authenticator = await self._authenticator(endpoint)
        authorization = authenticator.header(endpoint.scope)
        for attempt in (1, 2):
            # What is stored is what the digest is of, so nothing may be encoded on the way.
            sent = {**(headers or {}), **authorization, "Accept-Encoding": "identity"}
            async with self._session(endpoint.ca_file).get(endpoint.url(kind, version), headers=sent) as response:
                if response.status in (200, 206) or (response.status == 416 and "Range" in sent):
                    yield response
                    return
                if response.status == 401 and attempt == 1:
                    authorization = await authenticator.answer(response, endpoint.scope)
                    continue
                raise await _failure(endpoint, authenticator, response)

    async def _authenticator(self, endpoint: Endpoint) -> Authenticator:
        key = (endpoint.registry, endpoint.mirror)
        if key not in self._authenticators:
            credentials = await self._credentials(endpoint)
            session = self._session(endpoint.ca_file)
            self._authenticators.setdefault(key, Authenticator(session, endpoint.registry, credentials))
        return self._authenticators[key]

    async def _credentials(self, endpoint: Endpoint) -> Credentials | None:
        if self._given and not endpoint.mirror:
            return self._given
        settings = self._settings.registries.get(endpoint.registry)
        if settings and settings.username is not None and settings.password is not None:
            return Credentials(settings.username, settings.password)
        file = self._settings.docker_config or docker_config_file()
        return await from_docker_config(file, endpoint.registry)

    def _session(self, ca_file: Path | None) -> aiohttp.ClientSession:
        if ca_file not in self._sessions:
            try:
                context = ssl.create_default_context(cafile=ca_file)
            except OSError as error:
                raise RegistryUnreachableError(f"Cannot read certificates in {ca_file}: {error}.") from error
            self._sessions[ca_file] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(ssl=context),
                timeout=aiohttp.ClientTimeout(None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_READ_TIMEOUT_S),
                auto_decompress=False,
                trust_env=True,
            )
        return self._sessions[ca_file]


def _checked(data: bytes, promised: str) -> str:
    """The digest of ``data``. Raises DigestMismatchError where another one was promised."""
    algorithm = "sha512" if promised.startswith("sha512:") else "sha256"
    found = f"{algorithm}:{hashlib.new(algorithm, data).hexdigest()}"
    if promised and found != promised:
        raise DigestMismatchError(
            f"A document that should be {promised:.140} is {found}.",
            "The registry, a mirror or a proxy on the way is damaged: try again, then tell its operator.",
        )
    return found


async def _failure(
    endpoint: Endpoint, authenticator: Authenticator, response: aiohttp.ClientResponse
) -> ImageError | _TransientError:
    status = response.status
    if status == 404:
        return ImageNotFoundError(f"{endpoint.registry} has no such image.", "Check its name and tag.")
    if status == 401:
        return authenticator.refusal()
    if status == 403:
        return RegistryUnauthorizedError(
            f"{endpoint.registry} does not allow this account to pull {endpoint.repository}.", "Ask its operator."
        )
    if status == 429 or status >= 500:
        return _TransientError(f"it answers with status {status}", _retry_after(response))
    detail = (await read_limited(response, 4096, cut=True)).decode(errors="replace").strip()
    return RegistryUnreachableError(
        f"{endpoint.registry} answers with status {status}: {detail[:200] or response.reason}.", "Is it a registry?"
    )


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Seconds, from either form of the header (RFC 9110 section 10.2.3)."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    try:
        moment = parsedate_to_datetime(value)
        now = parsedate_to_datetime(response.headers["Date"])
        return max((moment - now).total_seconds(), 0.0)
    except (ValueError, TypeError, KeyError):
        return None
