"""Writing to a registry: blobs that it does not have yet, and manifests.

Protocol: OCI distribution-spec 1.1, "Push". Blobs go in one request each, from sources that are read by range.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import urlencode, urljoin

import aiohttp

from aenv.image.auth import Authenticator, read_limited
from aenv.image.endpoints import Endpoint, check_allowed, endpoints
from aenv.image.errors import InvalidReferenceError, RegistryUnauthorizedError, RegistryUnreachableError
from aenv.image.reference import Reference, parse
from aenv.image.registry import ATTEMPTS, RegistryClient, _TransientError
from aenv.storage.source import Source

_PIECE = 1 << 20
_OCTETS = "application/octet-stream"

T = TypeVar("T")


def target(text: str) -> Reference:
    """Where an image is to be pushed. Raises InvalidReferenceError unless it names a registry and a tag."""
    reference = parse(text)
    if reference.registry is None or reference.digest is not None:
        raise InvalidReferenceError(
            f"{text[:200]!r} is no place for an image.",
            "Name the registry and a tag: registry.example.org/team/app:1.",
        )
    return reference


class RegistryWriter(RegistryClient):
    """Raises as ``RegistryClient`` does. Mirrors are not written to."""

    async def has(self, reference: Reference, digest: str) -> bool:
        async def ask(endpoint: Endpoint) -> bool:
            status, _ = await self._send(endpoint, "HEAD", endpoint.url("blobs", digest), accept=(200, 404))
            return status == 200

        return await self._on_registry(reference, ask)

    async def push(self, reference: Reference, digest: str, source: Source, *, mount: str | None = None) -> bool:
        """Store a blob unless it is there; whether its bytes were sent. ``mount``: a repository that may have it."""
        if await self.has(reference, digest):
            return False

        async def send(endpoint: Endpoint) -> bool:
            query = f"?{urlencode({'mount': digest, 'from': mount})}" if mount else ""
            start = f"{endpoint.base}/v2/{endpoint.repository}/blobs/uploads/{query}"
            status, headers = await self._send(endpoint, "POST", start, accept=(201, 202))
            if status == 201:
                return False
            place = urljoin(start, headers.get("Location", ""))
            place += f"{'&' if '?' in place else '?'}{urlencode({'digest': digest})}"
            await self._send(endpoint, "PUT", place, accept=(201,), source=source)
            return True

        return await self._on_registry(reference, send)

    async def put_manifest(self, reference: Reference, data: bytes, media_type: str) -> None:
        async def send(endpoint: Endpoint) -> None:
            url = endpoint.url("manifests", reference.version)
            await self._send(endpoint, "PUT", url, accept=(201,), body=data, kind=media_type)

        await self._on_registry(reference, send)

    async def _on_registry(self, reference: Reference, action: Callable[[Endpoint], Awaitable[T]]) -> T:
        assert reference.registry is not None
        check_allowed(reference.registry, self._settings.registry_allow)
        return await self._repeated(endpoints(reference, self._settings.registries)[-1], action, ATTEMPTS)

    async def _send(
        self,
        endpoint: Endpoint,
        method: str,
        url: str,
        *,
        accept: tuple[int, ...],
        body: bytes = b"",
        source: Source | None = None,
        kind: str = _OCTETS,
    ) -> tuple[int, Mapping[str, str]]:
        """Status and headers of an expected answer. Answers one challenge."""
        authenticator = await self._authenticator(endpoint)
        scope = f"repository:{endpoint.repository}:pull,push"
        authorization = authenticator.header(scope)
        for attempt in (1, 2):
            size = source.size if source is not None else len(body)
            headers = {**authorization, "Content-Type": kind, "Content-Length": str(size)}
            if method == "HEAD":
                headers = dict(authorization)
            # A challenge comes before the body is read, or the body is sent again: it is a source.
            data = _pieces(source) if source is not None else body
            async with self._session(endpoint.ca_file).request(
                method,
                url,
                data=data if method != "HEAD" else None,
                headers=headers,
                allow_redirects=method == "HEAD",
            ) as response:
                if response.status in accept:
                    return response.status, response.headers.copy()
                if response.status == 401 and attempt == 1:
                    authorization = await authenticator.answer(response, scope)
                    continue
                raise await _refused(endpoint, authenticator, response)
        raise AssertionError("the second attempt returns or raises")


async def _pieces(source: Source) -> AsyncIterator[bytes]:
    for at in range(0, source.size, _PIECE):
        yield await asyncio.to_thread(source.read, at, min(_PIECE, source.size - at))


async def _refused(endpoint: Endpoint, authenticator: Authenticator, response: aiohttp.ClientResponse) -> Exception:
    if response.status == 401:
        return authenticator.refusal()
    if response.status in (403, 405):
        return RegistryUnauthorizedError(
            f"{endpoint.registry} does not allow this account to push to {endpoint.repository}.", "Ask its operator."
        )
    if response.status == 429 or response.status >= 500:
        return _TransientError(f"it answers with status {response.status}")
    detail = (await read_limited(response, 4096, cut=True)).decode(errors="replace").strip()
    return RegistryUnreachableError(
        f"{endpoint.registry} answers a push with status {response.status}: {detail[:200] or response.reason}.",
        "Is it a registry that can be pushed to?",
    )
