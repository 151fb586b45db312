"""The wire: codecs, envelopes, errors, tokens, signatures and the plain endpoints."""

from __future__ import annotations

import base64
import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError

import pytest
from e2b import AuthenticationException, Sandbox
from e2b.envd.filesystem import filesystem_pb
from e2b.envd.process import process_pb
from protobuf import Oneof

from tests.envd.daemon import Envd, basic, envelope, envelopes

START = "process.Process/Start"


def started(cmd: str, *args: str, **more: object) -> dict[str, object]:
    return {"process": {"cmd": cmd, "args": list(args)}, "stdin": False, **more}


def test_json_stream(envd: Envd) -> None:
    answers, end = envd.stream(START, [started("/bin/sh", "-c", "printf hi; exit 2")], basic("root"))
    assert end == {}
    kinds = [next(iter(a["event"])) for a in answers]
    assert kinds == ["start", "data", "end"]
    assert answers[0]["event"]["start"]["pid"] > 0
    assert base64.b64decode(answers[1]["event"]["data"]["stdout"]) == b"hi"
    wanted = {"exitCode": 2, "exited": True, "status": "exit status 2", "error": "exit status 2"}
    assert answers[2]["event"]["end"] == wanted


def test_binary_stream(envd: Envd) -> None:
    request = process_pb.StartRequest(
        process=process_pb.ProcessConfig(cmd="sh", args=["-c", "echo $A >&2; kill -9 $$"], envs={"A": "x"}, cwd="/"),
        stdin=False,
    )
    headers = {"Content-Type": "application/connect+proto", **basic("root")}
    reply = envd.request("POST", f"/{START}", envelope(request.to_binary()), headers)
    assert reply.headers["content-type"] == "application/connect+proto"
    *answers, (flags, end) = envelopes(reply.body)
    assert (flags, json.loads(end)) == (2, {})
    events = [process_pb.StartResponse.from_binary(data).event for _, data in answers]
    fields = [e.event.field for e in events if e is not None and e.event is not None]
    assert fields == ["start", "data", "end"]
    last = events[-1]
    assert last is not None and isinstance(last.event, Oneof)
    ended = last.event.value
    assert isinstance(ended, process_pb.ProcessEvent.EndEvent)
    assert (ended.exit_code, ended.exited, ended.status) == (-1, False, "signal: killed")


def test_binary_unary(envd: Envd) -> None:
    headers = {"Content-Type": "application/proto"}
    body = filesystem_pb.StatRequest(path="/etc/passwd").to_binary()
    reply = envd.request("POST", "/filesystem.Filesystem/Stat", body, headers)
    assert (reply.status, reply.headers["content-type"]) == (200, "application/proto")
    entry = filesystem_pb.StatResponse.from_binary(reply.body).entry
    assert entry is not None
    assert (entry.path, entry.owner, entry.type) == ("/etc/passwd", "root", filesystem_pb.FileType.FILE)


def test_tags(envd: Envd) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(envd.stream, START, [started("sleep", "1000", tag="mine")], basic("root"))
        selector = {"process": {"tag": "mine"}, "signal": "SIGNAL_SIGTERM"}
        while envd.rpc("process.Process/SendSignal", selector).status == 404:
            pass
        answers, _ = running.result(20)
    assert answers[-1]["event"]["end"]["status"] == "signal: terminated"


def test_errors_of_unary_calls(envd: Envd) -> None:
    cases = [
        ("filesystem.Filesystem/Stat", {"path": "/no/such"}, 404, "not_found"),
        ("filesystem.Filesystem/MakeDir", {"path": "/tmp"}, 409, "already_exists"),
        ("filesystem.Filesystem/ListDir", {"path": "/etc/passwd"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/ListDir", {"path": "/", "depth": "x"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/Nothing", {}, 501, "unimplemented"),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": 9}, 404, "not_found"),
        ("process.Process/SendSignal", {"signal": 9}, 400, "invalid_argument"),
    ]
    for method, message, status, code in cases:
        reply = envd.rpc(method, message)
        assert (reply.status, reply.json()["code"]) == (status, code), method
        assert reply.json()["message"]
    assert envd.request("POST", "/process.Process/List", "{}", {"Content-Type": "text/plain"}).status == 415
    assert envd.request("GET", "/process.Process/List").status == 405
    assert envd.rpc("process.Process/List", {"unknown": [1]}).status == 200


def test_errors_of_streams(envd: Envd) -> None:
    answers, end = envd.stream(START, [started("/no/such/program")], basic("root"))
    assert answers == [] and end["error"]["code"] == "invalid_argument"
    assert "/no/such/program" in end["error"]["message"]
    _, end = envd.stream(START, [started("no-such-program-in-path")], basic("root"))
    assert end["error"]["code"] == "invalid_argument"
    _, end = envd.stream("process.Process/Connect", [{"process": {"pid": 1}}])
    assert end["error"]["code"] == "not_found"
    _, end = envd.stream("process.Process/StreamInput", [{"start": {"process": {"tag": "no"}}}])
    assert end["error"]["code"] == "not_found"


def test_deadline_and_keepalive(envd: Envd) -> None:
    headers = {**basic("root"), "Connect-Timeout-Ms": "2500", "Keepalive-Ping-Interval": "1"}
    answers, end = envd.stream(START, [started("sleep", "1000")], headers)
    assert end["error"]["code"] == "deadline_exceeded"
    assert [next(iter(a["event"])) for a in answers] == ["start", "keepalive", "keepalive"]


def test_http2_without_upgrade(envd: Envd) -> None:
    with socket.create_connection(("127.0.0.1", envd.port)) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        header = connection.recv(9)
    assert header[3] == 4, "the server answers with its SETTINGS frame"


def test_plain_endpoints(envd: Envd) -> None:
    assert envd.request("GET", "/health").status == 204
    metrics = envd.request("GET", "/metrics").json()
    wanted = "ts cpu_count cpu_used_pct disk_used disk_total"
    wanted += " mem_total mem_used mem_cache mem_total_mib mem_used_mib"
    assert set(metrics) == set(wanted.split())
    assert metrics["mem_total"] > metrics["mem_used"] > 0 and metrics["disk_total"] > 0
    for path in ("/freeze", "/unfreeze", "/fsfreeze", "/fsthaw", "/collapse"):
        reply = envd.request("POST", path)
        assert (reply.status, reply.json()["code"]) == (501, 501)
    assert envd.request("GET", "/nothing").json()["code"] == 404


def test_init_sets_globals_and_defaults(fresh: Envd) -> None:
    body = {
        "envVars": {"A": "global", "B": "global", "PATH": "/usr/bin:/bin"},
        "defaultUser": "nobody",
        "defaultWorkdir": "/usr",
        "sandboxId": "sb-1",
        "templateId": "t-1",
        "hyperloopIP": "ignored",
    }
    assert fresh.request("POST", "/init", json.dumps(body)).status == 204
    assert fresh.request("GET", "/envs").json() == body["envVars"]
    sandbox = fresh.sandbox()
    shown = sandbox.commands.run(
        "id -un; pwd; echo $A $B $E2B_SANDBOX_ID $E2B_TEMPLATE_ID $E2B_SANDBOX", envs={"B": "own"}
    )
    assert shown.stdout == "nobody\n/usr\nglobal own sb-1 t-1 true\n"
    assert sandbox.files.get_info("bin").path == "/usr/bin"
    assert fresh.request("POST", "/init", json.dumps({"envVars": {}})).status == 204
    assert fresh.request("GET", "/envs").json() == {}
    for bad in ("[]", "{", '{"timestamp": "yesterday"}', '{"envVars": {"A": 1}}'):
        assert fresh.request("POST", "/init", bad).status == 400


def test_access_token(fresh: Envd) -> None:
    def init(body: object, token: str | None = None) -> int:
        headers = {"X-Access-Token": token} if token else {}
        return fresh.request("POST", "/init", json.dumps(body), headers).status

    assert init({"accessToken": "secret"}) == 204
    assert fresh.request("GET", "/health").status == 204
    for path in ("/envs", "/metrics", "/files?path=/etc/passwd"):
        assert fresh.request("GET", path).status == 401
    reply = fresh.rpc("process.Process/List", {}, {"X-Access-Token": "wrong"})
    assert (reply.status, reply.json()["code"]) == (401, "unauthenticated")
    assert fresh.rpc("process.Process/List", {}, {"X-Access-Token": "secret"}).status == 200
    with pytest.raises(AuthenticationException):
        fresh.sandbox().commands.run("true")
    with pytest.raises(AuthenticationException):
        fresh.sandbox().files.read("/etc/passwd")
    assert fresh.sandbox("secret").commands.run("echo in", user="nobody").stdout == "in\n"
    assert init({"accessToken": "other"}) == 401
    assert init({"accessToken": "other"}, "secret") == 204
    assert fresh.request("GET", "/envs", headers={"X-Access-Token": "secret"}).status == 401
    assert init({}, "other") == 204
    assert fresh.request("GET", "/envs").status == 200


def fetch(url: str) -> int:
    try:
        with urllib.request.urlopen(url) as response:
            return int(response.status)
    except HTTPError as error:
        return error.code


def test_signatures(fresh: Envd) -> None:
    assert fresh.request("POST", "/init", json.dumps({"accessToken": "secret"})).status == 204
    sandbox: Sandbox = fresh.sandbox("secret")
    url = sandbox.download_url("/etc/passwd", user="root")
    assert fetch(url) == 200
    assert fetch(url.replace("passwd", "hosts")) == 401
    assert fetch(url.replace("v1_", "v1_x")) == 401
    assert fetch(sandbox.download_url("/etc/passwd", use_signature_expiration=100)) == 200
    assert fetch(sandbox.download_url("/etc/passwd", use_signature_expiration=-100)) == 401
    upload = sandbox.upload_url("/tmp/envd-signed", user="root")
    assert fetch(upload) == 401, "a signature for writing does not allow reading"
    path = upload.split("127.0.0.1", 1)[1].split("/", 1)[1]
    sent = fresh.request("POST", f"/{path}", b"signed", {"Content-Type": "application/octet-stream"})
    assert sent.json() == [{"name": "envd-signed", "type": "file", "path": "/tmp/envd-signed"}]
    sandbox.files.remove("/tmp/envd-signed")
