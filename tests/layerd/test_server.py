"""The layer server as a whole: a real mount, read by real processes, through kills and faults."""

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from aenv.errors import ConflictError, CorruptFileError, NotFoundError, SourceError
from aenv.storage import zfile
from aenv.storage.layerd import mount
from aenv.storage.layerd.exports import Layer
from tests.layerd.support import PAGE, Server, Volume, drop_page_cache, until

SIZE = 8 << 20

READER = """
import hashlib, json, mmap, os, random, sys
path, seed, reads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
random.seed(seed)
expected = open(sys.argv[4], "rb").read()
fd = os.open(path, os.O_RDONLY)
mapped = mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ)
print("ready", flush=True)
wrong = 0
for i in range(reads):
    at = random.randrange(len(expected))
    length = random.choice((1, 4096, 100_000, 1 << 20))
    data = mapped[at:at + length] if i % 2 else os.pread(fd, length, at)
    wrong += data != expected[at:at + length]
    if i % 8 == 0:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
print(json.dumps(wrong))
"""


async def reader(path: Path, expected: Path, seed: int, reads: int = 60) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, str(path), str(seed), str(reads), str(expected),
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def result(process: asyncio.subprocess.Process) -> str:
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    return out.decode().strip()


async def read(path: Path, offset: int = 0, length: int = 1 << 30) -> bytes:
    """In a thread: the answer may be long in coming."""

    def work() -> bytes:
        data = bytearray()
        with path.open("rb", buffering=0) as file:
            while len(data) < length:
                part = os.pread(file.fileno(), min(1 << 20, length - len(data)), offset + len(data))
                if not part:
                    break
                data += part
        return bytes(data)

    return await asyncio.to_thread(work)


def names(server: Server) -> list[str]:
    return sorted(path.name for path in server.config.mount.iterdir())


def stacked(server: Server) -> tuple[Volume, bytes]:
    """A volume of three layers with holes, one of them compressed, and its contents."""
    bottom, middle, top = os.urandom(SIZE // 2), os.urandom(SIZE // 4), os.urandom(PAGE * 3)
    layers = [server.far.add(SIZE, [(PAGE, bottom)])]
    at = SIZE // 3 // PAGE * PAGE
    contents = bytearray(SIZE)
    contents[PAGE : PAGE + len(bottom)] = bottom
    contents[at : at + len(middle)] = middle
    plain = server.far.add(SIZE, [(at, middle)])
    packed = server.far.folder / "packed"
    zfile.write_zfile(server.far.folder / plain.digest[7:], packed)
    layers.append(server.far.adopt(packed))
    contents[5 * PAGE : 5 * PAGE + len(top)] = top
    layers.append(server.far.add(SIZE, [(5 * PAGE, top)]))
    return Volume(SIZE, tuple(layers)), bytes(contents)


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


async def test_files_are_what_their_layers_say(server: Server) -> None:
    volume, contents = stacked(server)
    assert await server.ensure_running() is True
    path = await server.export("disk", volume)
    assert path == server.config.mount / "disk"
    assert await server.export("disk", volume) == path
    assert names(server) == ["disk"]
    assert path.stat().st_size == SIZE
    assert await read(path) == contents
    assert await read(path, SIZE - 10) == contents[-10:]
    drop_page_cache(path)
    assert await read(path, 4 * PAGE + 17, 5 * PAGE) == contents[4 * PAGE + 17 : 9 * PAGE + 17]
    with path.open("rb") as file:
        assert os.lseek(file.fileno(), 0, os.SEEK_DATA) == PAGE
        assert os.lseek(file.fileno(), PAGE, os.SEEK_HOLE) == SIZE // 3 // PAGE * PAGE + SIZE // 4
    for attempt in (lambda: path.open("r+b"), lambda: (path.parent / "new").touch(), path.unlink):
        with pytest.raises(OSError) as caught:
            attempt()
        assert caught.value.errno in (errno.EROFS, errno.EACCES)
    with pytest.raises(FileNotFoundError):
        (path.parent / "other").stat()
    stats = await server.stats()
    assert stats["exports"]["disk"]["touched"] == SIZE
    assert stats["total"]["fetched"] > SIZE // 2


async def test_a_directory_of_many_files(server: Server) -> None:
    await server.ensure_running()
    wanted = [f"file-{number:03}-{'x' * 100}" for number in range(150)]
    for name in wanted:
        await server.export(name, Volume(SIZE, ()))
    assert names(server) == wanted
    assert await read(server.config.mount / wanted[7]) == bytes(SIZE)


async def test_kill_9_with_many_readers(server: Server, tmp_path: Path) -> None:
    """No read fails, is lost or is wrong, however often the server dies under it."""
    volume, contents = stacked(server)
    expected = write(tmp_path / "expected", contents)
    await server.ensure_running()
    path = await server.export("disk", volume)
    inode = path.stat().st_ino
    server.far.faults(all={"latency": 0.01})
    readers = [await reader(path, expected, seed, reads=600) for seed in range(6)]
    work = asyncio.gather(*map(result, readers))
    killed: set[int] = set()
    while not work.done() and len(killed) < 8:
        found = server.processes()["server"]
        if found and found[0] not in killed:
            await asyncio.sleep(random.uniform(0, 0.2))
            os.kill(found[0], signal.SIGKILL)
            killed.add(found[0])
        await asyncio.sleep(0.01)
    assert await work == ["0"] * 6
    assert len(killed) >= 3
    assert path.stat().st_ino == inode
    assert (await server.ping())["pid"] not in killed


async def test_a_read_that_waits_is_answered_by_the_next_server(server: Server) -> None:
    data = os.urandom(SIZE)
    layer = server.far.add(SIZE, [(0, data)])
    await server.ensure_running()
    path = await server.export("disk", Volume(SIZE, (layer,)))
    server.far.faults(all={"hang": True})
    waiting = [asyncio.create_task(read(path, at << 20, 4096)) for at in range(1, 8)]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in waiting)
    server.kill9()
    server.far.faults()
    assert await asyncio.gather(*waiting) == [data[at << 20 :][:4096] for at in range(1, 8)]


async def test_open_files_are_remembered_across_servers(server: Server) -> None:
    data = os.urandom(SIZE)
    await server.ensure_running()
    volume = Volume(SIZE, (server.far.add(SIZE, [(0, data)]),))
    path = await server.export("disk", volume)
    with path.open("rb") as file:
        server.kill9()
        assert (await server.unexport("disk")).deferred
        assert not path.exists()
        assert os.pread(file.fileno(), 100, 5000) == data[5000:5100]
        with pytest.raises(ConflictError):
            await server.stop()
        assert [e["name"] for e in await server.exports()] == ["disk"]
        # The name is free again, for other contents.
        other = await server.export("disk", Volume(PAGE, ()))
        assert await read(other) == bytes(PAGE)
        assert os.pread(file.fileno(), 100, 7000) == data[7000:7100]

    async def one_left() -> bool:
        return len(await server.exports()) == 1

    await until(one_left, "the removed file to go when it is closed")
    assert not (await server.unexport("disk")).deferred
    with pytest.raises(NotFoundError):
        await server.unexport("disk")


async def test_one_file_fails_and_others_go_on(server: Server) -> None:
    good, bad = os.urandom(SIZE), os.urandom(SIZE)
    layers = {name: server.far.add(SIZE, [(0, data)]) for name, data in (("good", good), ("bad", bad))}
    await server.ensure_running()
    paths = {name: await server.export(name, Volume(SIZE, (layer,))) for name, layer in layers.items()}
    digest = layers["bad"].digest
    for fault in ({"fail": True}, {"short": 1}, {"hang": True}):
        server.far.faults(**{digest: fault})
        drop_page_cache(paths["good"])
        failing = [asyncio.create_task(read(paths["bad"], n << 20, 4096)) for n in range(1, 8)]
        assert await read(paths["good"]) == good
        if fault == {"hang": True}:  # as many as one file can have under way, and more
            assert not any(task.done() for task in failing)
        for outcome in await asyncio.gather(*failing, return_exceptions=True):
            assert isinstance(outcome, OSError)
            assert outcome.errno == errno.EIO
    server.far.faults(**{digest: {"fail_first": 0}})
    assert await read(paths["bad"]) == bad  # errors are not remembered
    stats = (await server.stats())["exports"]
    assert stats["bad"]["errors"] >= 21
    assert stats["good"]["errors"] == 0


async def test_what_cannot_be_exported(server: Server) -> None:
    await server.ensure_running()
    layer = server.far.add(SIZE, [(0, b"x" * PAGE)])
    path = server.far.folder / layer.digest[7:]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFileError):
        await server.export("cut", Volume(SIZE, (layer,)))
    foreign = server.far.adopt(write(server.far.folder / "x", b"x" * 10000))
    with pytest.raises(CorruptFileError):
        await server.export("foreign", Volume(SIZE, (foreign,)))
    far = server.far.add(SIZE, [(0, b"y" * PAGE)])
    server.far.faults(**{far.digest: {"fail": True}})
    with pytest.raises(SourceError):
        await server.export("far", Volume(SIZE, (far,)))
    assert names(server) == []
    await server.export("one", Volume(SIZE, ()))
    with pytest.raises(ConflictError):
        await server.export("one", Volume(SIZE + PAGE, ()))


async def test_the_keeper_dies(server: Server, tmp_path: Path) -> None:
    volume, contents = stacked(server)
    await server.ensure_running()
    path = await server.export("disk", volume)
    with path.open("rb") as file:
        for _ in range(2):
            keeper = server.keeper_pid
            os.kill(keeper, signal.SIGKILL)

            async def another(old: int = keeper) -> bool:
                return server.processes()["keeper"] not in ([], [old])

            await until(another, "another keeper")
            drop_page_cache(path)
            assert os.pread(file.fileno(), 100, PAGE) == contents[PAGE : PAGE + 100]
            server.kill9()  # the new keeper does what the old one did
            drop_page_cache(path)
            assert await read(path) == contents
    await server.stop()
    assert not mount.alive(server.config.mount)
    await until(lambda: _gone(server), "all processes to end")


async def _gone(server: Server) -> bool:
    return not any(server.processes().values())


async def test_both_die(server: Server) -> None:
    """The mount is lost: the next start says so, and mounts anew."""
    volume, contents = stacked(server)
    await server.ensure_running()
    path = await server.export("disk", volume)
    file = os.open(path, os.O_RDONLY)
    pids = [server.keeper_pid, server.server_pid]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that neither starts the other
        for pid in pids:
            os.kill(pid, number)
    await until(lambda: _gone(server), "both to end")
    with pytest.raises(OSError) as caught:
        os.pread(file, 10, 0)
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    with pytest.raises(SourceError):
        await server.exports()
    assert await server.ensure_running() is True
    assert await server.exports() == []
    assert await read(await server.export("disk", volume)) == contents
    with contextlib.suppress(OSError):  # ENOTCONN
        os.close(file)


async def test_a_node_comes_and_goes(server: Server, tmp_path: Path) -> None:
    """The server outlives its client, and one with the same settings finds it."""
    volume, contents = stacked(server)
    expected = write(tmp_path / "expected", contents)
    await server.ensure_running()
    path = await server.export("disk", volume)
    mapped = await reader(path, expected, 1, reads=200)
    pid = (await server.ping())["pid"]
    node = Server(tmp_path)
    assert await node.ensure_running() is False
    assert (await node.ping())["pid"] == pid
    other = Server(tmp_path, cache=1 << 20)
    assert await other.ensure_running() is False  # files are open
    assert (await other.ping())["pid"] == pid
    assert await result(mapped) == "0"

    async def replaced() -> bool:
        return await other.ensure_running()

    await until(replaced, "the server to be replaced when no file is open")
    assert (await other.ping())["pid"] != pid


async def test_sigterm(server: Server) -> None:
    """Unmounts, unless that would pull files from under somebody."""
    await server.ensure_running()
    path = await server.export("disk", Volume(SIZE, ()))
    with path.open("rb") as file:
        os.kill(server.keeper_pid, signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert os.pread(file.fileno(), 10, 0) == bytes(10)
        assert mount.alive(server.config.mount)

    async def ended() -> bool:
        for pid in server.processes()["keeper"]:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, signal.SIGTERM)
        return await _gone(server)

    await until(ended, "the server to end")
    assert not mount.alive(server.config.mount)
    assert not server.config.socket.exists()


async def test_only_one_runs(server: Server) -> None:
    await server.ensure_running()
    again = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "aenv.storage.layerd", "keep", server.config.dump(), stderr=asyncio.subprocess.PIPE
    )
    _, said = await again.communicate()
    assert again.returncode == 1
    assert b"runs in" in said


async def test_a_far_start_reads_little(server: Server) -> None:
    """Random page faults fetch about what they touch, and a scan is fetched ahead in large reads."""
    data = os.urandom(64 << 20)
    layer = server.far.add(len(data), [(0, data)])
    await server.ensure_running()
    path = await server.export("memory", Volume(len(data), (layer,)))
    server.far.faults(all={"latency": 0.005})
    before = len(server.far.reads())
    assert hashlib.sha256(await read(path, 0, 32 << 20)).digest() == hashlib.sha256(data[: 32 << 20]).digest()
    scan = server.far.reads()[before:]
    assert len(scan) < 200
    assert sum(length for _, _, length in scan) < (32 << 20) + (20 << 20)


async def test_control_answers_nonsense(server: Server) -> None:
    await server.ensure_running()
    reader, writer = await asyncio.open_unix_connection(server.config.socket)
    for line in (b"x", b"[]", b'{"op": "fly"}', b'{"op": "export"}', b'{"op": "unexport", "name": 7}'):
        writer.write(line + b"\n")
        assert "error" in json.loads(await reader.readline())
    writer.write(b'{"op": "ping"}\n')
    assert json.loads(await reader.readline())["ok"]["exports"] == 0
    writer.close()
    with pytest.raises(Exception, match="cannot name"):
        await server.export("../x", Volume(1, ()))
    with pytest.raises(Exception, match="digest"):
        await server.export("x", Volume(1, (Layer("sha256:../../etc", 1),)))
