"""Volumes: their records. Their content is in ``volume_content``; mounting them into sandboxes is refused."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path

from aenv.accounts.volumes import Volume
from aenv.api import bodies
from aenv.api.context import Context, Ctx, errors

router = APIRouter(tags=["volumes"])

VolumeId = Annotated[str, Path(alias="volumeID")]


@router.get("/volumes", responses=errors())
async def list_all(context: Ctx) -> list[bodies.Volume]:
    """Oldest first."""
    return [bodies.Volume(volume_id=v.id, name=v.name) for v in context.services.volumes.list()]


@router.post("/volumes", status_code=201, responses=errors(400, 409))
async def create(body: bodies.NewVolume, context: Ctx) -> bodies.VolumeAndToken:
    return _volume(context.services.volumes.create(body.name), context)


@router.get("/volumes/{volumeID}", responses=errors(404))
async def get(volume_id: VolumeId, context: Ctx) -> bodies.VolumeAndToken:
    return _volume(context.services.volumes.get(volume_id), context)


@router.delete("/volumes/{volumeID}", status_code=204, responses=errors(404))
async def delete(volume_id: VolumeId, context: Ctx) -> None:
    """With all that is in it."""
    context.services.volumes.delete(volume_id)
    await asyncio.to_thread(context.services.volumes.files.destroy, volume_id)


def _volume(value: Volume, context: Context) -> bodies.VolumeAndToken:
    # Without a domain of ours the SDK would send the content of files to E2B's own servers.
    return bodies.VolumeAndToken(
        volume_id=value.id, name=value.name, token=value.token, domain=context.settings.domain
    )
