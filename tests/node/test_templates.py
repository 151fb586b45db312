"""Templates built by the official SDK on a real node: steps, cache, start commands, tags, failures, crashes."""

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from e2b import (
    AsyncTemplate,
    BuildException,
    FileUploadException,
    Sandbox,
    Template,
    TemplateException,
    wait_for_file,
    wait_for_port,
)
from e2b.api.client.models import TemplateBuildFileUpload
from e2b.exceptions import SandboxException
from e2b.template.logger import LogEntry
from e2b.template.main import TemplateBuilder, TemplateFinal
from e2b.template.types import BuildInfo, TemplateBuildStatusResponse

from tests.image import registries
from tests.node import images
from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for

Buildable = TemplateBuilder | TemplateFinal
Build = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def clean(node: NodeProcess, api: httpx.Client) -> Iterator[None]:
    """No template but the node's own is left after a test, and nothing that only they needed."""
    yield
    for template in api.get("/templates").json():
        if "base" not in template["names"]:
            assert api.delete(f"/templates/{template['templateID']}").status_code == 204
    assert not node.records("builds")


@pytest.fixture
def build() -> Build:
    """Build and wait; the log's messages."""

    def run(template: Buildable, name: str, **options: object) -> list[str]:
        logs: list[str] = []
        Template.build(template, name, on_build_logs=lambda entry: logs.append(entry.message), **options)  # type: ignore[arg-type]
        return logs

    return run


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """A build context with files, folders, modes, links and names that need care."""
    (tmp_path / "app/sub").mkdir(parents=True)
    (tmp_path / "app/main.py").write_text("print('main')\n")
    (tmp_path / "app/sub/deep.txt").write_text("deep")
    (tmp_path / "app/.dot").write_text("dot")
    (tmp_path / "app/link").symlink_to("main.py")
    (tmp_path / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "run.sh").chmod(0o750)
    (tmp_path / "one file.txt").write_text("spaces")
    (tmp_path / "big.bin").write_bytes(bytes(range(256)) * 20_000)
    return tmp_path


def base(context: Path | None = None) -> TemplateBuilder:
    return Template(file_context_path=None if context is None else str(context)).from_base_image()


def cached(logs: list[str]) -> list[str]:
    return [line for line in logs if line.startswith("CACHED")]


def test_copy_puts_files_where_a_dockerfile_would(build: Build, create: Create, context: Path) -> None:
    template = (
        base(context)
        .copy("app", "/home/user/app")
        .copy("app", "relative/")
        .copy("run.sh", "/usr/local/bin/run", user="root", mode=0o755)
        .copy("run.sh", "/srv/made/on/the/way/")
        .copy("one file.txt", "/home/user/renamed.txt")
        .copy("**/*.txt", "/texts", user="root:adm")
        .copy("app/link", "/home/user/")
        .copy("app", "/home/user/real", resolve_symlinks=True)
        .copy("big.bin", "/opt/", gzip=False)
    )
    build(template, "copied")
    run = create("copied").commands.run
    assert run("cd app && find . | sort").stdout.split() == [
        ".",
        "./.dot",
        "./link",
        "./main.py",
        "./sub",
        "./sub/deep.txt",
    ]
    assert run("diff -r app relative && echo same").stdout == "same\n"
    assert run("stat -c '%U:%G' app app/sub/deep.txt | uniq").stdout == "user:user\n"
    assert run("run; stat -c '%U %a' /usr/local/bin/run").stdout == "ran\nroot 755\n"
    assert run("stat -c '%U %a' /srv/made/on/the/way /srv/made/on/the/way/run.sh").stdout == "user 755\nuser 750\n"
    assert (
        run("cat renamed.txt; ls /texts; stat -c %G /texts/deep.txt").stdout == "spacesdeep.txt\none file.txt\nadm\n"
    )
    assert run("readlink link; readlink real/link || cat real/link").stdout == "main.py\nprint('main')\n"
    assert run("sha256sum /opt/big.bin").stdout.split()[0] == _sha256(context / "big.bin")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_environment_user_and_folder_of_steps_and_of_sandboxes(build: Build, create: Create) -> None:
    template = (
        base()
        .set_envs({"GREETING": "hello", "TWICE": "$GREETING $GREETING", "PATH": "/opt/tools/bin:$PATH"})
        .run_cmd("whoami > who; pwd >> who; echo $TWICE >> who")
        .run_cmd("mkdir -p /opt/tools/bin && printf '#!/bin/sh\\necho tool' > /opt/tools/bin/tool", user="root")
        .run_cmd("chmod 755 /opt/tools/bin/tool", user="root")
        .set_workdir("/srv/$GREETING")
        .set_workdir("inner")
        .run_cmd("tool > out", user="root")
        .set_user("root")
        .run_cmd("whoami > who")
    )
    build(template, "env")
    sandbox = create("env")
    assert sandbox.commands.run("whoami; pwd; echo $TWICE; tool; cat who out").stdout == (
        "root\n/srv/hello/inner\nhello hello\ntool\nroot\ntool\n"
    )
    assert sandbox.files.read("/home/user/who") == "user\n/home/user\nhello hello\n"
    assert sandbox.files.read("who") == "root\n", "paths of files are relative to the folder, too"
    assert sandbox.commands.run("echo $GREETING", envs={"GREETING": "mine"}).stdout == "mine\n"
    assert sandbox.commands.run("whoami; pwd", user="user").stdout.startswith("user\n")
    assert create("env", envs={"GREETING": "other"}).commands.run("echo $GREETING").stdout == "other\n"
    sandbox.pause()
    sandbox.connect()
    (child,) = sandbox.fork(count=1)
    assert isinstance(child, Sandbox)
    assert child.commands.run("whoami; echo $TWICE").stdout == "root\nhello hello\n"


def test_a_started_server_answers_in_every_sandbox(build: Build, create: Create) -> None:
    template = base().run_cmd("mkdir web && echo served > web/index.html")
    logs = build(template.set_start_cmd("cd web && python3 -m http.server 8000", wait_for_port(8000)), "served")
    assert any("waiting until ready" in line for line in logs)
    for sandbox in (create("served"), create("served")):
        assert sandbox.commands.run("curl -s localhost:8000").stdout == "served\n"
    # Built on top of it: its start command runs after the new steps, not under them.
    more = (
        Template()
        .from_template("served")
        .run_cmd("curl -s localhost:8000 || echo no server; echo more > web/index.html")
    )
    assert "no server" in build(more, "served-more")
    assert create("served-more").commands.run("curl -s localhost:8000").stdout == "more\n"


def test_a_ready_command_alone_is_waited_for(build: Build, create: Create) -> None:
    template = base().run_cmd("nohup sh -c 'sleep 3; touch /tmp/ready' >/dev/null 2>&1 &")
    build(template.set_ready_cmd(wait_for_file("/tmp/ready")), "ready")
    assert create("ready").files.exists("/tmp/ready")


def test_failures_name_their_step_and_keep_the_last_good_build(build: Build, create: Create, context: Path) -> None:
    build(base().run_cmd("echo good > v"), "kept")
    with pytest.raises(BuildException, match=r"failed to run command 'echo oops >&2; exit 3': exit status 3.*oops"):
        build(base().run_cmd("echo bad > v").run_cmd("echo oops >&2; exit 3"), "kept")
    assert create("kept").files.read("v") == "good\n"
    for template, message in (
        (base().set_user("ghost"), "unknown user ghost"),
        (base().run_cmd("true", user="ghost"), "ghost"),
        (base(context).copy("app", "/proc/nowhere"), "failed to copy 'app' to '/proc/nowhere'"),
        (base().set_workdir("/proc/nowhere"), "failed to change to '/proc/nowhere'"),
        (base().set_start_cmd("exit 4", wait_for_port(1)), "ended before it was ready: exit status 4"),
        (Template().from_template("no-such-template").run_cmd("true"), "no-such-template"),
        (Template().from_image("registry.invalid/no/such:image").run_cmd("true"), "registry.invalid"),
    ):
        with pytest.raises(BuildException, match=message):
            build(template, "broken")
    assert Template.exists("broken")
    with pytest.raises(SandboxException, match="no finished build"):
        create("broken")
    for name in ("base", "not a name", "a:b:c"):
        with pytest.raises(BuildException, match="400"):
            build(base(), name)


def test_status_has_reason_and_pages_of_logs(api: httpx.Client) -> None:
    info = Template.build_in_background(base().run_cmd("seq 250; exit 1"), "logged")
    status = _finished(info)
    assert status.status.value == "error"
    assert status.reason is not None and status.reason.step == "1"
    assert [entry.message for entry in status.reason.log_entries][-2:] == ["250", status.reason.message]
    path = f"/templates/{info.template_id}/builds/{info.build_id}"
    seen: list[str] = []
    while page := api.get(f"{path}/status", params={"logsOffset": len(seen)}).json()["logEntries"]:
        assert len(page) <= 100
        seen += [entry["message"] for entry in page]
    assert [line for line in seen if line.isdigit()] == [str(n) for n in range(1, 251)]
    errors = api.get(f"{path}/logs", params={"level": "error"}).json()["logs"]
    assert [entry["step"] for entry in errors] == ["1"]
    last = api.get(f"{path}/logs", params={"direction": "backward", "limit": 1}).json()["logs"]
    assert last == errors
    assert api.get(f"/templates/{info.template_id}/builds/nothing/status").status_code == 404
    assert api.get(f"/templates/logged/builds/{info.build_id}/status").status_code == 200
    again = api.post(f"/v2{path}", json={"steps": []})
    assert again.status_code == 400 and "already" in again.json()["message"]


def _finished(info: BuildInfo) -> TemplateBuildStatusResponse:
    wait_for(lambda: Template.get_build_status(info).status.value in ("ready", "error"), "the build to end", 120)
    status: TemplateBuildStatusResponse = Template.get_build_status(info)
    return status


def test_unchanged_steps_are_taken_from_the_cache(build: Build, create: Create, context: Path) -> None:
    def template(last: str) -> TemplateBuilder:
        return base(context).copy("run.sh", "/opt/").run_cmd("date +%s%N > stamp").set_envs({"A": "1"}).run_cmd(last)

    assert cached(build(template("echo 1"), "cache")) == []
    first = create("cache").files.read("stamp")
    assert len(cached(build(template("echo 1"), "cache"))) == 5, "the finished machine itself is reused"
    assert [line.split("]")[0] for line in cached(build(template("echo 2; echo $A > a"), "cache"))] == [
        "CACHED [1/4", "CACHED [2/4"
    ]  # fmt: skip
    sandbox = create("cache")
    assert (sandbox.files.read("stamp"), sandbox.files.read("a")) == (first, "1\n")
    # Another file of the same name, a forced step, a forced build.
    (context / "run.sh").write_text("changed")
    assert cached(build(template("echo 1"), "cache")) == []
    second = create("cache").files.read("stamp")
    assert second != first and create("cache").files.read("/opt/run.sh") == "changed"
    forced = base(context).copy("run.sh", "/opt/").skip_cache().run_cmd("date +%s%N > stamp")
    assert len(cached(build(forced, "cache"))) == 1
    assert cached(build(template("echo 1"), "cache", skip_cache=True)) == []
    assert create("cache").files.read("stamp") not in (first, second)


def test_the_cache_is_bounded_and_leaves_no_files(build: Build, node: NodeProcess) -> None:
    for number in range(3):
        build(base().run_cmd(f"echo {number}"), f"bounded-{number}")
    for number in range(3):
        assert Template.exists(f"bounded-{number}")
    layers = {name.split(".")[0] for name in _names(node.home / "layers")}
    assert layers == set(node.records("layers"))
    assert _names(node.home / "snapshots") == set(node.records("snapshots"))
    assert _names(node.home / "memory") == set(node.records("memory"))


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_many_steps_stay_quick_to_start_and_keep_all_data(build: Build, create: Create) -> None:
    """More layers than a chain may have, so that they are merged; then read from the disk, not from memory."""
    template = base()
    for number in range(14):
        template = template.run_cmd(f"head -c 100000 /dev/zero | tr '\\0' {number % 10} > file{number}")
    build(template, "deep")
    run = create("deep").commands.run
    run("sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'")
    for number in range(14):
        assert run(f"tr -d {number % 10} < file{number} | wc -c; wc -c < file{number}").stdout == "0\n100000\n"
    # And booted from the disk alone.
    build(
        Template().from_template("deep").run_cmd("cat file? file1? | tr -d 0123456789 | wc -c"),
        "deeper",
        memory_mb=640,
    )
    assert create("deeper").commands.run("cat file* | wc -c").stdout == "1400000\n"


def test_other_sizes(build: Build, create: Create) -> None:
    template = base().run_cmd("free -m | awk '/Mem/ {print $2}' > seen; nproc >> seen")
    logs = build(template, "large", cpu_count=2, memory_mb=1024)
    assert "booting with 2 vCPU and 1024 MiB" in logs
    sandbox = create("large")
    memory, processors = sandbox.files.read("seen").split()
    assert int(memory) > 900 and processors == "2"
    assert sandbox.commands.run("nproc").stdout == "2\n"
    info = sandbox.get_info()
    assert (info.cpu_count, info.memory_mb) == (2, 1024)
    # A cached step serves another size too: its disk is booted.
    logs = build(template.run_cmd("echo more"), "small", memory_mb=256)
    assert len(cached(logs)) == 1 and "booting with 1 vCPU and 256 MiB" in logs
    assert create("small").files.read("seen").split() == [memory, processors]
    for wrong in ({"cpu_count": 0}, {"memory_mb": 64}, {"cpu_count": 1000}):
        with pytest.raises(BuildException, match="400"):
            build(base(), "wrong", **wrong)


def test_the_disk_grows_for_the_space_that_is_asked_for(build: Build, create: Create) -> None:
    free = "df -Pk / | awk 'NR == 2 { print int($4 / 1024) }'"
    template = base().run_cmd("head -c 30000000 /dev/urandom > big; sha256sum big > sum")
    logs = build(template, "roomy", min_free_disk_mb=9000)
    assert any("the disk has grown to" in line for line in logs), logs
    sandbox = create("roomy")
    assert int(sandbox.commands.run(free).stdout) >= 8900
    # Beyond the size that it had, also after the memory is gone, and in what is built on it.
    sandbox.commands.run("dd if=/dev/zero of=sparse bs=1M seek=6000 count=1; fallocate -l 5G much")
    sandbox.pause(keep_memory=False)
    sandbox.connect()
    assert sandbox.commands.run("sha256sum -c sum; stat -c %s much").stdout == f"big: OK\n{5 << 30}\n"
    again = build(Template().from_template("roomy").run_cmd(free), "roomier", memory_mb=640, min_free_disk_mb=100)
    assert any("MiB of disk are free" in line for line in again), "it never shrinks"
    assert int(create("roomier").commands.run(free).stdout) >= 8900
    with pytest.raises(BuildException, match="minFreeDiskMb"):
        build(template, "roomy", min_free_disk_mb=-1)


def test_tags(build: Build, create: Create, api: httpx.Client) -> None:
    build(base().run_cmd("echo 1 > v"), "tagged:v1")
    with pytest.raises(SandboxException, match="no tag 'default'"):
        create("tagged")
    build(base().run_cmd("echo 2 > v"), "tagged", tags=["v2", "default"])
    for name, version in (("tagged", "2"), ("tagged:v1", "1"), ("TAGGED:v2", "2")):
        assert create(name).files.read("v") == f"{version}\n"
    assigned = Template.assign_tags("tagged:v1", ["production", "default"])
    assert assigned.tags == ["production", "default"]
    tags = {tag.tag: tag.build_id for tag in Template.get_tags("tagged")}
    assert tags["production"] == tags["default"] == tags["v1"] == assigned.build_id != tags["v2"]
    assert create("tagged").files.read("v") == "1\n"
    Template.remove_tags("tagged", ["v2", "v1"])
    assert {tag.tag for tag in Template.get_tags("tagged")} == {"production", "default"}
    assert Template.exists("tagged:production") and not Template.exists("tagged:v2")
    for action in (
        lambda: Template.remove_tags("tagged", "v2"),
        lambda: Template.assign_tags("tagged:v2", "x"),
        lambda: Template.assign_tags("nothing", "x"),
        lambda: Template.get_tags("nothing"),
        lambda: Template.assign_tags("base", "mine"),
        lambda: Template.remove_tags("tagged", ["production", "default"]),
    ):
        with pytest.raises(TemplateException):
            action()
    builds = api.get("/templates/tagged").json()["builds"]
    assert [item["status"] for item in builds] == ["ready", "ready"]
    listed = next(item for item in api.get("/v2/templates").json() if "tagged" in item["names"])
    assert (listed["buildCount"], listed["buildStatus"], listed["buildID"]) == (2, "ready", assigned.build_id)


def test_names_with_a_namespace(build: Build, create: Create, api: httpx.Client) -> None:
    build(base().run_cmd("echo mine > v"), "team/app:v1")
    assert create("team/app:v1").files.read("v") == "mine\n"
    assert Template.exists("team/app") and [tag.tag for tag in Template.get_tags("team/app")] == ["v1"]
    assert api.patch("/v2/templates/team%2Fapp", json={"public": False}).json() == {"names": ["team/app"]}
    assert api.get("/templates/team%2Fapp").json()["public"] is False


def test_deleting_a_template_leaves_its_sandboxes(build: Build, create: Create, api: httpx.Client) -> None:
    build(base().run_cmd("echo mine > v"), "gone")
    sandbox = create("gone")
    assert api.delete("/templates/gone:default").status_code == 400 and Template.exists("gone")
    assert api.delete("/templates/gone").status_code == 204
    assert not Template.exists("gone")
    assert api.delete("/templates/gone").status_code == 404
    with pytest.raises(SandboxException, match="404"):
        create("gone")
    sandbox.pause()
    sandbox.connect()
    assert sandbox.files.read("v") == "mine\n"
    refused = api.delete("/templates/base")
    assert refused.status_code == 400 and Template.exists("base")


def test_deleting_a_template_cancels_its_builds(api: httpx.Client, node: NodeProcess) -> None:
    before = set(node.vm_pids())
    info = Template.build_in_background(base().run_cmd("echo begun; sleep 600"), "cancelled")
    wait_for(lambda: "begun" in [e.message for e in Template.get_build_status(info).log_entries], "the step to run")
    started = time.monotonic()
    assert api.delete(f"/templates/{info.template_id}").status_code == 204
    assert time.monotonic() - started < 20
    with pytest.raises(BuildException, match="404"):
        Template.get_build_status(info)
    assert not (node.home / "builds" / f"{info.build_id}.jsonl").exists()
    wait_for(lambda: len(set(node.vm_pids()) - before) <= 2, "the build's VM to end")


def test_a_build_is_cancelled_and_its_template_stays(
    build: Build, create: Create, api: httpx.Client, node: NodeProcess
) -> None:
    build(base().run_cmd("echo one > v"), "kept")
    built = api.get("/templates/kept").json()
    machines = set(node.vm_pids())
    info = Template.build_in_background(base().run_cmd("echo begun; sleep 600"), "kept")
    path = f"/templates/kept/builds/{info.build_id}"
    wait_for(lambda: "begun" in [e.message for e in Template.get_build_status(info).log_entries], "the step to run")
    assert api.delete(path).status_code == 204
    assert api.delete(path).status_code == 404, "it is forgotten"
    assert not (node.home / "builds" / f"{info.build_id}.jsonl").exists()
    wait_for(lambda: len(set(node.vm_pids()) - machines) <= 2, "the build's VM to end")
    assert api.get("/templates/kept").json() == built
    assert create("kept").files.read("v") == "one\n"
    # One that waits for its steps, and one that has ended.
    waiting = api.post("/v3/templates", json={"name": "kept"}).json()["buildID"]
    assert api.delete(f"/templates/kept/builds/{waiting}").status_code == 204
    refused = api.delete(f"/templates/kept/builds/{built['builds'][0]['buildID']}")
    assert refused.status_code == 409 and "has ended" in refused.json()["message"]


def test_builds_run_side_by_side(build: Build, create: Create) -> None:
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda n: build(base().run_cmd(f"echo {n} > v"), f"parallel-{n}"), range(4)))
    assert [create(f"parallel-{n}").files.read("v") for n in range(4)] == [f"{n}\n" for n in range(4)]


async def test_async_sdk(context: Path, create: Create) -> None:
    template = AsyncTemplate(file_context_path=str(context)).from_base_image().copy("app", "/app").run_cmd("ls /app")
    logs: list[LogEntry] = []
    await AsyncTemplate.build(template, "async:v1", on_build_logs=logs.append)
    assert "main.py" in [entry.message for entry in logs]
    assert await AsyncTemplate.exists("async:v1")
    await AsyncTemplate.assign_tags("async:v1", "default")
    assert [tag.tag for tag in await AsyncTemplate.get_tags("async")] == ["default", "v1"]
    sandbox = await asyncio.to_thread(create, "async")
    assert await asyncio.to_thread(sandbox.files.read, "/app/.dot") == "dot"


def test_uploads_need_their_link(
    api: httpx.Client, node: NodeProcess, monkeypatch: pytest.MonkeyPatch, context: Path
) -> None:
    requested = api.post("/v3/templates", json={"name": "files"}).json()
    digest = "c" * 64
    link = api.get(f"/templates/{requested['templateID']}/files/{digest}")
    assert link.status_code == 201 and link.json()["present"] is False
    assert httpx.put(link.json()["url"] + "0", content=b"x").status_code == 403
    assert httpx.put(link.json()["url"].partition("?")[0], content=b"x").status_code == 403
    assert api.get(f"/templates/nothing/files/{digest}").status_code == 404
    assert api.get(f"/templates/{requested['templateID']}/files/short").status_code == 400
    big = b"x" * (6 << 20)  # larger than any other request may be
    assert httpx.put(link.json()["url"], content=big).status_code == 200
    assert api.get(f"/templates/{requested['templateID']}/files/{digest}").json()["present"] is True
    start = {"steps": [{"type": "COPY", "args": ["a", "/b", "", ""], "filesHash": digest}]}
    assert api.post(f"/v2/templates/files/builds/{requested['buildID']}", json=start).status_code == 202
    path = f"/templates/files/builds/{requested['buildID']}/status"
    wait_for(lambda: api.get(path).json()["status"] == "error", "the failure")
    status = api.get(path).json()
    assert "failed to copy 'a' to '/b'" in status["reason"]["message"]
    monkeypatch.setattr("e2b.template_sync.main.get_file_upload_link", _link_to_nowhere)
    with pytest.raises(FileUploadException):
        Template.build(base(context).copy("app", "/x"), "files")


def _link_to_nowhere(*_: object) -> object:
    return TemplateBuildFileUpload(present=False, url="http://127.0.0.1:9/template-files/x")


def test_death_during_a_build(build: Build, create: Create, node: NodeProcess) -> None:
    build(base().run_cmd("echo good > v"), "survivor")
    info = Template.build_in_background(base().run_cmd("echo first > v").run_cmd("echo begun; sleep 600"), "survivor")
    wait_for(lambda: "begun" in [e.message for e in Template.get_build_status(info).log_entries], "the step to run")
    node.kill9()
    node.start()
    status = Template.get_build_status(info)
    assert status.status.value == "error" and status.reason is not None and "stopped" in status.reason.message
    assert "begun" in [entry.message for entry in status.log_entries], "its log is still there"
    assert create("survivor").files.read("v") == "good\n"
    wait_for(lambda: len(node.vm_pids()) == 3, "only the sandbox and two warm VMs to be left")
    layers = {name.split(".")[0] for name in _names(node.home / "layers")}
    assert layers == set(node.records("layers"))
    # What had been done before the crash is not done again.
    logs = build(base().run_cmd("echo first > v").run_cmd("echo second >> v"), "survivor")
    assert len(cached(logs)) == 1
    assert create("survivor").files.read("v") == "first\nsecond\n"


def test_a_graceful_stop_ends_builds(node: NodeProcess) -> None:
    info = Template.build_in_background(base().run_cmd("echo begun; sleep 600"), "stopped")
    wait_for(lambda: "begun" in [e.message for e in Template.get_build_status(info).log_entries], "the step to run")
    assert node.terminate() == 0
    assert not node.vm_pids()
    assert json.loads(node.records("builds")[info.build_id])["status"] == "error"
    node.start()


def test_a_build_whose_machine_dies_fails(node: NodeProcess, create: Create) -> None:
    warm = set(node.vm_pids())
    info = Template.build_in_background(base().run_cmd("echo begun; sleep 600"), "killed")
    wait_for(lambda: "begun" in [e.message for e in Template.get_build_status(info).log_entries], "the step to run")
    victims = [pid for pid in warm if pid in node.vm_pids()]  # the build took one of the warm ones
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    assert victims
    assert _finished(info).status.value == "error"
    assert create().commands.run("echo fine").stdout == "fine\n"


@pytest.fixture
def registry_host(node: NodeProcess, tmp_path: Path) -> Iterator[str]:
    with images.private_registry(node, tmp_path) as host:
        if host is None:
            pytest.skip("docker-registry is not installed")
        yield host


def test_from_an_image_of_a_private_registry(
    build: Build, create: Create, context: Path, registry_host: str, node: NodeProcess
) -> None:
    image = f"{registry_host}/{images.NAME}"
    with pytest.raises(BuildException, match=r"credentials|unauthorized|refuses|401"):
        build(Template().from_image(image), "tiny")
    template = (
        Template(file_context_path=str(context))
        .from_image(image, username=registries.USER, password=registries.PASSWORD)
        .run_cmd(
            "mkdir /tools && echo '#!/bin/sh' > /tools/t && echo 'echo tool $FROM_IMAGE' >> /tools/t", user="root"
        )
        .run_cmd("chmod 755 /tools/t", user="root")
        .copy("app", "made/")
        .run_cmd("t; id -un; pwd; ls made")
    )
    logs = build(template, "tiny")
    assert "booting with 1 vCPU and 512 MiB" in logs
    assert {"tool yes", "user", "/app", "main.py"} <= set(logs)
    sandbox = create("tiny")
    assert sandbox.commands.run("t; pwd; cat made/main.py").stdout == "tool yes\n/app\nprint('main')\n"
    sandbox.files.write("/home/user/f", "written")
    assert sandbox.commands.run("stat -c %U /home/user/f").stdout == "user\n"
    # The image's boot is cached: another template on it does not boot again.
    again = Template().from_image(image, username=registries.USER, password=registries.PASSWORD).run_cmd("echo again")
    assert not [line for line in build(again, "tiny-2") if line.startswith("booting")]
    # The password is in no file of the node.
    kept = [node.home / "aenv.db", node.home / "aenv.db-wal", node.log, *(node.home / "builds").iterdir()]
    assert not [path for path in kept if path.exists() and registries.PASSWORD.encode() in path.read_bytes()]
