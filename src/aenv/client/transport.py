"""A small blocking HTTP/1.1 client, for programs that run for a moment: the command line.

It is the standard library's ``http.client``, which is imported in 20 ms where an asynchronous client takes several
hundred: more than a whole ``aenv ls``. Answers are typed errors or data; streams have a connection of their own.
"""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from aenv.errors import AenvError, InvalidRequestError

CONNECT_TIMEOUT = 10.0  # seconds
ANSWER_TIMEOUT = 300.0  # seconds; a fork or a resume on a busy host may take long
RETRIES = 3  # of answers that say ``Should-Retry: true``, as E2B's SDKs do
LOST_AFTER_MS = 20_000  # sent data that nobody acknowledges for this long means a lost connection
IDEMPOTENT = frozenset({"GET", "HEAD", "PUT", "DELETE"})  # RFC 9110 section 9.2.2

Query = Mapping[str, str | int | None]


class ApiError(AenvError):
    """The server answered with an error. ``status`` is HTTP's, ``code`` is for programs (may be empty)."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class UnreachableError(AenvError):
    """No answer: the server is not there, or the connection broke."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    data: bytes = field(repr=False)

    def json(self) -> Any:
        return json.loads(self.data) if self.data else None


class Stream:
    """An answer whose body is read as it comes. Closing it breaks the connection off."""

    def __init__(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        # With ``Connection: close`` http.client gives the socket up to the response; keep it, to shut it down.
        self._connection = connection
        self._response = response
        self._socket: socket.socket | None = connection.sock
        length = response.getheader("Content-Length")
        self.length = int(length) if length is not None and length.isdigit() else None  # bytes, when known

    def read(self, size: int) -> bytes:
        """At most ``size`` bytes, as soon as there are any; empty at the end. Raises UnreachableError."""
        try:
            return self._response.read1(size)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnreachableError(f"The connection broke off: {_reason(error)}.") from error

    def close(self) -> None:
        """From any thread: a ``read`` under way ends."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Upload:
    """A request whose body is sent piece by piece (chunked); ``finish`` waits for the answer."""

    def __init__(self, transport: "Transport", connection: http.client.HTTPConnection, path: str) -> None:
        self._transport = transport
        self._connection = connection
        self._path = path

    def send(self, data: bytes) -> None:
        """Raises UnreachableError when the other side is gone or does not want more."""
        try:
            self._connection.send(b"%x\r\n%b\r\n" % (len(data), data))
        except OSError as error:
            raise UnreachableError(f"The connection broke off: {_reason(error)}.") from error

    def finish(self) -> Reply:
        """Raises ApiError, UnreachableError."""
        try:
            self._connection.send(b"0\r\n\r\n")
            return self._transport._reply(self._connection.getresponse())
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(f"The connection broke off: {_reason(error)}.") from error
        finally:
            self._connection.close()

    def abort(self) -> None:
        self._connection.close()


class Transport:
    """Requests to one server. May be used from several threads."""

    def __init__(self, url: str, headers: Mapping[str, str], *, idle_connections: int = 4) -> None:
        """``url`` may have a path, under which the server is. Raises InvalidRequestError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidRequestError(f"{url!r} is not the address of a server.", "It looks like http://host:8000.")
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise InvalidRequestError("The API key has characters that no key has.", "Copy it again.")
        self.url = url.rstrip("/")
        self._tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path.rstrip("/")
        self._headers = dict(headers)
        self._most_idle = idle_connections
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def with_headers(self, headers: Mapping[str, str]) -> "Transport":
        """The same server, with further headers in every request; shares the idle connections."""
        made = Transport.__new__(Transport)
        made.__dict__ = {**self.__dict__, "_headers": {**self._headers, **headers}}
        return made

    def close(self) -> None:
        with self._lock:
            for connection in self._idle:
                connection.close()
            self._idle.clear()

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        body: object = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = ANSWER_TIMEOUT,
    ) -> Reply:
        """One answer, whole. ``body`` is sent as JSON, ``data`` as it is; ``timeout`` is seconds between two packets.

        Repeats what the server asks to be repeated. Raises ApiError, UnreachableError.
        """
        sent = dict(headers or {})
        if body is not None:
            data = json.dumps(body).encode()
            sent.setdefault("Content-Type", "application/json")
        for attempt in range(RETRIES + 1):
            reply = self._once(method, _target(path, query), data, sent, timeout)
            again = reply.headers.get("should-retry") == "true" and attempt < RETRIES
            if not again:
                return _checked(reply)
            time.sleep(min(5.0, float(reply.headers.get("retry-after", "1"))))
        raise AssertionError("unreachable")

    def stream(
        self,
        method: str,
        path: str,
        *,
        query: Query | None = None,
        data: bytes | Iterable[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> Stream:
        """An answer whose body comes bit by bit. ``timeout`` (seconds) ends a silence. Raises ApiError and others."""
        connection = self._connect(timeout)
        try:
            connection.request(
                method,
                self._prefix + _target(path, query),
                body=data,
                headers={**self._headers, **(headers or {})},
            )
            # The socket is noted before http.client may hand it to the response.
            sock = connection.sock
            response = connection.getresponse()
            if response.status >= 300:
                _checked(self._reply(response))
            stream = Stream(connection, response)
            stream._socket = sock
            return stream
        except ApiError:
            connection.close()
            raise
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise UnreachableError(f"The connection to {self.url} broke off: {_reason(error)}.") from error
        except BaseException:
            connection.close()
            raise

    def upload(self, method: str, path: str, *, headers: Mapping[str, str] | None = None) -> Upload:
        """Begin a request with a body of unknown length. Raises UnreachableError."""
        connection = self._connect(ANSWER_TIMEOUT)
        try:
            connection.putrequest(method, self._prefix + path)
            for name, value in {**self._headers, **(headers or {}), "Transfer-Encoding": "chunked"}.items():
                connection.putheader(name, value)
            connection.endheaders()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise UnreachableError(f"The connection to {self.url} broke off: {_reason(error)}.") from error
        return Upload(self, connection, path)

    def socket(self) -> tuple[socket.socket, str]:
        """A connection of one's own to the server, and the path that it is under there. Raises UnreachableError."""
        return self._connect(None).sock, self._prefix

    def _connect(self, timeout: float | None) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=CONNECT_TIMEOUT)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise UnreachableError(
                f"Cannot reach {self.url}: {_reason(error)}.",
                "Is aenv-server running there? `aenv doctor` looks closer.",
            ) from error
        sock = connection.sock
        sock.settimeout(timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_AFTER_MS)
        return connection

    def _once(
        self, method: str, target: str, data: bytes | None, headers: Mapping[str, str], timeout: float
    ) -> Reply:
        """One exchange; on a kept connection that the server has closed meanwhile, one more on a fresh one."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        kept = connection is not None
        while True:
            if connection is None:
                connection = self._connect(timeout)
            try:
                connection.sock.settimeout(timeout)
                connection.request(method, self._prefix + target, body=data, headers={**self._headers, **headers})
                response = connection.getresponse()
                reply = self._reply(response)
            except (http.client.RemoteDisconnected, ConnectionError) as error:
                connection.close()
                if kept and method in IDEMPOTENT:
                    kept, connection = False, None
                    continue
                raise UnreachableError(f"The connection to {self.url} broke off: {_reason(error)}.") from error
            except TimeoutError as error:
                connection.close()
                raise UnreachableError(f"{self.url} did not answer within {timeout:.0f} seconds.") from error
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                raise UnreachableError(f"The connection to {self.url} broke off: {_reason(error)}.") from error
            except BaseException:
                connection.close()
                raise
            self._put_back(connection, response)
            return reply

    def _put_back(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> None:
        with self._lock:
            if not response.will_close and connection.sock is not None and len(self._idle) < self._most_idle:
                self._idle.append(connection)
                return
        connection.close()

    def _reply(self, response: http.client.HTTPResponse) -> Reply:
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, response.read())


def quoted(text: str) -> str:
    """``text`` as one segment of a path."""
    return quote(text, safe="")


def _target(path: str, query: Query | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def _checked(reply: Reply) -> Reply:
    """Raises ApiError for what is not a success. Bodies are E2B's, Connect's, the proxy's, or none of ours."""
    if reply.status < 300:
        return reply
    try:
        body = reply.json()
    except ValueError:
        body = None
    if isinstance(body, dict) and isinstance(body.get("message"), str):
        raise ApiError(reply.status, body["message"], str(body.get("error_code") or body.get("code") or ""))
    text = reply.data[:200].decode(errors="replace").strip()
    raise ApiError(reply.status, f"The server answered {reply.status}." + (f" {text}" if text else ""))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, TimeoutError):
        return "no answer"
    return str(error) or type(error).__name__
