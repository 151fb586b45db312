"""Real registries for the tests: Debian's docker-registry on a free loopback port, and a token server for it."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

PROGRAM = shutil.which("docker-registry")
USER, PASSWORD = "puller", "s3cret:with colon"


@dataclass(frozen=True)
class Certificate:
    """A certificate of its own authority for 127.0.0.1 and localhost."""

    key: Path
    certificate: Path


@dataclass(frozen=True)
class Registry:
    host: str
    base: str


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def make_certificate(directory: Path) -> Certificate:
    made = Certificate(directory / "key.pem", directory / "certificate.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", made.key, "-out", made.certificate),
        ],
        check=True,
        capture_output=True,
    )
    return made


@contextmanager
def running(
    directory: Path, *, auth: dict[str, object] | None = None, tls: Certificate | None = None
) -> Iterator[Registry]:
    """A docker-registry with its storage in ``directory``."""
    assert PROGRAM is not None
    port = free_port()
    http: dict[str, object] = {"addr": f"127.0.0.1:{port}", "secret": secrets.token_hex(8)}
    if tls:
        http["tls"] = {"certificate": str(tls.certificate), "key": str(tls.key)}
    config: dict[str, object] = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(directory / "storage")}},
        "http": http,
    }
    if auth:
        config["auth"] = auth
    file = directory / "registry.yml"
    file.write_text(json.dumps(config))  # JSON is YAML
    with (directory / "registry.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve", file], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, (directory / "registry.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield Registry(f"127.0.0.1:{port}", f"{'https' if tls else 'http'}://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(10)


def basic_auth(directory: Path) -> dict[str, object]:
    """docker-registry's configuration for one account, in a file that htpasswd writes."""
    file = directory / "htpasswd"
    subprocess.run(["htpasswd", "-B", "-C", "4", "-b", "-c", file, USER, PASSWORD], check=True, capture_output=True)
    return {"htpasswd": {"realm": "tests", "path": str(file)}}


@dataclass
class TokenServer:
    """Issues the tokens that docker-registry verifies: anonymous users may pull ``public/*``, USER everything."""

    signer: Certificate
    port: int = field(default_factory=free_port)
    requests: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    identity_token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def auth(self) -> dict[str, object]:
        token = {
            "realm": f"http://127.0.0.1:{self.port}/token",
            "service": "tests",
            "issuer": "tests",
            "rootcertbundle": str(self.signer.certificate),
        }
        return {"token": token}

    def token(self, repository: str, actions: list[str]) -> str:
        certificate = ssl.PEM_cert_to_DER_cert(self.signer.certificate.read_text())
        now = int(time.time())
        header = {"typ": "JWT", "alg": "RS256", "x5c": [base64.b64encode(certificate).decode()]}
        access = [{"type": "repository", "name": repository, "actions": actions}] if actions else []
        claims = {"iss": "tests", "sub": "x", "aud": "tests", "exp": now + 300, "nbf": now - 10, "iat": now}
        body = ".".join(_coded(json.dumps(part).encode()) for part in (header, {**claims, "access": access}))
        signature = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", self.signer.key],
            input=body.encode(),
            capture_output=True,
            check=True,
        )
        return f"{body}.{_coded(signature.stdout)}"

    def answer(self, authorization: str, query: dict[str, str]) -> tuple[int, dict[str, object]]:
        self.requests.append((authorization, query))
        repository = query.get("scope", "").split(":")[1] if "scope" in query else ""
        known = authorization == "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if query.get("grant_type") == "refresh_token":
            known = query["refresh_token"] == self.identity_token
            if not known:
                return 401, {}
        if authorization and not known:
            return 401, {"details": "wrong password"}
        allowed = ["pull"] if known or repository.startswith("public/") else []
        return 200, {"access_token": self.token(repository, allowed), "expires_in": 300}

    @contextmanager
    def running(self) -> Iterator[TokenServer]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply(urlsplit(self.path).query)

            def do_POST(self) -> None:
                self._reply(self.rfile.read(int(self.headers["Content-Length"])).decode())

            def _reply(self, query: str) -> None:
                values = {key: value[0] for key, value in parse_qs(query).items()}
                status, body = owner.answer(self.headers.get("Authorization", ""), values)
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def _coded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
