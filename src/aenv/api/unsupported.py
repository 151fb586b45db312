"""E2B endpoints that its SDKs and tools call and this server does not have: 501, which says so.

Without these the SDK would take the 404 of an unknown path for a sandbox or a volume that does not exist. They are
listed in docs/reference/compatibility.md.
"""

from fastapi import APIRouter

from aenv.api.errors import MissingFeatureError

router = APIRouter(include_in_schema=False)

CONTENT_PREFIX = "/volumecontent/"  # asked with a volume's own token, so the gate lets it through to be refused here

_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def _refuse(path: str, methods: list[str], message: str, hint: str = "") -> None:
    async def refuse() -> None:
        raise MissingFeatureError(message, hint)

    router.add_api_route(path, refuse, methods=methods)


_refuse(
    CONTENT_PREFIX + "{volumeID}/{rest:path}",
    _METHODS,
    "Volumes have no content on this server.",
    "Write files into a sandbox instead.",
)
for _path in ("/teams/{teamID}/metrics", "/teams/{teamID}/metrics/max"):
    _refuse(_path, ["GET"], "Metrics of teams are not supported by this server.", "GET /nodes has the node's counts.")
_refuse("/admin/{rest:path}", _METHODS, "E2B's administration endpoints are not supported by this server.")
