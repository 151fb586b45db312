"""Starts envd as an ordinary process on a free port, and speaks to it: raw, and through the official SDK."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from e2b import Sandbox
from e2b.connection_config import ConnectionConfig
from packaging.version import Version

BINARY = Path(__file__).parents[2] / "envd/target/x86_64-unknown-linux-gnu/release/envd"
ENVD_VERSION = "0.6.4"

T = TypeVar("T")


def binary() -> Path:
    """The program under test. Fails, and never skips, where there is none."""
    path = Path(os.environ.get("AENV_ENVD_BIN") or BINARY)
    if not path.is_file():
        raise FileNotFoundError(f"no {path}: run `cargo build --release` in envd/, or set AENV_ENVD_BIN")
    return path


def wait_until(check: Callable[[], T], what: str, limit: float = 20.0) -> T:
    """Polls until ``check`` gives something true; raises TimeoutError after ``limit`` seconds."""
    deadline = time.monotonic() + limit
    while True:
        if value := check():
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {limit} s")
        time.sleep(0.005)


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Envd:
    """One daemon, as root on the host; it is the caller's to stop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind((host, port))
            self.host = host
            self.port: int = probe.getsockname()[1]
        self.process = subprocess.Popen(
            [binary(), "--listen", host, "--port", str(self.port), "--no-clock", *arguments],
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, "envd's start")

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"envd ended with status {self.process.returncode}")
        try:
            return self.request("GET", "/health").status == 204
        except OSError:
            return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(20)

    @property
    def descriptors(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())

    def children(self) -> list[int]:
        """Direct children, zombies among them."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        threads = Path(f"/proc/{self.process.pid}/task")
        texts = [text] + [(t / "children").read_text() for t in threads.iterdir()]
        return sorted({int(pid) for t in texts for pid in t.split()})

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """One HTTP/1.1 request on a connection of its own."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def rpc(self, method: str, message: Any, headers: Mapping[str, str] | None = None) -> Reply:
        """A unary call with the JSON codec; ``method`` is `Service/Method`."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        return self.request("POST", f"/{method}", json.dumps(message), sent)

    def stream(
        self, method: str, messages: list[Any], headers: Mapping[str, str] | None = None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """A streaming call with the JSON codec: the messages of the answer, and its end-of-stream message."""
        sent = {"Content-Type": "application/connect+json", **(headers or {})}
        body = b"".join(envelope(json.dumps(message).encode()) for message in messages)
        reply = self.request("POST", f"/{method}", body, sent)
        assert reply.status == 200, reply.body
        *answers, (flags, end) = envelopes(reply.body)
        assert flags == 2
        return [json.loads(data) for _, data in answers], json.loads(end)

    def sandbox(self, token: str | None = None) -> Sandbox:
        """The official SDK's object for this daemon."""
        headers = {"X-Access-Token": token} if token else {}
        config = ConnectionConfig(
            sandbox_url=f"http://{self.host}:{self.port}", api_key="x", extra_sandbox_headers=headers
        )
        return Sandbox(
            sandbox_id="test",
            sandbox_domain="localhost",
            envd_version=Version(ENVD_VERSION),
            envd_access_token=token,
            traffic_access_token=None,
            connection_config=config,
        )


def basic(user: str) -> dict[str, str]:
    """The header that names the user of a call."""
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:".encode()).decode()}


def envelope(data: bytes, flags: int = 0) -> bytes:
    return struct.pack(">BI", flags, len(data)) + data


def envelopes(body: bytes) -> list[tuple[int, bytes]]:
    found = []
    at = 0
    while at < len(body):
        flags, size = struct.unpack_from(">BI", body, at)
        found.append((flags, body[at + 5 : at + 5 + size]))
        at += 5 + size
    return found
