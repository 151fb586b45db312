"""E2B endpoints that the SDK calls on a sandbox and this server does not have.

Without these the SDK would take the 404 of an unknown path for a sandbox that does not exist.
"""

from fastapi import APIRouter

from aenv.api.context import SandboxId
from aenv.api.errors import UnsupportedError

router = APIRouter(include_in_schema=False)


def _refuse(name: str) -> None:
    method, path = name.split()

    async def refuse(sandbox_id: SandboxId) -> None:
        raise UnsupportedError(f"{name} is not supported by this server.")

    router.add_api_route(path, refuse, methods=[method])


for _name in (
    "PUT /sandboxes/{sandboxID}/network",
    "POST /sandboxes/{sandboxID}/snapshots",
    "GET /sandboxes/{sandboxID}/metrics",
    "GET /sandboxes/{sandboxID}/logs",
    "GET /v2/sandboxes/{sandboxID}/logs",
):
    _refuse(_name)
