"""Secrets. Values go in and never come out."""

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from aenv.accounts.secrets import Secret
from aenv.api import bodies
from aenv.api.context import Ctx, errors
from aenv.api.listing import page

router = APIRouter(tags=["secrets"])

SecretId = Annotated[str, Path(alias="secretID", description="Identifier (sec_...) or name")]


@router.get("/secrets", responses=errors(400))
async def list_page(
    context: Ctx,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=100)] = 100,
    next_token: Annotated[str | None, Query(alias="nextToken")] = None,
) -> list[bodies.Secret]:
    """By name. The ``x-next-token`` header leads to the next page."""
    found = [(secret.name, secret) for secret in context.services.secrets.list()]
    chosen, token = page(found, limit, next_token or None)
    if token is not None:
        response.headers["x-next-token"] = token
    return [_secret(secret) for secret in chosen]


@router.post("/secrets", status_code=201, responses=errors(400, 409))
async def create(body: bodies.NewSecret, context: Ctx) -> bodies.Secret:
    return _secret(context.services.secrets.create(body.name, body.value, body.metadata or {}))


@router.get("/secrets/{secretID}", responses=errors(404))
async def get(secret_id: SecretId, context: Ctx) -> bodies.Secret:
    return _secret(context.services.secrets.get(secret_id))


@router.post("/secrets/{secretID}", responses=errors(400, 404))
async def update(secret_id: SecretId, body: bodies.SecretUpdate, context: Ctx) -> bodies.Secret:
    """A new version of the value; ``metadata`` replaces what there was, if given."""
    return _secret(context.services.secrets.update(secret_id, body.value, body.metadata))


@router.delete("/secrets/{secretID}", status_code=204, responses=errors(404))
async def delete(secret_id: SecretId, context: Ctx) -> None:
    context.services.secrets.delete(secret_id)


def _secret(value: Secret) -> bodies.Secret:
    return bodies.Secret(
        secret_id=value.id,
        name=value.name,
        current_version=value.version,
        metadata=dict(value.metadata),
        created_at=value.created_at,
        updated_at=value.updated_at,
    )
