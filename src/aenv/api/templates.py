"""Template listings, look-ups, changes."""

from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Query, Response

from aenv.api import template_convert as convert
from aenv.api import template_schemas as schemas
from aenv.api.context import Context, Ctx, errors
from aenv.api.listing import page
from aenv.api.template_context import Service, ServiceOrNone, TemplateRef
from aenv.errors import InvalidRequestError, NotFoundError, SnapshotNotFoundError, TemplateNotFoundError
from aenv.orchestrator import catalog
from aenv.template.service import TemplateService

router = APIRouter(tags=["templates"])


async def _all(context: Context, service: TemplateService | None) -> list[schemas.Template]:
    """Oldest first; templates without a finished build among them."""
    found = [
        convert.template(template, service.builds_of(template.id) if service else ())
        for template in await context.orchestrator.templates()
    ]
    if service is not None:
        found += [
            convert.pending(build, len(service.builds_of(build.template_id)), service.envd_version)
            for build in service.pending()
        ]
    return sorted(found, key=lambda template: (template.created_at, template.template_id))


@router.get("/templates", deprecated=True, responses=errors())
async def list_all(context: Ctx, service: ServiceOrNone) -> list[schemas.Template]:
    return await _all(context, service)


@router.get("/v2/templates", responses=errors(400))
async def list_page(
    context: Ctx,
    service: ServiceOrNone,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
) -> list[schemas.Template]:
    """Templates, newest first. The ``x-next-token`` header leads to the next page."""
    found = (await _all(context, service))[::-1]
    chosen, token = page([(item.template_id, item) for item in found], limit, next_token or None)
    if token is not None:
        response.headers["x-next-token"] = token
    return chosen


@router.get("/templates/aliases/{alias:path}", responses=errors(404))
async def by_alias(alias: str, context: Ctx, service: ServiceOrNone) -> schemas.TemplateAlias:
    """Whether a template or a snapshot of that name, id, ``name:tag`` or ``id:tag`` exists."""
    try:
        if service is not None:
            return schemas.TemplateAlias(template_id=service.template_id(alias), public=True)
        template = catalog.resolve(await context.orchestrator.templates(), {}, alias)
        return schemas.TemplateAlias(template_id=template.id, public=template.public)
    except (InvalidRequestError, NotFoundError):
        if service is not None and service.has_name(alias.partition(":")[0]):
            raise TemplateNotFoundError(alias[:200]) from None  # it is a template's, which has no such tag
        with suppress(SnapshotNotFoundError):
            return schemas.TemplateAlias(template_id=(await context.orchestrator.snapshot(alias)).id, public=True)
        raise TemplateNotFoundError(alias[:200]) from None


@router.patch("/v2/templates/{templateID:path}", responses=errors(400, 404))
@router.patch("/templates/{templateID:path}", deprecated=True, responses=errors(400, 404))
async def update(template_id: TemplateRef, body: schemas.TemplateUpdate, service: Service) -> schemas.UpdatedTemplate:
    """``public`` is kept and shown; every key of a node sees all of its templates."""
    template = service.update(template_id, public=body.public)
    return schemas.UpdatedTemplate(names=list(template.aliases))


@router.delete("/templates/{templateID:path}", status_code=204, responses=errors(400, 404))
async def delete(template_id: TemplateRef, context: Ctx, service: ServiceOrNone) -> None:
    """Cancels its builds. Sandboxes that were made from it live on. E2B's SDKs delete snapshots here as well."""
    try:
        if service is None:
            raise TemplateNotFoundError(template_id)
        await service.delete(template_id)
    except TemplateNotFoundError as error:
        try:
            await context.orchestrator.delete_snapshot(template_id)
        except SnapshotNotFoundError:
            raise error from None


# The last of its method: the path of a namespaced name would take in every route below it.
@router.get("/templates/{templateID:path}", response_model_exclude_none=True, responses=errors(400, 404))
async def get(
    template_id: TemplateRef,
    context: Ctx,
    service: ServiceOrNone,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
) -> schemas.TemplateWithBuilds:
    """With its builds, newest first. The ``x-next-token`` header leads to the next page of them."""
    template = catalog.find(await context.orchestrator.templates(), template_id.partition(":")[0])
    if template is not None:
        found = convert.with_builds(template, service.builds_of(template.id) if service else ())
    elif service is not None:
        found = convert.with_builds(None, service.builds_of(service.template_id(template_id)))
    else:
        raise TemplateNotFoundError(template_id)
    found.builds, token = page([(build.build_id, build) for build in found.builds], limit, next_token or None)
    if token is not None:
        response.headers["x-next-token"] = token
    return found
