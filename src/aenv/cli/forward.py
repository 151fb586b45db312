"""Local ports that lead to servers in a sandbox.

HTTP (WebSockets and server-sent events included) goes through the node's proxy: the first head of a connection gets
the headers that name sandbox and port, and the connection serves that one request. Other protocols (``tcp``) go
through a small relay that runs in the sandbox for each connection.
"""

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from aenv.client.connect import Ended, Output, Started
from aenv.client.sandbox import SandboxClient
from aenv.client.transport import Transport
from aenv.errors import AenvError

MAX_HEAD = 64 * 1024  # bytes
BLOCK = 64 * 1024
# $1 is the port. The writer ends with the reader: what the server closes is closed.
RELAY = (
    'exec 3<>"/dev/tcp/127.0.0.1/$1" || exit 1; cat <&0 >&3 & writer=$!; cat <&3; kill $writer 2>/dev/null; exit 0'
)
_BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Forward:
    local: int  # 0: any that is free
    remote: int


def parse(text: str) -> Forward:
    """``8000``, ``8080:80`` (local, then in the sandbox), ``:80`` (any free local one). Raises AenvError."""
    match = re.fullmatch(r"(?:(\d{0,5}):)?(\d{1,5})", text)
    local, remote = (int(match[1] or 0 if match[1] is not None else match[2]), int(match[2])) if match else (0, 0)
    if not 0 < remote < 65536 or local > 65535:
        raise AenvError(f"{text!r} is not a port.", "Write 8000, or LOCAL:REMOTE such as 8080:80.")
    return Forward(local, remote)


def with_headers(head: bytes, prefix: str, sandbox_id: str, port: int) -> bytes:
    """A request's head for the node's proxy. Raises ValueError when it is no head of HTTP/1."""
    line, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    method, target, version = line.split(b" ")
    if not version.startswith(b"HTTP/1."):
        raise ValueError(version)
    names = [field.partition(b":")[0].strip().lower() for field in fields]
    upgrades = b"upgrade" in names
    dropped = {b"e2b-sandbox-id", b"e2b-sandbox-port", *([] if upgrades else [b"connection", b"keep-alive"])}
    kept = [field for name, field in zip(names, fields, strict=True) if name not in dropped]
    added = [f"E2b-Sandbox-Id: {sandbox_id}".encode(), f"E2b-Sandbox-Port: {port}".encode()]
    if not upgrades:
        # One request a connection: a second one would need these headers, too.
        added.append(b"Connection: close")
    first = b" ".join([method, prefix.encode() + target, version])
    return b"\r\n".join([first, *added, *kept]) + b"\r\n\r\n"


class Forwarder:
    """Serves one local port on threads until it is closed."""

    def __init__(self, transport: Transport, client: SandboxClient, forward: Forward, address: str, *, tcp: bool):
        """Raises AenvError when the port cannot be bound."""
        self._transport = transport
        self._client = client
        self._remote = forward.remote
        self._tcp = tcp
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((address, forward.local))
        except OSError as error:
            self._listener.close()
            raise AenvError(
                f"Port {forward.local} on {address} cannot be used: {error.strerror}.",
                f"Choose another: LOCAL:{forward.remote}.",
            ) from error
        self._listener.listen(128)
        self.port: int = self._listener.getsockname()[1]

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            serve = self._relay if self._tcp else self._proxy
            threading.Thread(target=self._guarded, args=(serve, connection), daemon=True).start()

    @staticmethod
    def _guarded(serve: Callable[[socket.socket], None], connection: socket.socket) -> None:
        with connection:
            with suppress(OSError, AenvError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                serve(connection)
            with suppress(OSError):
                # Another thread may wait for input of it: closing alone would not end the connection.
                connection.shutdown(socket.SHUT_RDWR)

    def _proxy(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            data = connection.recv(BLOCK)
            if not data or len(head) > MAX_HEAD:
                return
            head += data
        end = head.index(b"\r\n\r\n") + 4
        try:
            upstream, prefix = self._transport.socket()
            sent = with_headers(head[:end], prefix, self._client.sandbox_id, self._remote) + head[end:]
        except (AenvError, ValueError):
            connection.sendall(_BAD_GATEWAY)
            return
        with upstream:
            upstream.sendall(sent)
            threading.Thread(target=_pump, args=(connection, upstream), daemon=True).start()
            _pump(upstream, connection)

    def _relay(self, connection: socket.socket) -> None:
        stream = self._client.start(["bash", "-c", RELAY, "bash", str(self._remote)], stdin=True)
        try:
            for event in stream:
                match event:
                    case Started(pid):
                        threading.Thread(target=self._feed, args=(connection, pid), daemon=True).start()
                    case Output("stdout", data):
                        connection.sendall(data)
                    case Ended():
                        break
        finally:
            stream.close()

    def _feed(self, connection: socket.socket, pid: int) -> None:
        with suppress(OSError, AenvError):
            target = self._client.input(pid, terminal=False)
            while data := connection.recv(BLOCK // 2):
                target.send(data)
            target.finish()
            self._client.signal(pid)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(BLOCK):
            target.sendall(data)
