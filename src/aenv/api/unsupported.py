"""E2B endpoints that its SDKs and tools call and this server does not have: 501, which says so.

Without these the SDK would take the 404 of an unknown path for a thing that does not exist. They are listed in
docs/reference/compatibility.md.
"""

from fastapi import APIRouter

from aenv.api.errors import MissingFeatureError

router = APIRouter(include_in_schema=False)

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def _refuse(path: str, methods: list[str], message: str, hint: str = "") -> None:
    async def refuse() -> None:
        raise MissingFeatureError(message, hint)

    router.add_api_route(path, refuse, methods=methods)


for _path in ("/teams/{teamID}/metrics", "/teams/{teamID}/metrics/max"):
    _refuse(_path, ["GET"], "Metrics of teams are not supported by this server.", "GET /nodes has the node's counts.")
_refuse("/admin/{rest:path}", _METHODS, "E2B's administration endpoints are not supported by this server.")
