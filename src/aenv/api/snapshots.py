"""Snapshots that users keep: made from a sandbox, used wherever a template is."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from aenv.api import convert, schemas
from aenv.api.context import Ctx, SandboxId, errors

router = APIRouter(tags=["snapshots"])


@router.post("/sandboxes/{sandboxID}/snapshots", status_code=201, responses=errors(400, 404, 409, 503))
async def create(
    sandbox_id: SandboxId, context: Ctx, body: schemas.SnapshotRequest | None = None
) -> schemas.Snapshot:
    """Save the sandbox as it is now. It runs on, or stays paused; the snapshot outlives it.

    Under a name that exists, that snapshot keeps its id and gets the new content.
    """
    name, memory = (body.name, body.memory) if body is not None else (None, None)
    return convert.snapshot(await context.orchestrator.create_snapshot(sandbox_id, name, memory))


@router.get("/snapshots", responses=errors(400))
async def list_page(
    context: Ctx,
    response: Response,
    sandbox_id: Annotated[str | None, Query(alias="sandboxID", description="Snapshots of this sandbox")] = None,
    name: Annotated[str | None, Query(description="Name or id; with a :tag only that one")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
) -> list[schemas.Snapshot]:
    """Snapshots, newest first. The ``x-next-token`` header leads to the next page."""
    page = await context.orchestrator.snapshots(sandbox_id or None, name or None, limit, next_token or None)
    if page.next_token is not None:
        response.headers["x-next-token"] = page.next_token
    return [convert.snapshot(saved) for saved in page.items]


@router.get("/snapshots/{snapshotID:path}", responses=errors(404))
async def get(snapshotID: str, context: Ctx) -> schemas.Snapshot:  # noqa: N803
    """By id, name, or name:tag."""
    return convert.snapshot(await context.orchestrator.snapshot(snapshotID))


@router.delete("/snapshots/{snapshotID:path}", status_code=204, responses=errors(404))
async def delete(snapshotID: str, context: Ctx) -> None:  # noqa: N803
    """Sandboxes made from it are not affected."""
    await context.orchestrator.delete_snapshot(snapshotID)
