"""Traffic to servers inside a sandbox, by every way the proxy routes."""

import time

import httpx
import pytest
from e2b import Sandbox

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for

SERVER = """
import http.server, time
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path.startswith("/events"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for n in range(3):
                self.wfile.write(f"data: {n}\\n\\n".encode())
                self.wfile.flush()
                time.sleep(0.3)
            return
        body = f"{self.headers['Host']} {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("0.0.0.0", 8080), Handler).serve_forever()
"""


@pytest.fixture
def served(create: Create, node: NodeProcess) -> Sandbox:
    sandbox = create()
    sandbox.files.write("server.py", SERVER)
    sandbox.commands.run("python3 server.py", background=True, timeout=0)
    wait_for(lambda: by_header(node, sandbox, "/up").status_code == 200, "the server in the sandbox")
    return sandbox


def by_header(node: NodeProcess, sandbox: Sandbox, path: str, names: str = "e2b-sandbox") -> httpx.Response:
    headers = {f"{names}-id": sandbox.sandbox_id, f"{names}-port": "8080"}
    return httpx.get(node.url + path, headers=headers, timeout=30)


def test_every_route_reaches_the_server(served: Sandbox, node: NodeProcess) -> None:
    host = served.get_host(8080).split(".", 1)[0]  # {port}-{id}
    assert host == f"8080-{served.sandbox_id}"
    answers = [
        by_header(node, served, "/a?b=c"),
        by_header(node, served, "/a?b=c", "x-agentenv-sandbox"),
        httpx.get(f"{node.url}/proxy/{served.sandbox_id}/8080/a?b=c", timeout=30),
        httpx.get(f"{node.url}/a?b=c", headers={"Host": f"{host}.localhost"}, timeout=30),
    ]
    for answer in answers:
        assert answer.status_code == 200
        assert answer.text.endswith(" /a?b=c")


def test_events_arrive_one_by_one(served: Sandbox, node: NodeProcess) -> None:
    url = f"{node.url}/proxy/{served.sandbox_id}/8080/events"
    with httpx.stream("GET", url, timeout=30) as stream:
        moments = [time.monotonic() for line in stream.iter_lines() if line.startswith("data:")]
    assert len(moments) == 3
    assert moments[2] - moments[0] > 0.3, "all events came at once"


def test_large_bodies_pass_whole(served: Sandbox, node: NodeProcess) -> None:
    body = bytes(range(256)) * 32768  # 8 MiB
    answer = httpx.post(f"{node.url}/proxy/{served.sandbox_id}/8080/echo", content=body, timeout=120)
    assert answer.content == body


def test_closed_ports_and_missing_sandboxes_are_told_apart(served: Sandbox, node: NodeProcess) -> None:
    closed = httpx.get(f"{node.url}/proxy/{served.sandbox_id}/9/", timeout=30)
    assert closed.status_code == 502 and "not open" in closed.text
    missing = httpx.get(f"{node.url}/proxy/inosuchsandbox0000000/8080/", timeout=30)
    assert missing.status_code in (404, 502) and "not found" in missing.text


def test_connections_do_not_outlive_a_pause(served: Sandbox, node: NodeProcess) -> None:
    """A kept-alive client goes on after pause and resume, although every connection of the old life is dead."""
    with httpx.Client(timeout=30) as client:
        url = f"{node.url}/proxy/{served.sandbox_id}/8080/x"
        assert client.get(url).status_code == 200
        served.pause()
        served.connect()
        assert client.get(url).status_code == 200


def test_the_control_endpoints_of_envd_stay_the_node_s(served: Sandbox, node: NodeProcess) -> None:
    headers = {"e2b-sandbox-id": served.sandbox_id}
    answer = httpx.post(f"{node.url}/init", json={"envVars": {"X": "y"}}, headers=headers, timeout=30)
    assert answer.status_code == 403
