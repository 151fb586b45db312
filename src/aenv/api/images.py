"""The node's image cache. Not in E2B's API."""

import asyncio
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import Field, StrictInt

from aenv.api.context import Ctx, errors
from aenv.api.schemas import _Model
from aenv.image import inventory
from aenv.image.budget import MIB

router = APIRouter(tags=["images"])


class CachedImage(_Model):
    digest: str = Field(description="Of its manifest")
    names: list[str] = Field(description="References under which it was pulled")
    size_bytes: int = Field(description="What it takes on disk: layers and converted file systems")
    shared_bytes: int = Field(description="The part of it that other images have as well")
    in_use: int = Field(description="Disks of sandboxes, templates and snapshots that are on it")
    last_used_at: datetime


class CollectRequest(_Model):
    capacity_mb: Annotated[StrictInt, Field(ge=0, le=1 << 40)] | None = Field(
        None, description="MiB that may stay; the node's image_cache if left out"
    )


class Collected(_Model):
    removed: int = Field(description="Layers and file systems that went")
    freed_bytes: int
    kept_bytes: int


@router.get("/images", responses=errors())
async def list_all(context: Ctx) -> list[CachedImage]:
    """Images that are cached on this node, the last used first."""
    return [_image(image) for image in await asyncio.to_thread(inventory.images, context.settings.home)]


@router.post("/images/gc", responses=errors(400))
async def collect(context: Ctx, body: CollectRequest | None = None) -> Collected:
    """Remove the longest unused until the rest fits. What is in use, or was used ten minutes ago, stays."""
    capacity = context.settings.image_cache if body is None or body.capacity_mb is None else body.capacity_mb
    done = await asyncio.to_thread(inventory.collect_images, context.settings.home, capacity * MIB)
    return Collected(removed=done.removed, freed_bytes=done.freed_bytes, kept_bytes=done.kept_bytes)


@router.delete("/images/{image:path}", status_code=204, responses=errors(404, 409))
async def remove(
    image: Annotated[str, Path(description="A name, a digest, or the first 8 or more digits of one")], context: Ctx
) -> None:
    """Remove an image from the cache. Layers that other images share stay."""
    await asyncio.to_thread(inventory.remove, context.settings.home, image)


def _image(value: inventory.CachedImage) -> CachedImage:
    return CachedImage(
        digest=value.digest,
        names=list(value.names),
        size_bytes=value.size,
        shared_bytes=value.shared,
        in_use=value.users,
        last_used_at=value.last_used,
    )
