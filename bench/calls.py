"""What the SDK, the API and the proxy add to calls into a guest, beside a socket straight to envd."""

import json
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import httpx
from e2b import Sandbox
from tests.node.process import NodeProcess
from tests.orchestrator.samples import sandbox as sample

from aenv.client.guest import ENVD_PORT
from aenv.orchestrator.model import SandboxState
from aenv.orchestrator.store import Store
from bench.by_hand import milliseconds, run_command
from bench.report import Report, Row

KB, MB = 1000, 1000_000
STREAMS, STREAM_GUESTS, TICK = 200, 4, 2.0  # streams, sandboxes they are spread over, seconds between events
RECORDED = 10_000


class Straight:
    """One kept-alive connection to envd, spoken by hand."""

    def __init__(self, host: str, token: str | None) -> None:
        self._socket = socket.create_connection((host, ENVD_PORT), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        self._token = f"X-Access-Token: {token}\r\n" if token else ""

    def call(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: guest\r\n{self._token}Authorization: Basic dXNlcjo=\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)
        status = self._file.readline()
        assert b" 2" in status, status
        length = 0
        while (line := self._file.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        return self._file.read(length)

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def timed(work: Callable[[], object], rounds: int) -> float:
    """Median milliseconds of ``work``, after one call that does not count."""
    work()
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        found.append(milliseconds(started))
    return statistics.median(found)


def calls(create: Callable[[], Sandbox], host_of: Callable[[str], str], report: Report, rounds: int) -> None:
    """Each kind of call through the SDK and by hand, on one sandbox."""
    sandbox = create()
    host, token = host_of(sandbox.sandbox_id), sandbox._envd_access_token
    straight = Straight(host, token)

    def compare(name: str, ours: Callable[[], object], raw: Callable[[], object], count: int, size: int = 0) -> None:
        a, b = timed(ours, count), timed(raw, count)
        note = f"{a - b:+.1f} ms"
        if size:
            note += f"; {size / a / 1000:.0f} of {size / b / 1000:.0f} MB/s, {b / a:.0%}"
        report.add(Row(name, a, b, note=note))

    many = rounds * 5
    compare(
        'commands.run("true")',
        lambda: sandbox.commands.run("true"),
        lambda: run_command(host, ENVD_PORT, "true", token),
        many,
    )
    for size, label, count in ((KB, "1 kB", many), (MB, "1 MB", rounds * 2), (100 * MB, "100 MB", 2)):
        data = os.urandom(size)
        path = f"/home/user/{size}"
        query = f"/files?path={quote(path)}&username=user"
        moved = size if size > KB else 0

        def write(path: str = path, data: bytes = data) -> object:
            return sandbox.files.write(path, data, request_timeout=300)

        def raw_write(query: str = query, data: bytes = data) -> object:
            return straight.call("POST", query, data, "application/octet-stream")

        def read(path: str = path) -> object:
            return sandbox.files.read(path, format="bytes", request_timeout=300)

        compare(f"files.write {label}", write, raw_write, count, moved)
        compare(f"files.read {label}", read, lambda query=query: straight.call("GET", query), count, moved)  # type: ignore[misc]
    listed = json.dumps({"path": "/etc", "depth": 1}).encode()
    compare(
        "files.list (/etc)",
        lambda: sandbox.files.list("/etc"),
        lambda: straight.call("POST", "/filesystem.Filesystem/ListDir", listed),
        rounds * 2,
    )
    straight.close()
    sandbox.kill()


def streams(create: Callable[[], Sandbox], report: Report, minutes: float) -> None:
    """Many command streams held open together; every event must arrive, in order."""
    ticks = max(3, int(minutes * 60 / TICK))
    script = f"exec sh -c 'i=0; while [ $i -lt {ticks} ]; do echo $i; i=$((i+1)); sleep {TICK:g}; done'"
    guests = [create() for _ in range(STREAM_GUESTS)]
    expected = [str(n) for n in range(ticks)]
    whole = 0
    lock = threading.Lock()

    def follow(number: int) -> None:
        nonlocal whole
        output = guests[number % STREAM_GUESTS].commands.run(script, timeout=0).stdout.split()
        if output == expected:
            with lock:
                whole += 1

    started = time.perf_counter()
    with ThreadPoolExecutor(STREAMS) as executor:
        list(executor.map(follow, range(STREAMS)))
    seconds = time.perf_counter() - started
    assert whole == STREAMS, f"only {whole} of {STREAMS} streams were complete"
    note = f"{STREAMS} streams open for {seconds:.0f} s: all {STREAMS * ticks} events came, in order"
    report.add(Row("streams complete", float(whole), float(STREAMS), "", note))
    for guest in guests:
        guest.kill()


def listing(node: NodeProcess, report: Report, rounds: int) -> None:
    """A filtered page of many recorded sandboxes; the node is restarted with them in its database."""
    node.terminate()
    store = Store(node.home / "aenv.db")
    now = datetime.now(UTC)
    with store.transaction():
        for number in range(RECORDED):
            store.sandboxes.put(
                sample(
                    f"ibench{number:014d}",
                    state=SandboxState.PAUSED,
                    started_at=now - timedelta(seconds=number),
                    metadata={"team": str(number % 10), "n": str(number)},
                    snapshot_id=None,
                    disk=None,
                )
            )
    store.close()
    node.start()
    with httpx.Client(base_url=node.url, headers={"X-API-Key": node.api_key}, timeout=60) as client:

        def page() -> None:
            answer = client.get("/v2/sandboxes", params={"metadata": "team=7", "state": "paused", "limit": 100})
            assert len(answer.json()) == 100, answer.text[:300]

        ours = timed(page, rounds * 2)
        raw = timed(lambda: client.get("/health"), rounds * 2)
    report.add(Row(f"list {RECORDED} sandboxes, filtered", ours, raw, note="by hand: GET /health of the same server"))
