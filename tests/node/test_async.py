"""The asynchronous Python SDK: the main calls, and many of them at once on one sandbox."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from e2b import (
    AsyncSandbox,
    AsyncSecret,
    AsyncTemplate,
    AsyncVolume,
    AuthenticationException,
    CommandExitException,
    FilesystemEvent,
    FilesystemEventType,
    NotFoundException,
    PtySize,
    SandboxException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

from tests.node.conftest import Create
from tests.node.process import NodeProcess


def compat(feature: str, verdict: str = "works") -> pytest.MarkDecorator:
    return pytest.mark.compat("Python, async", feature, verdict)


@pytest.fixture
async def sandbox(create: Create) -> AsyncIterator[AsyncSandbox]:
    """Gone after the test, as everything on the node (``create`` sees to that)."""
    yield await AsyncSandbox.create("base", timeout=300)


async def eventually(condition, what: str, timeout: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    for _ in range(int(timeout / 0.05)):
        if condition():
            return
        await asyncio.sleep(0.05)
    pytest.fail(f"waited {timeout:.0f} s for {what}")


@compat("create")
async def test_create_and_information(create: Create) -> None:
    sandbox = await AsyncSandbox.create("base", timeout=300, metadata={"a": "ü&b"}, envs={"COLOUR": "green"})
    info = await sandbox.get_info()
    assert (info.sandbox_id, info.name, info.state) == (sandbox.sandbox_id, "base", SandboxState.RUNNING)
    assert info.metadata == {"a": "ü&b"}
    assert await sandbox.is_running()
    assert (await sandbox.commands.run("echo $COLOUR")).stdout == "green\n"


@compat("list")
async def test_list(create: Create) -> None:
    made = await asyncio.gather(*(AsyncSandbox.create("base", metadata={"n": "1"}) for _ in range(3)))
    await made[0].pause()
    paginator = AsyncSandbox.list(query=SandboxQuery(metadata={"n": "1"}), limit=2)
    seen = []
    while paginator.has_next:
        seen += [item.sandbox_id for item in await paginator.next_items()]
    assert sorted(seen) == sorted(sandbox.sandbox_id for sandbox in made)
    paused = await AsyncSandbox.list(query=SandboxQuery(state=[SandboxState.PAUSED])).next_items()
    assert [item.sandbox_id for item in paused] == [made[0].sandbox_id]


@compat("timeout")
async def test_set_timeout(sandbox: AsyncSandbox) -> None:
    before = (await sandbox.get_info()).end_at
    await sandbox.set_timeout(900)
    assert (await sandbox.get_info()).end_at > before


@compat("commands")
async def test_commands(sandbox: AsyncSandbox) -> None:
    result = await sandbox.commands.run("id -un; pwd; echo $A; echo oops >&2", cwd="/tmp", envs={"A": "b"})
    assert (result.stdout, result.stderr) == ("user\n/tmp\nb\n", "oops\n")
    with pytest.raises(CommandExitException) as failed:
        await sandbox.commands.run("exit 7")
    assert failed.value.exit_code == 7


@compat("commands, streaming")
async def test_output_arrives_while_the_command_runs(sandbox: AsyncSandbox) -> None:
    clock = asyncio.get_running_loop().time
    arrivals: list[tuple[str, float]] = []
    await sandbox.commands.run(
        "for i in 1 2 3; do echo $i; sleep 0.5; done", on_stdout=lambda text: arrivals.append((text, clock()))
    )
    assert "".join(text for text, _ in arrivals) == "1\n2\n3\n"
    assert arrivals[-1][1] - arrivals[0][1] > 0.5


@compat("commands, background")
async def test_background_commands(sandbox: AsyncSandbox) -> None:
    handle = await sandbox.commands.run("sleep 1; echo late; sleep 300", background=True, timeout=0)
    assert handle.pid in [process.pid for process in await sandbox.commands.list()]
    seen: list[str] = []
    second = await sandbox.commands.connect(handle.pid, on_stdout=seen.append)
    await eventually(lambda: "late" in "".join(seen), "output on the second connection")
    assert await sandbox.commands.kill(handle.pid)
    for waiting in (handle, second):
        with pytest.raises(CommandExitException):
            await waiting.wait()
    assert not await sandbox.commands.kill(handle.pid)


@compat("commands, stdin")
async def test_stdin(sandbox: AsyncSandbox) -> None:
    seen: list[str] = []
    handle = await sandbox.commands.run("cat; echo end", background=True, stdin=True, on_stdout=seen.append)
    await sandbox.commands.send_stdin(handle.pid, "hello\n")
    await eventually(lambda: "hello" in "".join(seen), "the echo")
    await sandbox.commands.close_stdin(handle.pid)
    assert (await handle.wait()).stdout == "hello\nend\n"


@compat("commands, timeout")
async def test_a_command_ends_with_its_timeout(sandbox: AsyncSandbox) -> None:
    with pytest.raises(TimeoutException):
        await sandbox.commands.run("sleep 60", timeout=1)


@compat("files")
async def test_files(sandbox: AsyncSandbox) -> None:
    blob = bytes(range(256)) * 4096
    await sandbox.files.write("a/b/text", "grüße")
    await sandbox.files.write("a/blob", blob)
    assert await sandbox.files.read("a/b/text") == "grüße"
    assert bytes(await sandbox.files.read("a/blob", format="bytes")) == blob
    streamed = b"".join([chunk async for chunk in await sandbox.files.read("a/blob", format="stream")])
    assert streamed == blob
    assert sorted(entry.name for entry in await sandbox.files.list("a")) == ["b", "blob"]
    assert (await sandbox.files.get_info("a/blob")).size == len(blob)
    await sandbox.files.rename("a/blob", "a/moved")
    assert await sandbox.files.exists("a/moved")
    await sandbox.files.remove("a/moved")
    assert not await sandbox.files.exists("a/moved")
    assert await sandbox.files.make_dir("a/new")
    assert not await sandbox.files.make_dir("a/new")


@compat("files, many")
async def test_many_files_in_one_call(sandbox: AsyncSandbox) -> None:
    written = await sandbox.files.write_files([{"path": f"many/{n}", "data": str(n)} for n in range(5)])
    assert [entry.name for entry in written] == list("01234")
    assert await sandbox.files.read("many/3") == "3"


@compat("files, watch")
async def test_watch_dir(sandbox: AsyncSandbox) -> None:
    await sandbox.files.make_dir("watched/below")
    events: list[FilesystemEvent] = []
    handle = await sandbox.files.watch_dir("watched", on_event=events.append, recursive=True)
    await sandbox.files.write("watched/one", "1")
    await sandbox.files.write("watched/below/two", "2")
    await sandbox.files.remove("watched/one")

    def has(name: str, kind: FilesystemEventType) -> bool:
        return any(event.name == name and event.type == kind for event in events)

    await eventually(lambda: has("one", FilesystemEventType.WRITE), "the write")
    await eventually(lambda: has("below/two", FilesystemEventType.CREATE), "the creation below")
    await eventually(lambda: has("one", FilesystemEventType.REMOVE), "the removal")
    await handle.stop()  # type: ignore[no-untyped-call]


@compat("pty")
async def test_pty(sandbox: AsyncSandbox) -> None:
    seen = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=24, cols=80), on_data=seen.extend, timeout=0)
    await sandbox.pty.send_stdin(terminal.pid, b"echo $((40+2)); stty size\n")
    await eventually(lambda: b"42" in seen and b"24 80" in seen, "the answer of the terminal")
    await sandbox.pty.resize(terminal.pid, PtySize(rows=30, cols=100))
    await sandbox.pty.send_stdin(terminal.pid, b"stty size\n")
    await eventually(lambda: b"30 100" in seen, "the new size")
    assert await sandbox.pty.kill(terminal.pid)
    with pytest.raises(CommandExitException):
        await terminal.wait()


@compat("git")
async def test_git(sandbox: AsyncSandbox) -> None:
    await sandbox.git.init("repository", initial_branch="main")
    await sandbox.git.configure_user("A", "a@example.org", scope="local", path="repository")
    await sandbox.files.write("repository/file", "x")
    await sandbox.git.add("repository")
    await sandbox.git.commit("repository", "first")
    status = await sandbox.git.status("repository")
    assert (status.current_branch, list(status.file_status)) == ("main", [])
    await sandbox.git.create_branch("repository", "other")
    assert sorted((await sandbox.git.branches("repository")).branches) == ["main", "other"]
    await sandbox.git.clone("/home/user/repository", path="copy")
    assert await sandbox.files.read("copy/file") == "x"


@compat("pause and connect")
async def test_pause_and_connect(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("kept", "yes")
    sleeper = await sandbox.commands.run("sleep 300", background=True, timeout=0)
    await sandbox.pause()
    assert (await sandbox.get_info()).state == SandboxState.PAUSED
    again = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert await again.files.read("kept") == "yes"
    assert sleeper.pid in [process.pid for process in await again.commands.list()]


@compat("fork")
async def test_fork(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("story", "once")
    children = await sandbox.fork(count=3)
    forks = [child for child in children if isinstance(child, AsyncSandbox)]
    assert len(forks) == 3, children
    assert await asyncio.gather(*(fork.files.read("story") for fork in forks)) == ["once"] * 3
    await asyncio.gather(*(fork.files.write("story", str(n)) for n, fork in enumerate(forks)))
    assert await asyncio.gather(*(fork.files.read("story") for fork in forks)) == ["0", "1", "2"]


@compat("metrics")
async def test_metrics(sandbox: AsyncSandbox) -> None:
    (sample, *_) = await sandbox.get_metrics()
    assert 0 < sample.mem_used < sample.mem_total
    assert 0 < sample.disk_used < sample.disk_total


@compat("signed URLs")
async def test_signed_urls(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("down", "loaded")
    async with httpx.AsyncClient() as stranger:
        answer = await stranger.get(sandbox.download_url("down", use_signature_expiration=60))
        assert (answer.status_code, answer.text) == (200, "loaded")
        upload = sandbox.upload_url("up", use_signature_expiration=60)
        assert (await stranger.post(upload, files={"file": b"up"})).status_code == 200
        assert await sandbox.files.read("up") == "up"
        forged = sandbox.download_url("down").replace("path=down", "path=%2Fetc%2Fshadow")
        assert (await stranger.get(forged)).status_code == 401


@compat("internet access")
async def test_internet_access_can_be_refused(create: Create) -> None:
    sandbox = await AsyncSandbox.create("base", allow_internet_access=False)
    result = await sandbox.commands.run("curl -sm 3 http://1.1.1.1 || echo closed")
    assert "closed" in result.stdout


@compat("kill")
async def test_kill(sandbox: AsyncSandbox) -> None:
    assert await sandbox.kill()
    assert not await AsyncSandbox.kill(sandbox.sandbox_id)


@compat("errors")
async def test_errors(sandbox: AsyncSandbox) -> None:
    with pytest.raises(AuthenticationException):
        await AsyncSandbox.create("base", api_key="e2b_" + "0" * 40)
    with pytest.raises(SandboxException, match="no-such-template"):
        await AsyncSandbox.create("no-such-template")
    with pytest.raises(NotFoundException):
        await sandbox.files.read("/no/such")


@compat("secrets", "differs")
async def test_secrets(node: NodeProcess) -> None:
    made = await AsyncSecret.create("async-secret", "hidden", metadata={"a": "b"})
    assert made.version == 1
    assert (await AsyncSecret.update("async-secret", "more hidden")).version == 2
    assert (await AsyncSecret.get_info("async-secret")).metadata == {"a": "b"}
    assert "async-secret" in [found.name for found in await AsyncSecret.list().next_items()]
    assert await AsyncSecret.destroy(made.secret_id)
    assert not await AsyncSecret.exists("async-secret")


@compat("volumes")
async def test_volumes(node: NodeProcess) -> None:
    volume = await AsyncVolume.create("async-volume")
    assert "async-volume" in [found.name for found in await AsyncVolume.list()]
    assert (await AsyncVolume.get_info(volume.volume_id)).name == "async-volume"
    assert await AsyncVolume.destroy(volume.volume_id)


@compat("volume content")
async def test_volume_content(node: NodeProcess) -> None:
    volume = await AsyncVolume.create("async-content")
    try:
        large = b"abc" * 2_000_000
        await volume.make_dir("/dir", mode=0o700)
        await volume.write_file("/dir/large", large)
        assert await volume.read_file("/dir/large", format="bytes") == large
        stream = await volume.read_file("/dir/large", format="stream")
        assert b"".join([chunk async for chunk in stream]) == large
        assert [entry.name for entry in await volume.list("/", depth=2)] == ["dir", "large"]
        assert (await volume.update_metadata("/dir/large", uid=1000)).uid == 1000
        await volume.remove("/dir")
        assert not await volume.exists("/dir/large")
    finally:
        await AsyncVolume.destroy(volume.volume_id)


@compat("volume mounts", "refused")
async def test_volume_mounts_are_refused(node: NodeProcess) -> None:
    with pytest.raises(SandboxException, match=r"501: .*cannot be mounted"):
        await AsyncSandbox.create("base", volume_mounts={"/data": "some-volume"})


@compat("snapshots")
async def test_snapshots(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("f", "then")
    snapshot = await sandbox.create_snapshot()
    await sandbox.files.write("f", "later")
    again = await AsyncSandbox.create(snapshot.snapshot_id)
    assert await again.files.read("f") == "then"
    assert snapshot.snapshot_id in [found.snapshot_id for found in await AsyncSandbox.list_snapshots().next_items()]
    assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id)


@compat("network rules, changed")
async def test_network_rules_change(sandbox: AsyncSandbox) -> None:
    await sandbox.update_network({"deny_out": ["0.0.0.0/0"]})
    assert "closed" in (await sandbox.commands.run("curl -sm 3 http://1.1.1.1 || echo closed")).stdout


@compat("network rules by domain", "refused")
async def test_network_rules_by_domain_are_refused(node: NodeProcess) -> None:
    with pytest.raises(SandboxException, match="domain name"):
        await AsyncSandbox.create("base", network={"allow_out": ["example.org"], "deny_out": ["0.0.0.0/0"]})


@compat("pause without memory")
async def test_pause_without_memory(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("kept", "yes")
    await sandbox.pause(keep_memory=False)
    await sandbox.connect()
    assert await sandbox.files.read("kept") == "yes"


@compat("templates")
async def test_templates_are_built_and_found_by_name(create: Create, api: httpx.Client) -> None:
    steps = AsyncTemplate().from_template("base").run_cmd("echo built > /home/user/mark")
    built = await AsyncTemplate.build(steps, "async-built")
    assert await AsyncTemplate.exists("async-built")
    sandbox = await AsyncSandbox.create("async-built")
    assert await sandbox.files.read("mark") == "built\n"
    await asyncio.to_thread(api.delete, f"/templates/{built.template_id}")
    assert not await AsyncTemplate.exists("async-built")


@compat("many streams at once")
async def test_fifty_streams_at_once_on_one_sandbox(sandbox: AsyncSandbox) -> None:
    async def stream(number: int) -> str:
        seen: list[str] = []
        await sandbox.commands.run(
            f"for i in 1 2 3; do echo {number}-$i; sleep 1; done", on_stdout=seen.append, timeout=200
        )
        return "".join(seen)

    outputs = await asyncio.gather(*map(stream, range(50)))
    assert outputs == [f"{n}-1\n{n}-2\n{n}-3\n" for n in range(50)]
    blobs = [bytes([number]) * 100_000 for number in range(20)]
    await asyncio.gather(*(sandbox.files.write(f"blob-{n}", blob) for n, blob in enumerate(blobs)))
    read = await asyncio.gather(*(sandbox.files.read(f"blob-{n}", format="bytes") for n in range(20)))
    assert [bytes(blob) for blob in read] == blobs
