"""A registry that misbehaves as told: what a real one does on its bad days."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from tests.image.writer import Image

Fault = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class FaultyRegistry:
    """Serves one image as ``any/name:tag``. Each request first meets the next of ``faults``, if one is left."""

    image: Image
    faults: list[Fault] = field(default_factory=list)
    requests: list[web.BaseRequest] = field(default_factory=list)
    ranges: bool = True
    host: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[FaultyRegistry]:
        app = web.Application()
        app.router.add_get("/v2/{name:.+}/manifests/{version}", self._manifest)
        app.router.add_get("/v2/{name:.+}/blobs/{digest}", self._blob)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.host = f"127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _fault(self, request: web.Request) -> web.StreamResponse | None:
        self.requests.append(request)
        return await self.faults.pop(0)(request) if self.faults else None

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        if (fault := await self._fault(request)) is not None:
            return fault
        return web.Response(body=self.image.manifest, content_type=self.image.media_type)

    async def _blob(self, request: web.Request) -> web.StreamResponse:
        if (fault := await self._fault(request)) is not None:
            return fault
        data = self.image.blobs[request.match_info["digest"]]
        asked = request.headers.get("Range")
        if asked is None or not self.ranges:
            return web.Response(body=data)
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), int(last or len(data) - 1)
        if start >= len(data):
            return web.Response(status=416)
        headers = {"Content-Range": f"bytes {start}-{end}/{len(data)}"}
        return web.Response(status=206, body=data[start : end + 1], headers=headers)


def status(code: int, **headers: str) -> Fault:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=code, headers={name.replace("_", "-"): text for name, text in headers.items()})

    return answer


def body(data: bytes) -> Fault:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=data, content_type="application/vnd.oci.image.manifest.v1+json")

    return answer


def breaks_off(data: bytes, after: int) -> Fault:
    """Sends the start of ``data``, then closes the connection."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": str(len(data))})
        await response.prepare(request)
        await response.write(data[:after])
        assert request.transport is not None
        request.transport.close()
        return response

    return answer


async def good(request: web.Request) -> None:
    return None
