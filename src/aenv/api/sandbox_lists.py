"""Listings of sandboxes."""

from datetime import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response

from aenv.api import convert, schemas
from aenv.api.context import Ctx, errors
from aenv.api.listing import parse_metadata, parse_states
from aenv.errors import InvalidRequestError
from aenv.orchestrator.model import SandboxFilter

router = APIRouter(tags=["sandboxes"])

_PAGE = 100
_RUNNING = frozenset({"running"})

Metadata = Annotated[
    str | None, Query(description='Filter such as "user=abc&app=prod", each key and value URL-encoded')
]


@router.get("/sandboxes", deprecated=True, response_model_exclude_none=True, responses=errors(400))
async def list_running(context: Ctx, metadata: Metadata = None) -> list[schemas.ListedSandbox]:
    """All running sandboxes. Use GET /v2/sandboxes, which has pages."""
    where = SandboxFilter(states=_RUNNING, metadata=parse_metadata(metadata))
    found: list[schemas.ListedSandbox] = []
    token = None
    while True:
        page = await context.orchestrator.list(where, _PAGE, token)
        found += map(convert.listed, page.items)
        token = page.next_token
        if token is None:
            return found


@router.get("/v2/sandboxes", response_model_exclude_none=True, responses=errors(400))
async def list_page(
    context: Ctx,
    response: Response,
    metadata: Metadata = None,
    state: Annotated[list[str] | None, Query(description="running, paused; comma-separated or repeated")] = None,
    template: Annotated[str | None, Query(description="Template id or alias")] = None,
    started_after: Annotated[
        datetime | None, Query(alias="startedAfter", description="Started at or after this moment")
    ] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="By start time")] = "desc",
    limit: Annotated[int, Query(ge=1, le=_PAGE)] = _PAGE,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
) -> list[schemas.ListedSandbox]:
    """Sandboxes, newest first, running and paused by default.

    The ``x-next-token`` header leads to the next page; ``x-total-running`` counts running ones on all pages.
    """
    if started_after is not None and started_after.tzinfo is None:
        raise InvalidRequestError("startedAfter: needs a time zone, such as 2026-01-31T12:00:00Z.")
    where = SandboxFilter(
        states=parse_states(state or ()),
        metadata=parse_metadata(metadata),
        template=template,
        started_after=started_after,
        newest_first=order == "desc",
    )
    page = await context.orchestrator.list(where, limit, next_token or None)
    if page.next_token is not None:
        response.headers["x-next-token"] = page.next_token
    if not where.states or "running" in where.states:
        response.headers["x-total-running"] = str(page.running)
    return [convert.listed(item) for item in page.items]
