"""Sandbox endpoints: creation, single sandboxes, lifecycle."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Response

from aenv.api import convert, schemas
from aenv.api.context import Context, Ctx, SandboxId, errors
from aenv.api.errors import MissingFeatureError, describe
from aenv.errors import InvalidRequestError
from aenv.orchestrator.model import ForkOutcome

router = APIRouter(tags=["sandboxes"])

_V1_TIMEOUT = 15  # seconds, E2B's defaults
_V2_TIMEOUT = 300


IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        min_length=1,
        max_length=255,
        pattern="^[a-z0-9-]+$",
        description="Repeated under the same key, a request returns the sandbox that it made, while that exists",
    ),
]
_CREATE_ERRORS = errors(400, 404, 422, 501, 503)


@router.post("/sandboxes", status_code=201, response_model_exclude_none=True, responses=_CREATE_ERRORS)
async def create(
    body: schemas.NewSandbox, context: Ctx, response: Response, key: IdempotencyKey = None
) -> schemas.Sandbox:
    """Create a sandbox from a template or a snapshot. Its time over, it pauses, unless ``autoPause`` is false."""
    return await _create(body, context, response, key, default_timeout=_V1_TIMEOUT, always_secure=False)


@router.post("/v2/sandboxes", status_code=201, response_model_exclude_none=True, responses=_CREATE_ERRORS)
async def create_v2(
    body: schemas.NewSandbox, context: Ctx, response: Response, key: IdempotencyKey = None
) -> schemas.Sandbox:
    """As POST /sandboxes; envd always asks for the access token, and the default time to live is 300 s."""
    return await _create(body, context, response, key, default_timeout=_V2_TIMEOUT, always_secure=True)


async def _create(
    body: schemas.NewSandbox,
    context: Context,
    response: Response,
    key: str | None,
    *,
    default_timeout: int,
    always_secure: bool,
) -> schemas.Sandbox:
    spec = convert.spec(
        body,
        body.template_id,
        context.settings,
        default_timeout=default_timeout,
        always_secure=always_secure,
        idempotency_key=key,
    )
    created = await context.orchestrator.create(spec)
    response.headers["x-agentenv-sandbox-id"] = created.id
    return convert.sandbox(created, context.settings)


@router.get("/sandboxes/{sandboxID}", response_model_exclude_none=True, responses=errors(404))
async def get(sandbox_id: SandboxId, context: Ctx) -> schemas.SandboxDetail:
    return convert.detail(await context.orchestrator.get(sandbox_id), context.settings)


@router.delete("/sandboxes/{sandboxID}", status_code=204, responses=errors(404))
async def kill(sandbox_id: SandboxId, context: Ctx) -> None:
    await context.orchestrator.kill(sandbox_id)


@router.post("/sandboxes/{sandboxID}/pause", status_code=204, responses=errors(400, 404, 409, 503))
async def pause(sandbox_id: SandboxId, context: Ctx, body: schemas.PauseRequest | None = None) -> None:
    """Stop the sandbox and keep its disk and memory; with ``memory: false`` its disk, from which it boots again."""
    memory = body is None or body.memory is not False
    strict = body is not None and bool(body.require_healthy_guest)
    await context.orchestrator.pause(sandbox_id, memory=memory, strict=strict)


@router.post(
    "/sandboxes/{sandboxID}/resume",
    status_code=201,
    deprecated=True,
    response_model_exclude_none=True,
    responses=errors(400, 404, 409, 503),
)
async def resume(sandbox_id: SandboxId, context: Ctx, body: schemas.ResumeRequest | None = None) -> schemas.Sandbox:
    body = body or schemas.ResumeRequest()
    timeout = convert.seconds(body.timeout, context.settings)
    reboot = body.memory is False
    resumed = await context.orchestrator.resume(sandbox_id, timeout, body.auto_pause, reboot=reboot)
    return convert.sandbox(resumed, context.settings)


@router.post(
    "/sandboxes/{sandboxID}/connect",
    response_model_exclude_none=True,
    responses={
        201: {"model": schemas.Sandbox, "description": "It was paused and is resumed"},
        **errors(400, 404, 409, 503),
    },
)
async def connect(
    sandbox_id: SandboxId, body: schemas.ConnectRequest, context: Ctx, response: Response
) -> schemas.Sandbox:
    """Resume the sandbox if it is paused. Its end of life is only ever moved back.

    With ``memory: false`` it boots from its disk, whatever memory its pause kept.
    """
    return await _connect(sandbox_id, body.timeout, body.memory, context, response)


@router.post(
    "/v2/sandboxes/{sandboxID}/connect",
    response_model_exclude_none=True,
    responses={
        201: {"model": schemas.Sandbox, "description": "It was paused and is resumed"},
        **errors(400, 404, 409, 503),
    },
)
async def connect_v2(
    sandbox_id: SandboxId, context: Ctx, response: Response, body: schemas.ConnectRequestV2 | None = None
) -> schemas.Sandbox:
    """As POST /sandboxes/{sandboxID}/connect, with a default time to live of 300 s."""
    body = body or schemas.ConnectRequestV2()
    return await _connect(sandbox_id, body.timeout, body.memory, context, response)


async def _connect(
    sandbox_id: str, timeout: int, memory: bool | None, context: Context, response: Response
) -> schemas.Sandbox:
    timeout = convert.seconds(timeout, context.settings)
    connected, resumed = await context.orchestrator.connect(sandbox_id, timeout, reboot=memory is False)
    response.status_code = 201 if resumed else 200
    return convert.sandbox(connected, context.settings)


@router.get("/sandboxes/{sandboxID}/custom-extension-params", responses=errors(404))
async def extension_params(sandbox_id: SandboxId, context: Ctx) -> dict[str, Any]:
    """Always empty: this server has no custom extension, and refuses sandboxes with parameters for one."""
    await context.orchestrator.get(sandbox_id)
    return {}


@router.patch("/sandboxes/{sandboxID}/custom-extension-params", responses=errors(400, 404, 501))
async def patch_extension_params(sandbox_id: SandboxId, body: dict[str, Any], context: Ctx) -> dict[str, Any]:
    """What a patch means is an extension's business, and this server has none."""
    await context.orchestrator.get(sandbox_id)
    raise MissingFeatureError("No custom extension is configured on this server.", "Leave its parameters out.")


@router.post("/sandboxes/{sandboxID}/timeout", status_code=204, responses=errors(400, 404, 409))
async def set_timeout(sandbox_id: SandboxId, body: schemas.TimeoutRequest, context: Ctx) -> None:
    """The sandbox ends ``timeout`` seconds from now, sooner or later than before."""
    await context.orchestrator.set_timeout(sandbox_id, convert.seconds(body.timeout, context.settings))


@router.post("/sandboxes/{sandboxID}/refreshes", status_code=204, responses=errors(400, 404))
async def refresh(sandbox_id: SandboxId, context: Ctx, body: schemas.RefreshRequest | None = None) -> None:
    """The sandbox lives at least ``duration`` more seconds."""
    duration = (body or schemas.RefreshRequest()).duration
    limit = convert.MAX_REFRESH
    await context.orchestrator.refresh(
        sandbox_id, convert.seconds(duration, context.settings, field="duration", limit=limit)
    )


@router.put("/sandboxes/{sandboxID}/network", status_code=204, responses=errors(400, 404, 409))
async def update_network(sandbox_id: SandboxId, body: schemas.NetworkUpdate, context: Ctx) -> None:
    """Replace the egress policy of a running sandbox, open connections included."""
    await context.orchestrator.update_network(sandbox_id, convert.egress(body))


@router.post(
    "/sandboxes/{sandboxID}/fork",
    status_code=201,
    response_model_exclude_none=True,
    responses=errors(400, 404, 409, 503),
)
async def fork(
    sandbox_id: SandboxId, context: Ctx, body: schemas.ForkRequest | None = None
) -> list[schemas.ForkResult]:
    """Start ``count`` sandboxes from this one as it is now. One result per child: the sandbox or its error."""
    body = body or schemas.ForkRequest()
    most = context.settings.max_fork
    if not 1 <= body.count <= most:
        raise InvalidRequestError(f"count: must be from 1 to {most}, not {body.count}.")
    timeout = None if body.timeout is None else convert.seconds(body.timeout, context.settings)
    outcomes = await context.orchestrator.fork(sandbox_id, body.count, timeout)
    return [_fork_result(outcome, context) for outcome in outcomes]


def _fork_result(outcome: ForkOutcome, context: Context) -> schemas.ForkResult:
    if outcome.sandbox is not None:
        return schemas.ForkResult(sandbox=convert.sandbox(outcome.sandbox, context.settings))
    return schemas.ForkResult(error=describe(outcome.error or RuntimeError("fork without outcome")))
