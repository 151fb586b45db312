"""The team, its API keys, access tokens. A node has one team, to which every valid credential belongs."""

from typing import Annotated

from fastapi import APIRouter, Path, Request

from aenv.accounts.credentials import Credential, Kind
from aenv.accounts.credentials import Mask as CredentialMask
from aenv.api import bodies
from aenv.api.auth import presented
from aenv.api.context import Ctx, errors

router = APIRouter(tags=["auth"])

KeyId = Annotated[str, Path(alias="apiKeyID")]
TokenId = Annotated[str, Path(alias="accessTokenID")]


@router.get("/teams", responses=errors())
async def teams(request: Request, context: Ctx) -> list[bodies.Team]:
    """The one team. Its ``apiKey`` is the credential of this request: others are kept as hashes only."""
    credentials = context.services.credentials
    key = next((key for key in presented(request.headers.raw) if credentials.valid(key)), "")
    return [bodies.Team(team_id=credentials.team_id, name="default", api_key=key, is_default=True)]


@router.get("/api-keys", responses=errors())
async def list_keys(context: Ctx) -> list[bodies.TeamApiKey]:
    return [_key(found) for found in context.services.credentials.list(Kind.API_KEY)]


@router.post("/api-keys", status_code=201, responses=errors(400))
async def create_key(body: bodies.NamedCredential, context: Ctx) -> bodies.CreatedTeamApiKey:
    made, value = context.services.credentials.create(Kind.API_KEY, body.name)
    return bodies.CreatedTeamApiKey(**_key(made).model_dump(by_alias=False), key=value)


@router.patch("/api-keys/{apiKeyID}", status_code=200, responses=errors(400, 404, 409))
async def rename_key(key_id: KeyId, body: bodies.NamedCredential, context: Ctx) -> None:
    context.services.credentials.rename(Kind.API_KEY, key_id, body.name)


@router.delete("/api-keys/{apiKeyID}", status_code=204, responses=errors(404, 409))
async def delete_key(key_id: KeyId, context: Ctx) -> None:
    """The key stops to work at once."""
    context.services.credentials.delete(Kind.API_KEY, key_id)


@router.post("/access-tokens", status_code=201, deprecated=True, responses=errors(400))
async def create_token(body: bodies.NamedCredential, context: Ctx) -> bodies.CreatedAccessToken:
    made, value = context.services.credentials.create(Kind.ACCESS_TOKEN, body.name)
    return bodies.CreatedAccessToken(
        id=made.id, name=made.name, token=value, mask=_mask(made.mask), created_at=made.created_at
    )


@router.delete("/access-tokens/{accessTokenID}", status_code=204, responses=errors(404))
async def delete_token(token_id: TokenId, context: Ctx) -> None:
    context.services.credentials.delete(Kind.ACCESS_TOKEN, token_id)


def _key(value: Credential) -> bodies.TeamApiKey:
    return bodies.TeamApiKey(
        id=value.id,
        name=value.name,
        mask=_mask(value.mask),
        created_at=value.created_at,
        last_used=value.last_used,
    )


def _mask(value: CredentialMask) -> bodies.Mask:
    return bodies.Mask(
        prefix=value.prefix,
        value_length=value.length,
        masked_value_prefix=value.head,
        masked_value_suffix=value.tail,
    )
