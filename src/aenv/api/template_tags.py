"""Tags of templates: names for single builds, as in ``name:tag``."""

from fastapi import APIRouter

from aenv.api import template_schemas as schemas
from aenv.api.context import errors
from aenv.api.template_context import Service, TemplateRef

router = APIRouter(tags=["tags"])


@router.post("/templates/tags", status_code=201, responses=errors(400, 404))
async def assign(body: schemas.TagAssignment, service: Service) -> schemas.AssignedTags:
    """Make tags name the build that ``target`` names; a tag that names another build moves."""
    build_id = service.assign_tags(body.target, body.tags)
    return schemas.AssignedTags(tags=body.tags, build_id=build_id)


@router.delete("/templates/tags", status_code=204, responses=errors(400, 404))
async def remove(body: schemas.TagRemoval, service: Service) -> None:
    service.remove_tags(body.name, body.tags)


@router.get("/templates/{templateID:path}/tags", responses=errors(400, 404))
async def listed(template_id: TemplateRef, service: Service) -> list[schemas.TemplateTag]:
    """Newest first."""
    tags = service.tags(template_id).items()
    ordered = sorted(tags, key=lambda item: (item[1].created_at, item[0]), reverse=True)
    return [
        schemas.TemplateTag(tag=tag, build_id=target.build_id, created_at=target.created_at)
        for tag, target in ordered
    ]
