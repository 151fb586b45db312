"""The server's ASGI application: sandbox traffic to the proxy, everything else to the API."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version

from fastapi import Depends, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from aenv.api import (
    accounts,
    auth,
    cold,
    errors,
    health,
    images,
    observe,
    publish,
    sandbox_lists,
    sandboxes,
    secrets,
    snapshots,
    template_builds,
    template_tags,
    templates,
    unsupported,
    volume_content,
    volumes,
)
from aenv.api.browsers import OPEN, Forwarded, cors, from_browser
from aenv.api.context import Context, Services
from aenv.api.limits import BodyLimit
from aenv.api.template_uploads import PREFIX as UPLOADS_PREFIX
from aenv.api.template_uploads import UploadLinks, Uploads
from aenv.config import Settings
from aenv.orchestrator.interface import Orchestrator
from aenv.proxy.app import SandboxProxy
from aenv.proxy.routing import ENVD_PORT, Target
from aenv.template.export import ImageExport
from aenv.template.service import TemplateService


class Application:
    """Dispatches before anything of the API runs. ``proxy.drop(id)`` cuts a sandbox's connections."""

    def __init__(self, api: FastAPI, proxy: SandboxProxy) -> None:
        self.api = api
        self.proxy = proxy
        self._browser_proxy = cors(Forwarded(proxy))
        self._uploads: ASGIApp | None = None

    def serve_templates(self, service: TemplateService, settings: Settings) -> None:
        """Let templates be built. Without this they are listed only."""
        links = UploadLinks()
        self._uploads = Uploads(
            links, service.archives, limit=settings.max_upload << 20, reserve=settings.reserve_disk << 20
        )
        self.api.state.templates = service
        self.api.state.upload_links = links

    def serve_exports(self, exports: ImageExport) -> None:
        """Let snapshots be published. Without this it is refused."""
        self.api.state.exports = exports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            target = self.proxy.match(scope)
            if target is None and scope["type"] == "http":
                target = await self.proxy.match_signed(scope)
            if target is not None:
                if from_browser(scope) and isinstance(target, Target) and target.port == ENVD_PORT:
                    await self._browser_proxy(Forwarded.scope(scope, target), receive, send)
                else:
                    await self.proxy(target, scope, receive, send)
                return
            if scope["type"] == "websocket":
                await send({"type": "websocket.close"})  # the API has none: 403 before the handshake
                return
            if self._uploads is not None and scope["path"].startswith(UPLOADS_PREFIX):
                await self._uploads(scope, receive, send)
                return
        await self.api(scope, receive, send)


def create_app(
    settings: Settings, orchestrator: Orchestrator, api_key_valid: Callable[[str], bool], services: Services
) -> Application:
    """The API and the proxy over ``orchestrator``, whose life is the caller's business.

    ``api_key_valid`` is called for every API request and must compare in constant time.
    """
    proxy = SandboxProxy(orchestrator, settings.domain)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        proxy.close()

    api = FastAPI(
        title="AgentENV",
        summary="Sandboxes for agents; compatible with the E2B API",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
    )
    api.state.context = Context(orchestrator, settings, services)
    keyed = [Depends(auth.documented)]
    # The first that matches serves: ``observe`` has /sandboxes/metrics, which is no sandbox's id.
    # ``templates`` has /templates/{name} with slashes in the name, so its kin come before it, most special first.
    for module in (
        observe,
        sandbox_lists,
        sandboxes,
        cold,
        images,
        publish,
        snapshots,
        unsupported,
        template_tags,
        template_builds,
        templates,
        accounts,
        secrets,
        volumes,
    ):
        api.include_router(module.router, dependencies=keyed)
    api.include_router(volume_content.router)
    api.include_router(health.router)
    # The last added runs first: browsers' questions before a request are answered, then the key is checked, then the
    # size, and the boundary is nearest to the routes.
    errors.install(api)
    api.add_middleware(BodyLimit)
    api.add_middleware(auth.ApiKeyGate, api_key_valid=api_key_valid)
    api.add_middleware(CORSMiddleware, **OPEN)
    return Application(api, proxy)


def _version() -> str:
    try:
        return version("aenv")
    except PackageNotFoundError:
        return "0"
