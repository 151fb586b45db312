"""A sandbox's envd as blocking calls through the node's proxy: processes, terminals, files."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

from aenv.client import connect
from aenv.client.connect import CommandRefusedError, Event, Frames
from aenv.client.transport import ApiError, Reply, Stream, Transport, UnreachableError, Upload

KEEPALIVE = 10  # seconds between two signs of life of a silent stream
SILENCE = 35.0  # seconds without any: the connection is lost
BLOCK = 256 * 1024  # bytes read or sent at once

Size = tuple[int, int]  # columns, rows
Progress = Callable[[int], None]  # called with the bytes moved since the last call


class ProcessStream:
    """What happens to one process, as an iterator. Closing it leaves the process running."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> Iterator[Event]:
        """Ends after the process's end. Raises CommandRefusedError, UnreachableError."""
        frames = Frames()
        while data := self._stream.read(BLOCK):
            for flags, message in frames.feed(data):
                yield from connect.events(flags, message)
                if flags & connect.END_OF_STREAM:
                    return
        raise UnreachableError("The connection broke off before the command ended.")

    def close(self) -> None:
        """From any thread; the iteration ends with UnreachableError."""
        self._stream.close()


class ProcessInput:
    """Input for one process over one connection, in the order it is sent."""

    def __init__(self, upload: Upload, pid: int, kind: str) -> None:
        self._upload = upload
        self._kind = kind
        upload.send(connect.pack({"start": {"process": {"pid": pid}}}))

    def send(self, data: bytes) -> None:
        """Raises UnreachableError when the process or the connection has ended."""
        text = base64.b64encode(data).decode()
        self._upload.send(connect.pack({"data": {"input": {self._kind: text}}}))

    def finish(self) -> None:
        """Wait until envd has taken everything. Raises ApiError, UnreachableError."""
        self._upload.finish()

    def abort(self) -> None:
        self._upload.abort()


class SandboxClient:
    def __init__(self, transport: Transport, sandbox_id: str, token: str | None) -> None:
        """``token`` is the sandbox's access token; None when it needs none."""
        self.sandbox_id = sandbox_id
        self._token = token
        self._transport = transport.with_headers({"E2b-Sandbox-Id": sandbox_id})

    # -- processes

    def start(
        self,
        argv: Sequence[str],
        *,
        envs: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool = False,
        terminal: Size | None = None,
    ) -> ProcessStream:
        """Run a program; with ``terminal`` on a pseudo-terminal of that size. Raises CommandRefusedError."""
        config: dict[str, Any] = {"cmd": argv[0], "args": list(argv[1:]), "envs": dict(envs or {})}
        if cwd is not None:
            config["cwd"] = cwd
        message: dict[str, Any] = {"process": config, "stdin": stdin}
        if terminal is not None:
            message["pty"] = {"size": _size(terminal)}
        return self._open("Start", message, user)

    def attach(self, pid: int) -> ProcessStream:
        """What happens from now on to a process that runs already."""
        return self._open("Connect", {"process": {"pid": pid}}, None)

    def _open(self, method: str, message: object, user: str | None) -> ProcessStream:
        sent = connect.headers(user=user, token=self._token) | {"Keepalive-Ping-Interval": str(KEEPALIVE)}
        stream = self._transport.stream(
            "POST", f"/process.Process/{method}", data=connect.pack(message), headers=sent, timeout=SILENCE
        )
        return ProcessStream(stream)

    def input(self, pid: int, *, terminal: bool) -> ProcessInput:
        headers = connect.headers(user=None, token=self._token)
        upload = self._transport.upload("POST", "/process.Process/StreamInput", headers=headers)
        return ProcessInput(upload, pid, "pty" if terminal else "stdin")

    def close_stdin(self, pid: int) -> None:
        self._call("process.Process/CloseStdin", {"process": {"pid": pid}})

    def resize(self, pid: int, size: Size) -> None:
        self._call("process.Process/Update", {"process": {"pid": pid}, "pty": {"size": _size(size)}})

    def signal(self, pid: int, *, kill: bool = False) -> None:
        """SIGTERM, or SIGKILL, to the process and its group."""
        name = "SIGNAL_SIGKILL" if kill else "SIGNAL_SIGTERM"
        self._call("process.Process/SendSignal", {"process": {"pid": pid}, "signal": name})

    def processes(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._call("process.Process/List", {}).get("processes", [])
        return found

    def run(self, script: str, *parameters: str, user: str | None = None) -> tuple[int, bytes, bytes]:
        """Run a POSIX shell script to its end: exit code, output, errors."""
        output = {"stdout": bytearray(), "stderr": bytearray()}
        code = -1
        for event in self.start(["/bin/sh", "-c", script, "sh", *parameters], user=user):
            if isinstance(event, connect.Output):
                output[event.stream] += event.data
            elif isinstance(event, connect.Ended):
                code = event.exit_code
        return code, bytes(output["stdout"]), bytes(output["stderr"])

    # -- files

    def stat(self, path: str, *, user: str | None = None) -> dict[str, Any] | None:
        """The entry's description, None when there is none. Links are followed."""
        try:
            found: dict[str, Any] = self._call("filesystem.Filesystem/Stat", {"path": path}, user)["entry"]
        except CommandRefusedError as error:
            if error.hint == "not_found":
                return None
            raise
        return found

    def write(
        self,
        path: str,
        source: IO[bytes],
        size: int,
        *,
        user: str | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        """Write a file, streamed; missing folders are made. ``size`` is bytes, all of which ``source`` must have."""

        def blocks() -> Iterator[bytes]:
            while block := source.read(BLOCK):
                yield block
                progress(len(block))

        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size)} | self._access()
        stream = self._transport.stream(
            "POST", "/files", query={"path": path, "username": user}, data=blocks(), headers=headers
        )
        stream.close()

    def read(
        self,
        path: str,
        target: IO[bytes],
        *,
        user: str | None = None,
        progress: Progress = lambda _: None,
        begin: Callable[[int | None], None] = lambda _: None,
    ) -> int:
        """Copy a file's content to ``target``; ``begin`` is told its size first. The bytes that were copied.

        Raises UnreachableError when less came than was announced.
        """
        headers = {"Accept-Encoding": "identity"} | self._access()
        stream = self._transport.stream(
            "GET", "/files", query={"path": path, "username": user}, headers=headers, timeout=SILENCE
        )
        try:
            begin(stream.length)
            copied = 0
            while block := stream.read(BLOCK):
                target.write(block)
                copied += len(block)
                progress(len(block))
        finally:
            stream.close()
        if stream.length is not None and copied != stream.length:
            raise UnreachableError(f"The download broke off after {copied} of {stream.length} bytes.")
        return copied

    def _access(self) -> dict[str, str]:
        return {"X-Access-Token": self._token} if self._token else {}

    def _call(self, method: str, message: object, user: str | None = None) -> dict[str, Any]:
        """One unary call. envd's own refusals become CommandRefusedError, with Connect's code as the hint."""
        headers = connect.headers(user=user, token=self._token, streaming=False)
        try:
            reply: Reply = self._transport.request("POST", f"/{method}", body=message, headers=headers)
        except ApiError as error:
            if error.status == 502:  # the proxy's: the sandbox is not there, or does not run
                raise
            raise CommandRefusedError(error.message, error.code) from error
        answer: dict[str, Any] = reply.json() or {}
        return answer


def _size(size: Size) -> dict[str, int]:
    return {"cols": size[0], "rows": size[1]}
