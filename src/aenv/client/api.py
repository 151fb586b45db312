"""The node's HTTP API as blocking calls, for the command line. Bodies are E2B's, as dictionaries."""

from collections.abc import Iterator
from typing import Any

from aenv.client.transport import Query, Transport, quoted

PAGE = 100  # the server's largest page
PULL_TIMEOUT = 3600.0  # seconds; a large image over a slow line

Json = dict[str, Any]


class Api:
    """Every method raises ``ApiError`` and ``UnreachableError`` of ``aenv.client.transport``."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def _get(self, path: str, query: Query | None = None) -> Any:
        return self.transport.request("GET", path, query=query).json()

    def _post(self, path: str, body: object = None) -> Any:
        return self.transport.request("POST", path, body={} if body is None else body).json()

    def _pages(self, path: str, query: Query) -> Iterator[Json]:
        token: str | None = None
        while True:
            reply = self.transport.request("GET", path, query={**query, "limit": PAGE, "nextToken": token})
            yield from reply.json()
            token = reply.headers.get("x-next-token")
            if not token:
                return

    # -- sandboxes

    def sandboxes(self, *, states: str = "running,paused", metadata: str | None = None,
                  template: str | None = None) -> list[Json]:  # fmt: skip
        """Newest first. ``metadata`` is ``key=value&…``, each part URL-encoded."""
        query = {"state": states, "metadata": metadata, "template": template}
        return list(self._pages("/v2/sandboxes", query))

    def sandbox(self, sandbox_id: str) -> Json:
        found: Json = self._get(f"/sandboxes/{quoted(sandbox_id)}")
        return found

    def create(self, body: Json) -> Json:
        made: Json = self._post("/sandboxes", body)
        return made

    def connect(self, sandbox_id: str, timeout: int) -> Json:
        """Resumes a paused sandbox; the end of life of a running one is only moved back."""
        found: Json = self._post(f"/sandboxes/{quoted(sandbox_id)}/connect", {"timeout": timeout})
        return found

    def pause(self, sandbox_id: str, *, memory: bool) -> None:
        self._post(f"/sandboxes/{quoted(sandbox_id)}/pause", {"memory": memory})

    def fork(self, sandbox_id: str, count: int, timeout: int | None) -> list[Json]:
        body = {"count": count} | ({} if timeout is None else {"timeout": timeout})
        made: list[Json] = self._post(f"/sandboxes/{quoted(sandbox_id)}/fork", body)
        return made

    def set_timeout(self, sandbox_id: str, seconds: int) -> None:
        self._post(f"/sandboxes/{quoted(sandbox_id)}/timeout", {"timeout": seconds})

    def refresh(self, sandbox_id: str, seconds: int) -> None:
        self._post(f"/sandboxes/{quoted(sandbox_id)}/refreshes", {"duration": seconds})

    def kill(self, sandbox_id: str) -> None:
        self.transport.request("DELETE", f"/sandboxes/{quoted(sandbox_id)}")

    def logs(self, sandbox_id: str, *, cursor: int | None, limit: int, backward: bool = False,
             level: str | None = None, search: str | None = None) -> list[Json]:  # fmt: skip
        """Entries from ``cursor`` (Unix milliseconds, inclusive) on, oldest first; backward: newest first."""
        query: Query = {
            "cursor": cursor,
            "limit": limit,
            "direction": "backward" if backward else "forward",
            "level": level,
            "search": search or None,
        }
        found: list[Json] = self._get(f"/v2/sandboxes/{quoted(sandbox_id)}/logs", query)["logs"]
        return found

    def metrics(self, sandbox_id: str) -> list[Json]:
        found: list[Json] = self._get(f"/sandboxes/{quoted(sandbox_id)}/metrics")
        return found

    # -- snapshots

    def snapshots(self, sandbox_id: str | None = None) -> list[Json]:
        return list(self._pages("/snapshots", {"sandboxID": sandbox_id}))

    def create_snapshot(self, sandbox_id: str, name: str | None, *, memory: bool) -> Json:
        body: Json = {"memory": memory} | ({"name": name} if name else {})
        made: Json = self._post(f"/sandboxes/{quoted(sandbox_id)}/snapshots", body)
        return made

    def delete_snapshot(self, name: str) -> None:
        self.transport.request("DELETE", f"/snapshots/{quoted(name)}")

    def publish_snapshot(self, name: str, body: Json) -> Json:
        """Pushes its root file system to a registry."""
        path = f"/snapshots/{quoted(name)}/publish"
        done: Json = self.transport.request("POST", path, body=body, timeout=PULL_TIMEOUT).json()
        return done

    # -- images

    def create_cold(self, body: Json) -> Json:
        """Boots a container image, which may have to be pulled first."""
        made: Json = self.transport.request("POST", "/sandboxes-cold", body=body, timeout=PULL_TIMEOUT).json()
        return made

    def images(self) -> list[Json]:
        """Of the node's cache, the last used first."""
        found: list[Json] = self._get("/images")
        return found

    def remove_image(self, name: str) -> None:
        self.transport.request("DELETE", f"/images/{quoted(name)}")

    def collect_images(self, capacity_mib: int | None) -> Json:
        done: Json = self._post("/images/gc", {} if capacity_mib is None else {"capacityMB": capacity_mib})
        return done

    # -- templates

    def templates(self) -> list[Json]:
        """Newest first."""
        return list(self._pages("/v2/templates", {}))

    def template(self, name: str) -> Json:
        """With its builds, newest first."""
        found: Json = self._get(f"/templates/{quoted(name)}")
        return found

    def delete_template(self, name: str) -> None:
        self.transport.request("DELETE", f"/templates/{quoted(name)}")

    def request_build(self, body: Json) -> Json:
        made: Json = self._post("/v3/templates", body)
        return made

    def start_build(self, template_id: str, build_id: str, body: Json) -> None:
        self._post(f"/v2/templates/{quoted(template_id)}/builds/{quoted(build_id)}", body)

    def cancel_build(self, template_id: str, build_id: str) -> None:
        self.transport.request("DELETE", f"/templates/{quoted(template_id)}/builds/{quoted(build_id)}")

    def build_status(self, template_id: str, build_id: str, offset: int) -> Json:
        """State, and log entries from ``offset`` on (at most 100)."""
        path = f"/templates/{quoted(template_id)}/builds/{quoted(build_id)}/status"
        found: Json = self._get(path, {"logsOffset": offset})
        return found

    def upload_link(self, template_id: str, digest: str) -> Json:
        found: Json = self._get(f"/templates/{quoted(template_id)}/files/{quoted(digest)}")
        return found

    # -- the node

    def nodes(self) -> list[Json]:
        found: list[Json] = self._get("/nodes")
        return found

    def hypervisors(self, node_id: str) -> list[Json]:
        """Takes seconds the first time after the node's host has booted."""
        found: list[Json] = self._get(f"/nodes/{quoted(node_id)}/hypervisors")
        return found

    def version(self) -> str:
        return str(self._get("/openapi.json").get("info", {}).get("version", ""))

    def team(self) -> Json:
        """Raises ApiError with status 401 when the key is not valid."""
        found: list[Json] = self._get("/teams")
        return found[0]
