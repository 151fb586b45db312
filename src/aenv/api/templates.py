"""Template listings and look-ups."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from aenv.api import convert, schemas
from aenv.api.context import Ctx, errors
from aenv.api.listing import page
from aenv.errors import TemplateNotFoundError

router = APIRouter(tags=["templates"])


@router.get("/templates", deprecated=True, responses=errors())
async def list_all(context: Ctx) -> list[schemas.Template]:
    return [convert.template(found) for found in await context.orchestrator.templates()]


@router.get("/v2/templates", responses=errors(400))
async def list_page(
    context: Ctx,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
) -> list[schemas.Template]:
    """Templates, newest first. The ``x-next-token`` header leads to the next page."""
    found = sorted(await context.orchestrator.templates(), key=lambda t: (t.created_at, t.id), reverse=True)
    chosen, token = page([(template.id, template) for template in found], limit, next_token or None)
    if token is not None:
        response.headers["x-next-token"] = token
    return [convert.template(template) for template in chosen]


@router.get("/templates/aliases/{alias:path}", responses=errors(404))
async def by_alias(alias: str, context: Ctx) -> schemas.TemplateAlias:
    for template in await context.orchestrator.templates():
        if alias in template.aliases or alias == template.id:
            return schemas.TemplateAlias(template_id=template.id, public=True)
    raise TemplateNotFoundError(alias)


@router.get("/templates/{templateID}", responses=errors(404))
async def get(templateID: str, context: Ctx) -> schemas.TemplateWithBuilds:  # noqa: N803
    for template in await context.orchestrator.templates():
        if templateID == template.id or templateID in template.aliases:
            return convert.template_with_builds(template)
    raise TemplateNotFoundError(templateID)
