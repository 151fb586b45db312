"""A TCP proxy in front of a server that misbehaves as it is told."""

import socket
import threading
from contextlib import suppress

BAD = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyProxy:
    """``fault``: None passes everything; ``unavailable`` answers 503; ``reset`` breaks connections when a request
    comes; ``truncate`` ends them after 20,000 bytes of an answer; ``stall`` passes requests and no answers; ``slow``
    passes answers in small parts. With ``times`` only so many connections are treated so.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._fault: str | None = None
        self._times = 0
        self.met = 0  # connections that were treated badly
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def set(self, fault: str | None, times: int = 1 << 30) -> None:
        """From now on, also for connections that are open: they are ended, so that each request meets it."""
        with self._lock:
            self._fault, self._times, self.met = fault, times, 0
            for connection in self._open:
                _end(connection)

    def close(self) -> None:
        """Nobody listens any more."""
        self.set(None)
        _end(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._target))
        with self._lock:
            fault = self._fault if self._times > 0 else None
            self._open |= {client, server}
        try:
            first = client.recv(65536)
            if first and fault:
                with self._lock:
                    self._times -= 1
                    self.met += 1
            if fault == "unavailable":
                client.sendall(BAD)
                return
            if fault == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return
            server.sendall(first)
            threading.Thread(target=_copy, args=(client, server), daemon=True).start()
            sent = 0
            while data := server.recv(1024 if fault == "slow" else 65536):
                if fault == "stall":
                    continue
                if fault == "truncate" and sent + len(data) > 20_000:
                    client.sendall(data[: 20_000 - sent])
                    return
                client.sendall(data)
                sent += len(data)
        except OSError:
            pass
        finally:
            with self._lock:
                self._open -= {client, server}
            for connection in (client, server):
                if fault != "reset":
                    _end(connection)  # closing alone ends nothing while the other thread reads from it
                connection.close()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
