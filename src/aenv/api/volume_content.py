"""Files of volumes, under the volume's own token: what the SDK's ``Volume`` asks of ``E2B_VOLUME_API_URL``.

Whoever has a key may do it as well. A file's body is streamed to disk, whatever its size.
"""

import asyncio
import hmac
import os
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request, Security
from fastapi.responses import FileResponse, Response
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from aenv.accounts.volume_files import MAX_DEPTH, MAX_ID, Attributes, Entry, Part, VolumeFiles
from aenv.accounts.volumes import VolumeNotFoundError
from aenv.api import bodies
from aenv.api.auth import VOLUME_CONTENT, presented
from aenv.api.context import Ctx, errors
from aenv.api.errors import UnauthorizedError
from aenv.errors import InvalidRequestError

router = APIRouter(prefix=VOLUME_CONTENT + "{volumeID}", tags=["volumes"])

_BUFFER = 1 << 20  # bytes collected before one write on a worker thread
_PIECE = 500  # entries rendered while nothing else runs, some milliseconds
_ENTRIES = TypeAdapter(list[bodies.VolumeEntry])
_OCTETS: dict[str, Any] = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}

VolumeId = Annotated[str, Path(alias="volumeID")]
PathInVolume = Annotated[str, Query(description="Such as /dir/file")]
Number = Annotated[int | None, Query(ge=0, le=MAX_ID)]
Mode = Annotated[int | None, Query(ge=0, le=0o7777, description="Permissions, decimal as all numbers")]


def _authorized(
    volume_id: VolumeId,
    request: Request,
    context: Ctx,
    bearer: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))] = None,
) -> str:
    """The id of a volume whose token, or a key, the request shows. Strangers do not learn which volumes exist."""
    services, shown = context.services, presented(request.headers.raw)
    known = any(map(services.credentials.valid, shown))
    try:
        token = services.volumes.get(volume_id).token
    except VolumeNotFoundError:
        if known:
            raise
        token = ""
    if not known and not (token and any(hmac.compare_digest(token, each) for each in shown)):
        raise UnauthorizedError("The volume token is not valid.", "GET /volumes/{volumeID} has it.")
    return volume_id


def _files(context: Ctx) -> VolumeFiles:
    return context.services.volumes.files


Volume = Annotated[str, Depends(_authorized)]
Files = Annotated[VolumeFiles, Depends(_files)]


@router.get("/path", response_model_exclude_none=True, responses=errors(400, 404))
async def info(volume: Volume, path: PathInVolume, files: Files) -> bodies.VolumeEntry:
    return _entry(await asyncio.to_thread(files.info, volume, path))


@router.patch("/path", response_model_exclude_none=True, responses=errors(400, 404))
async def change(volume: Volume, path: PathInVolume, body: bodies.VolumeMetadata, files: Files) -> bodies.VolumeEntry:
    """Owner, group and permissions."""
    attributes = Attributes(body.uid, body.gid, body.mode)
    return _entry(await asyncio.to_thread(files.change, volume, path, attributes))


@router.delete("/path", status_code=204, responses=errors(400, 404))
async def remove(volume: Volume, path: PathInVolume, files: Files) -> None:
    """A file, or a folder with all that is in it."""
    await asyncio.to_thread(files.remove, volume, path)


@router.get("/dir", response_model=list[bodies.VolumeEntry], responses=errors(400, 404))
async def listing(
    volume: Volume, path: PathInVolume, files: Files, depth: Annotated[int, Query(ge=1, le=MAX_DEPTH)] = 1
) -> Response:
    """What is in a folder, and in its folders down to ``depth``; sorted, each folder before what is in it."""
    rendered = await asyncio.to_thread(lambda: _rendered(files.listing(volume, path, depth)))
    return Response(rendered, media_type="application/json")


@router.post("/dir", status_code=201, response_model_exclude_none=True, responses=errors(400, 404, 409, 503))
async def make_folder(
    volume: Volume,
    path: PathInVolume,
    files: Files,
    uid: Number = None,
    gid: Number = None,
    mode: Mode = None,
    force: bool = False,
) -> bodies.VolumeEntry:
    """``force`` makes missing folders on the way, and takes one that exists."""
    attributes = Attributes(uid, gid, mode)
    return _entry(await asyncio.to_thread(files.make_folder, volume, path, attributes, parents=force))


@router.get("/file", response_class=FileResponse, responses={200: {"content": _OCTETS}, **errors(400, 404)})
async def read(volume: Volume, path: PathInVolume, files: Files) -> FileResponse:
    """The content of a file."""
    return _Content(await asyncio.to_thread(files.open, volume, path))


@router.put(
    "/file",
    status_code=201,
    response_model_exclude_none=True,
    responses=errors(400, 404, 409, 503),
    openapi_extra={"requestBody": {"required": True, "content": _OCTETS}},
)
async def write(
    volume: Volume,
    path: PathInVolume,
    request: Request,
    files: Files,
    uid: Number = None,
    gid: Number = None,
    mode: Mode = None,
    force: bool = False,
) -> bodies.VolumeEntry:
    """Make or replace a file with the body; ``force`` makes missing folders on the way. All of it appears at once."""
    with files.writing(volume, path, parents=force) as part:
        try:
            await _receive(request, part)
        except ClientDisconnect:
            raise InvalidRequestError("The upload broke off.") from None
        return _entry(await asyncio.to_thread(part.commit, Attributes(uid, gid, mode)))


class _Content(FileResponse):
    """One state of a file, whatever becomes of its name while it is sent."""

    def __init__(self, fd: int) -> None:
        super().__init__(f"/proc/self/fd/{fd}", media_type="application/octet-stream", stat_result=os.fstat(fd))
        self._fd = fd

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            os.close(self._fd)


async def _receive(request: Request, part: Part) -> None:
    buffer = bytearray()
    async for data in request.stream():
        buffer += data
        if len(buffer) >= _BUFFER or (buffer and not data):
            await asyncio.to_thread(part.write, bytes(buffer))
            buffer.clear()
    if buffer:
        await asyncio.to_thread(part.write, bytes(buffer))


def _rendered(entries: Sequence[Entry]) -> bytes:
    """A JSON array, made on a worker thread and a piece at a time: other requests are served meanwhile."""
    pieces = (entries[first : first + _PIECE] for first in range(0, len(entries), _PIECE))
    made = (_ENTRIES.dump_json(list(map(_entry, piece)), by_alias=True, exclude_none=True) for piece in pieces)
    return b"[" + b",".join(piece[1:-1] for piece in made) + b"]"


def _entry(value: Entry) -> bodies.VolumeEntry:
    return bodies.VolumeEntry(
        name=value.name,
        type=value.kind,
        path=value.path,
        size=value.size,
        mode=value.mode,
        uid=value.uid,
        gid=value.gid,
        atime=value.accessed,
        mtime=value.modified,
        ctime=value.changed,
        target=value.target,
    )
