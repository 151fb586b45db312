"""Publishing: a snapshot's root file system as an image in a container registry. Not in E2B's API."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import Field, StrictBool

from aenv.api.context import Ctx, errors
from aenv.api.errors import MissingFeatureError
from aenv.api.schemas import Text, _Model
from aenv.errors import InvalidRequestError
from aenv.template.export import ImageExport

router = APIRouter(tags=["snapshots"])


class PublishRequest(_Model):
    image: Text = Field(min_length=1, max_length=512, description="Where to: registry/repository:tag")
    username: Text | None = Field(None, description="For the registry; else the node's own credentials are used")
    password: Text | None = None
    environment: StrictBool = Field(
        False, description="With the snapshot's environment variables, which may be secrets; else PATH alone"
    )


class PublishedImage(_Model):
    image: str
    digest: str = Field(description="Of the manifest")
    layers: int
    pushed_layers: int = Field(description="Those that the registry did not have")
    pushed_bytes: int


def _exports(request: Request) -> ImageExport:
    exports: ImageExport | None = getattr(request.app.state, "exports", None)
    if exports is None:
        raise MissingFeatureError("Snapshots cannot be published by this server.")
    return exports


@router.post("/snapshots/{snapshotID:path}/publish", status_code=201, responses=errors(400, 404, 409, 501, 503))
async def publish(
    snapshotID: str,  # noqa: N803
    body: PublishRequest,
    context: Ctx,
    exports: Annotated[ImageExport, Depends(_exports)],
) -> PublishedImage:
    """Push the snapshot's disk as an overlaybd image. What the registry has already is not sent again."""
    if (body.username is None) != (body.password is None):
        raise InvalidRequestError("username and password go together.")
    login = None if body.username is None or body.password is None else (body.username, body.password)
    saved = await context.orchestrator.snapshot(snapshotID)
    done = await exports.publish(saved, body.image.strip(), login, environment=body.environment)
    return PublishedImage(
        image=str(done.reference),
        digest=done.digest,
        layers=done.layers,
        pushed_layers=done.pushed_layers,
        pushed_bytes=done.pushed_bytes,
    )
