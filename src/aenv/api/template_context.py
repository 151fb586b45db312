"""How the template routers get at the service."""

from typing import Annotated

from fastapi import Depends, Path, Request

from aenv.api.errors import UnsupportedError
from aenv.api.template_uploads import UploadLinks
from aenv.template.service import TemplateService


def service_or_none(request: Request) -> TemplateService | None:
    service: TemplateService | None = getattr(request.app.state, "templates", None)
    return service


def _service(request: Request) -> TemplateService:
    service = service_or_none(request)
    if service is None:
        raise UnsupportedError("Templates cannot be built on this server.")
    return service


def _links(request: Request) -> UploadLinks:
    links: UploadLinks | None = getattr(request.app.state, "upload_links", None)
    if links is None:
        raise UnsupportedError("Templates cannot be built on this server.")
    return links


Service = Annotated[TemplateService, Depends(_service)]
ServiceOrNone = Annotated[TemplateService | None, Depends(service_or_none)]
Links = Annotated[UploadLinks, Depends(_links)]
TemplateRef = Annotated[str, Path(alias="templateID", description="Id or name; a name may be followed by :tag")]
BuildId = Annotated[str, Path(alias="buildID")]
