"""The synchronous Python SDK, call by call; whole lives of sandboxes are in ``test_life``."""

import time
from collections.abc import Callable

import httpx
import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    FilesystemEventType,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxQuery,
    SandboxState,
    Template,
    TimeoutException,
)

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for


def compat(feature: str, verdict: str = "works") -> pytest.MarkDecorator:
    return pytest.mark.compat("Python, sync", feature, verdict)


@compat("create")
def test_create_and_information(create: Create) -> None:
    sandbox = create(metadata={"a": "ü&b"}, envs={"COLOUR": "green"})
    info = sandbox.get_info()
    assert (info.sandbox_id, info.name, info.state) == (sandbox.sandbox_id, "base", SandboxState.RUNNING)
    assert info.metadata == {"a": "ü&b"}
    assert sandbox.commands.run("echo $COLOUR").stdout == "green\n"


@compat("list")
def test_list(create: Create) -> None:
    made = [create(metadata={"n": "1"}) for _ in range(3)]
    made[0].pause()
    paginator = Sandbox.list(query=SandboxQuery(metadata={"n": "1"}), limit=2)
    seen = []
    while paginator.has_next:
        seen += [item.sandbox_id for item in paginator.next_items()]
    assert sorted(seen) == sorted(sandbox.sandbox_id for sandbox in made)


@compat("timeout")
def test_set_timeout(create: Create) -> None:
    sandbox = create(lifecycle={"on_timeout": "kill"})
    before = sandbox.get_info().end_at
    sandbox.set_timeout(900)
    assert sandbox.get_info().end_at > before
    sandbox.set_timeout(1)
    wait_for(lambda: not sandbox.is_running(), "the sandbox to end")


@compat("commands")
def test_commands(create: Create) -> None:
    sandbox = create()
    result = sandbox.commands.run("id -un; pwd; echo $A; echo oops >&2", cwd="/tmp", envs={"A": "b"})
    assert (result.stdout, result.stderr) == ("user\n/tmp\nb\n", "oops\n")
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("exit 7")
    assert failed.value.exit_code == 7


@compat("commands, streaming")
def test_output_arrives_while_the_command_runs(create: Create) -> None:
    arrivals: list[tuple[str, float]] = []
    create().commands.run(
        "for i in 1 2 3; do echo $i; sleep 0.5; done",
        on_stdout=lambda text: arrivals.append((text, time.monotonic())),
    )
    assert "".join(text for text, _ in arrivals) == "1\n2\n3\n"
    assert arrivals[-1][1] - arrivals[0][1] > 0.5


@compat("commands, background")
def test_background_commands(create: Create) -> None:
    sandbox = create()
    handle = sandbox.commands.run("sleep 300", background=True, timeout=0)
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.commands.connect(handle.pid).pid == handle.pid
    assert sandbox.commands.kill(handle.pid)
    with pytest.raises(CommandExitException):
        handle.wait()
    assert not sandbox.commands.kill(handle.pid)


@compat("commands, stdin")
def test_stdin(create: Create) -> None:
    sandbox = create()
    handle = sandbox.commands.run("cat; echo end", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "hello\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "hello\nend\n"


@compat("commands, timeout")
def test_a_command_ends_with_its_timeout(create: Create) -> None:
    with pytest.raises(TimeoutException):
        create().commands.run("sleep 60", timeout=1)


@compat("files")
def test_files(create: Create) -> None:
    sandbox = create()
    blob = bytes(range(256)) * 4096
    sandbox.files.write("a/b/text", "grüße")
    sandbox.files.write("a/blob", blob)
    assert sandbox.files.read("a/b/text") == "grüße"
    assert b"".join(sandbox.files.read("a/blob", format="stream")) == blob
    assert sorted(entry.name for entry in sandbox.files.list("a")) == ["b", "blob"]
    assert sandbox.files.get_info("a/blob").size == len(blob)
    sandbox.files.rename("a/blob", "a/moved")
    assert sandbox.files.exists("a/moved")
    sandbox.files.remove("a/moved")
    assert not sandbox.files.exists("a/moved")
    assert sandbox.files.make_dir("a/new")
    assert not sandbox.files.make_dir("a/new")


@compat("files, many")
def test_many_files_in_one_call(create: Create) -> None:
    sandbox = create()
    written = sandbox.files.write_files([{"path": f"many/{n}", "data": str(n)} for n in range(5)])
    assert [entry.name for entry in written] == list("01234")
    assert sandbox.files.read("many/3") == "3"


@compat("files, watch")
def test_watch_dir(create: Create) -> None:
    sandbox = create()
    sandbox.files.make_dir("watched/below")
    handle = sandbox.files.watch_dir("watched", recursive=True)
    sandbox.files.write("watched/below/two", "2")
    events = wait_for(handle.get_new_events, "events")
    assert ("below/two", FilesystemEventType.CREATE) in [(event.name, event.type) for event in events]
    handle.stop()


@compat("pty")
def test_pty(create: Create) -> None:
    sandbox = create()
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=60)
    sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    sandbox.pty.send_stdin(terminal.pid, b"echo $((40+2)); stty size; exit\n")
    seen = bytearray()
    terminal.wait(on_pty=seen.extend)
    assert b"42" in seen and b"30 100" in seen


@compat("git")
def test_git(create: Create) -> None:
    sandbox = create()
    sandbox.git.init("repository", initial_branch="main")
    sandbox.git.configure_user("A", "a@example.org", scope="local", path="repository")
    sandbox.files.write("repository/file", "x")
    sandbox.git.add("repository")
    sandbox.git.commit("repository", "first")
    assert sandbox.git.status("repository").current_branch == "main"
    sandbox.git.create_branch("repository", "other")
    assert sorted(sandbox.git.branches("repository").branches) == ["main", "other"]


@compat("pause and connect")
def test_pause_and_connect(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("kept", "yes")
    sandbox.pause()
    assert sandbox.get_info().state == SandboxState.PAUSED
    assert Sandbox.connect(sandbox.sandbox_id).files.read("kept") == "yes"


@compat("fork")
def test_fork(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("story", "once")
    forks = [child for child in sandbox.fork(count=2) if isinstance(child, Sandbox)]
    assert [fork.files.read("story") for fork in forks] == ["once", "once"]
    forks[0].files.write("story", "0")
    assert forks[1].files.read("story") == sandbox.files.read("story") == "once"


@compat("signed URLs")
def test_signed_urls(create: Create) -> None:
    sandbox, _ = create(), create()
    sandbox.files.write("down", "loaded")
    answer = httpx.get(sandbox.download_url("down", use_signature_expiration=60))
    assert (answer.status_code, answer.text) == (200, "loaded")
    assert httpx.post(sandbox.upload_url("up"), files={"file": b"up"}).status_code == 200
    assert sandbox.files.read("up") == "up"
    forged = sandbox.download_url("down").replace("path=down", "path=%2Fetc%2Fshadow")
    assert httpx.get(forged).status_code == 401


@compat("internet access")
def test_internet_access_can_be_refused(create: Create) -> None:
    sandbox = create(allow_internet_access=False)
    assert "closed" in sandbox.commands.run("curl -sm 3 http://1.1.1.1 || echo closed").stdout


@compat("ports")
def test_a_port_of_a_sandbox_is_reached(create: Create, node: NodeProcess) -> None:
    sandbox = create()
    sandbox.commands.run("python3 -m http.server 8080", background=True, timeout=0)
    host = sandbox.get_host(8080).partition(":")[0]
    wait_for(lambda: httpx.get(node.url, headers={"Host": host}).status_code == 200, "the server in the sandbox")


ECHO_HOST = """
import http.server

class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{self.headers['Host']} {self.headers['X-Forwarded-Host']}".encode())

http.server.HTTPServer(("", 8080), Echo).serve_forever()
"""


@compat("host mask")
def test_servers_see_the_host_that_was_chosen(create: Create, node: NodeProcess) -> None:
    sandbox = create(network={"mask_request_host": "localhost:${PORT}"})
    sandbox.files.write("echo.py", ECHO_HOST)
    sandbox.commands.run("python3 echo.py", background=True, timeout=0)
    network = sandbox.get_info().network
    assert network is not None and network["mask_request_host"] == "localhost:${PORT}"
    host = f"8080-{sandbox.sandbox_id}.localhost"
    wait_for(lambda: httpx.get(node.url, headers={"Host": host}).status_code == 200, "the server in the sandbox")
    assert httpx.get(node.url, headers={"Host": host}).text == f"localhost:8080 {host}"
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    host = f"8080-{child.sandbox_id}.localhost"
    assert httpx.get(node.url, headers={"Host": host}).text == f"localhost:8080 {host}"


@compat("kill")
def test_kill(create: Create) -> None:
    sandbox = create()
    assert sandbox.kill()
    assert not Sandbox.kill(sandbox.sandbox_id)


@compat("errors")
def test_errors(create: Create) -> None:
    refused: list[tuple[type[Exception], Callable[[], object]]] = [
        (AuthenticationException, lambda: Sandbox.create("base", api_key="e2b_" + "0" * 40)),
        (SandboxException, lambda: Sandbox.create("no-such-template")),
        (NotFoundException, lambda: create().files.read("/no/such")),
    ]
    for kind, call in refused:
        with pytest.raises(kind):
            call()


@compat("snapshots")
def test_snapshots(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("f", "then")
    snapshot = sandbox.create_snapshot()
    sandbox.files.write("f", "later")
    assert create(snapshot.snapshot_id).files.read("f") == "then"
    assert snapshot.snapshot_id in [found.snapshot_id for found in Sandbox.list_snapshots().next_items()]
    assert Sandbox.delete_snapshot(snapshot.snapshot_id)
    assert not Sandbox.delete_snapshot(snapshot.snapshot_id)


@compat("network rules, changed")
def test_network_rules_change(create: Create) -> None:
    sandbox = create()
    sandbox.update_network({"deny_out": ["0.0.0.0/0"]})
    assert "closed" in sandbox.commands.run("curl -sm 3 http://1.1.1.1 || echo closed").stdout


@compat("network rules by domain", "refused")
def test_network_rules_by_domain_are_refused(create: Create) -> None:
    with pytest.raises(SandboxException, match="domain name"):
        create(network={"allow_out": ["example.org"], "deny_out": ["0.0.0.0/0"]})


@compat("pause without memory")
def test_pause_without_memory(create: Create) -> None:
    sandbox = create()
    sandbox.files.write("kept", "yes")
    sandbox.commands.run("sleep 300", background=True, timeout=0)
    sandbox.pause(keep_memory=False)
    sandbox.connect()
    assert sandbox.files.read("kept") == "yes"
    assert not sandbox.commands.list()


@compat("templates")
def test_templates_are_built_and_found_by_name(create: Create, api: httpx.Client) -> None:
    built = Template.build(Template().from_template("base").run_cmd("echo built > /home/user/mark"), "sync-built")
    assert Template.exists("sync-built")
    assert not Template.exists("no-such-template")
    assert create("sync-built").files.read("mark") == "built\n"
    assert api.delete(f"/templates/{built.template_id}").status_code == 204
