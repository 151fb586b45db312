"""Building templates: request, upload, start, watch."""

from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request

from aenv.api import template_convert as convert
from aenv.api import template_schemas as schemas
from aenv.api.context import errors
from aenv.api.errors import UnsupportedError
from aenv.api.template_context import BuildId, Links, Service, TemplateRef
from aenv.errors import InvalidRequestError
from aenv.template.journal import around, at_least

router = APIRouter(tags=["templates"])

MOST_ENTRIES = 100  # log entries of one answer, E2B's limit
Limit = Annotated[int, Query(ge=0, le=MOST_ENTRIES)]


@router.post("/v3/templates", status_code=202, responses=errors(400))
async def request_v3(body: schemas.NewTemplate, service: Service) -> schemas.RequestedTemplate:
    """Begin a build of a new or an existing template. Its files and steps follow."""
    name = body.name or body.alias
    if name is None:
        raise InvalidRequestError("name: is needed.")
    build = service.request(name, body.tags, body.cpu_count, body.memory_mb, body.min_free_disk_mb or 0)
    return schemas.RequestedTemplate(
        template_id=build.template_id,
        build_id=build.id,
        public=True,
        names=[build.name],
        aliases=[build.name],
        tags=list(build.tags),
    )


@router.post("/v2/templates", status_code=202, deprecated=True, responses=errors(400))
async def request_v2(body: schemas.NewTemplateV2, service: Service) -> schemas.Template:
    build = service.request(body.alias, [], body.cpu_count, body.memory_mb)
    return convert.pending(build, len(service.builds_of(build.template_id)), service.envd_version)


@router.post("/templates", include_in_schema=False)
@router.post("/templates/{templateID}", include_in_schema=False)
@router.post("/templates/{templateID}/builds/{buildID}", include_in_schema=False)
async def request_v1() -> None:
    raise UnsupportedError(
        "Building from a pushed Docker image (E2B's first build API) is not supported by this server.",
        "Use the SDK's Template builder, or POST /v3/templates.",
    )


@router.get("/templates/{templateID:path}/files/{hash}", status_code=201, responses=errors(400, 404))
async def upload_link(
    template_id: TemplateRef, hash: str, request: Request, service: Service, links: Links
) -> schemas.FileUpload:
    """Where to PUT the archive of a COPY step's files, and whether it is here already."""
    present = service.archive_present(template_id, hash)
    return schemas.FileUpload(present=present, url=links.make(str(request.base_url), hash))


@router.post("/v2/templates/{templateID:path}/builds/{buildID}", status_code=202, responses=errors(400, 404))
async def start(template_id: TemplateRef, build_id: BuildId, body: schemas.BuildStart, service: Service) -> None:
    """Build in the background; the status tells how it goes."""
    await service.start(template_id, build_id, convert.build_start(body))


@router.delete("/templates/{templateID:path}/builds/{buildID}", status_code=204, responses=errors(400, 404, 409))
async def cancel(template_id: TemplateRef, build_id: BuildId, service: Service) -> None:
    """Cancel a build that waits or is under way, and forget it; its template stays as it is. Not in E2B's API."""
    await service.cancel(template_id, build_id)


@router.get(
    "/templates/{templateID:path}/builds/{buildID}/status",
    response_model_exclude_none=True,
    responses=errors(400, 404),
)
async def status(
    template_id: TemplateRef,
    build_id: BuildId,
    service: Service,
    offset: Annotated[int, Query(alias="logsOffset", ge=0)] = 0,
    limit: Limit = MOST_ENTRIES,
    level: schemas.Level | None = None,
) -> schemas.BuildInfo:
    """The build's state, and its log from ``logsOffset`` on. The state is at least as old as the log."""
    build = service.build(template_id, build_id)
    entries = service.logs(build)
    return convert.build_info(build, entries, at_least(entries, level)[offset : offset + limit])


@router.get(
    "/templates/{templateID:path}/builds/{buildID}/logs",
    response_model_exclude_none=True,
    responses=errors(400, 404),
)
async def logs(
    template_id: TemplateRef,
    build_id: BuildId,
    service: Service,
    cursor: Annotated[int | None, Query(ge=0, description="Milliseconds since 1970")] = None,
    limit: Limit = MOST_ENTRIES,
    direction: Annotated[str, Query(pattern="^(forward|backward)$")] = "forward",
    level: schemas.Level | None = None,
    source: Annotated[Literal["temporary", "persistent"] | None, Query(description="There is one log")] = None,
) -> schemas.BuildLogs:
    entries = at_least(service.logs(service.build(template_id, build_id)), level)
    return schemas.BuildLogs(
        logs=convert.log_entries(around(entries, cursor, limit, backward=direction == "backward"))
    )
