"""Cold starts: a sandbox from a container image. AgentENV's ``/sandboxes-cold``, which E2B does not have."""

from fastapi import APIRouter, Response
from pydantic import Field, StrictInt

from aenv.api import convert, schemas
from aenv.api.context import Ctx, errors
from aenv.api.drives import AttachedDrive, drives
from aenv.errors import InvalidRequestError
from aenv.orchestrator.boot import allowed_arguments
from aenv.orchestrator.model import ColdMachine

router = APIRouter(tags=["sandboxes"])

_TIMEOUT = 15  # seconds, AgentENV's default
_MAX_IMAGE = 512  # characters: the longest reference has 255 of name, 128 of tag and 136 of digest
_MAX_ARGUMENTS = 512  # characters: a kernel's command line has 2048, half of which may be paths of drives


class NewColdSandbox(schemas.SandboxRequest):
    """Body of POST /sandboxes-cold."""

    image: schemas.Text = Field(
        min_length=1, max_length=_MAX_IMAGE, description="Reference of an OCI or Docker image"
    )
    cpu_count: StrictInt | None = Field(None, description="The node's default if left out")
    memory_mb: StrictInt | None = Field(None, description="MiB; the node's default if left out")
    disk_size_mb: StrictInt | None = Field(
        None, description="MiB of the root disk; the node's default if left out or 0"
    )
    attached_drives: list[AttachedDrive] | None = Field(
        None, description="Images whose files are put into folders of the root disk, and are captured with it"
    )
    extra_boot_args: schemas.Text | None = Field(
        None, description="More kernel parameters; what the node's boot_args_allow does not list is left out"
    )


@router.post("/sandboxes-cold", status_code=201, response_model_exclude_none=True, responses=errors(400, 503))
async def create(body: NewColdSandbox, context: Ctx, response: Response) -> schemas.Sandbox:
    """Boot a sandbox from a container image, without making a template of it.

    Pulling an image for the first time may take minutes; the next cold start of it takes as long as the guest's
    kernel. Environment, working directory and user are the image's; afterwards it is a sandbox like any other.
    """
    spec = convert.spec(body, body.image.strip(), context.settings, default_timeout=_TIMEOUT, always_secure=False)
    arguments = allowed_arguments(body.extra_boot_args or "", context.settings.boot_args_allow)
    if len(" ".join(arguments)) > _MAX_ARGUMENTS:
        raise InvalidRequestError(f"extraBootArgs: more than {_MAX_ARGUMENTS} characters.")
    machine = ColdMachine(
        vcpus=body.cpu_count,
        memory_mib=body.memory_mb,
        disk_mib=body.disk_size_mb,
        boot_arguments=arguments,
        drives=drives(body.attached_drives or ()),
    )
    created = await context.orchestrator.create_cold(spec, machine)
    response.headers["x-agentenv-sandbox-id"] = created.id
    return convert.sandbox(created, context.settings)
