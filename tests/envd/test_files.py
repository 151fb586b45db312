"""Files and directories through the official SDK and `/files`."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pwd
import random
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from urllib.parse import quote

import pytest
from e2b import FileNotFoundException, FileType, InvalidArgumentException, Sandbox
from e2b.sandbox.filesystem.filesystem import WriteEntry
from e2b.sandbox.filesystem.watch_handle import FilesystemEvent, FilesystemEventType

from tests.envd.daemon import Envd, wait_until


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    # Other users must be able to get in.
    me = pwd.getpwuid(os.getuid()).pw_name
    for path in (tmp_path, *tmp_path.parents):
        if path != Path("/tmp") and path.is_relative_to("/tmp") and path.owner() == me:
            path.chmod(path.stat().st_mode | 0o055)
    return tmp_path


def files(path: Path) -> str:
    return "/files?username=root&path=" + quote(str(path))


def test_write_and_read(sandbox: Sandbox, folder: Path) -> None:
    target = folder / "a/b/ü c.txt"
    info = sandbox.files.write(str(target), "héllo", user="nobody")
    assert (info.name, info.type, info.path) == ("ü c.txt", FileType.FILE, str(target))
    assert sandbox.files.read(str(target)) == "héllo"
    assert target.owner() == "nobody" and target.parent.owner() == "nobody"
    sandbox.files.write(str(target), b"\x00\xff")
    assert bytes(sandbox.files.read(str(target), format="bytes")) == b"\x00\xff"
    sandbox.files.write(str(target), "")
    assert sandbox.files.read(str(target)) == ""


def test_many_files_at_once(sandbox: Sandbox, folder: Path) -> None:
    entries = [WriteEntry(path=str(folder / f'd{n % 5}/f "{n}"'), data=f"data {n}" * n) for n in range(50)]
    written = sandbox.files.write_files(entries, user="root")
    assert [w.path for w in written] == [e["path"] for e in entries]
    for n, entry in enumerate(entries):
        assert Path(entry["path"]).read_text() == f"data {n}" * n


def test_large_files_in_constant_memory(envd: Envd, sandbox: Sandbox, folder: Path) -> None:
    data = random.Random(1).randbytes(1 << 20) * 64
    digest = hashlib.sha256(data).digest()
    multipart, raw = folder / "multipart", folder / "raw"
    sandbox.files.write(str(multipart), data)
    sandbox.files.write(str(raw), io.BytesIO(data))
    assert hashlib.sha256(multipart.read_bytes()).digest() == digest
    assert hashlib.sha256(raw.read_bytes()).digest() == digest
    assert hashlib.sha256(sandbox.files.read(str(raw), format="bytes")).digest() == digest
    streamed = hashlib.sha256()
    for chunk in sandbox.files.read(str(raw), format="stream"):
        streamed.update(chunk)
    assert streamed.digest() == digest
    status = Path(f"/proc/{envd.process.pid}/status").read_text()
    peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
    assert peak < 16_000, f"envd's memory grew to {peak} kB"


def test_gzip_both_ways(envd: Envd, sandbox: Sandbox, folder: Path) -> None:
    target, text = folder / "z", "compress me " * 100_000
    sandbox.files.write(str(target), text, gzip=True)
    assert target.read_text() == text
    assert sandbox.files.read(str(target), gzip=True) == text
    reply = envd.request("GET", files(target), headers={"Accept-Encoding": "gzip"})
    assert reply.headers["content-encoding"] == "gzip"
    assert gzip.decompress(reply.body).decode() == text
    refused = envd.request("GET", files(target), headers={"Accept-Encoding": "br, identity;q=0"})
    assert refused.status == 406 and refused.json()["code"] == 406


def test_ranges_and_validators(envd: Envd, folder: Path) -> None:
    target = folder / "r.bin"
    target.write_bytes(bytes(range(256)) * 4096)
    whole = envd.request("GET", files(target))
    assert whole.headers["content-length"] == str(256 * 4096)
    assert whole.headers["content-disposition"] == 'inline; filename="r.bin"'
    part = envd.request("GET", files(target), headers={"Range": "bytes=10-19"})
    assert (part.status, part.body) == (206, bytes(range(10, 20)))
    assert part.headers["content-range"] == f"bytes 10-19/{256 * 4096}"
    tail = envd.request("GET", files(target), headers={"Range": "bytes=-3"})
    assert tail.body == bytes([253, 254, 255])
    beyond = envd.request("GET", files(target), headers={"Range": "bytes=99999999-"})
    assert beyond.status == 416
    same = envd.request("GET", files(target), headers={"If-None-Match": whole.headers["etag"]})
    assert (same.status, same.body) == (304, b"")
    head = envd.request("HEAD", files(target))
    assert (head.headers["content-length"], head.body) == (str(256 * 4096), b"")


def test_errors_of_files(envd: Envd, sandbox: Sandbox, folder: Path) -> None:
    with pytest.raises(FileNotFoundException):
        sandbox.files.read(str(folder / "missing"))
    for path, user, status in [
        (folder / "missing", "root", 404),
        (folder, "root", 400),
        (folder, "nobody-here", 401),
    ]:
        reply = envd.request("GET", f"/files?path={quote(str(path))}&username={user}")
        assert (reply.status, reply.json()["code"]) == (status, status)
    assert envd.request("POST", files(folder), b"x").status == 400
    assert envd.request("POST", "/files", b"x", {"Content-Type": "application/octet-stream"}).status == 400
    torn = b'--B\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\ndata'
    reply = envd.request("POST", files(folder / "t"), torn, {"Content-Type": "multipart/form-data; boundary=B"})
    assert reply.status == 400


def test_full_disk_is_507(envd: Envd) -> None:
    reply = envd.request("POST", files(Path("/dev/full")), b"x" * 10)
    assert (reply.status, reply.json()["code"]) == (507, 507)


def test_metadata(sandbox: Sandbox, folder: Path) -> None:
    target = str(folder / "m")
    info = sandbox.files.write(target, "x", metadata={"Purpose": "test run"})
    assert info.metadata == {"purpose": "test run"}
    assert sandbox.files.get_info(target).metadata == {"purpose": "test run"}
    sandbox.files.write(target, "y")
    assert sandbox.files.get_info(target).metadata is None


def test_list_depth_and_entries(sandbox: Sandbox, folder: Path) -> None:
    (folder / "d/e/f").mkdir(parents=True)
    (folder / "d/x").write_text("1234")
    (folder / "link").symlink_to("d")
    (folder / "broken").symlink_to("nowhere")

    def names(depth: int) -> list[str]:
        return [str(Path(e.path).relative_to(folder)) for e in sandbox.files.list(str(folder), depth=depth)]

    assert names(1) == ["broken", "d", "link"]
    assert names(2) == ["broken", "d", "d/e", "d/x", "link"]
    assert names(9) == ["broken", "d", "d/e", "d/e/f", "d/x", "link"]
    with pytest.raises(FileNotFoundException):
        sandbox.files.list(str(folder / "missing"))
    with pytest.raises(InvalidArgumentException):
        sandbox.files.list(str(folder / "d/x"))


def test_entry_info(envd: Envd, sandbox: Sandbox, folder: Path) -> None:
    target = folder / "x"
    target.write_text("12345")
    target.chmod(0o640)
    os.utime(target, (1_700_000_000, 1_700_000_000.25))
    info = sandbox.files.get_info(str(target))
    assert (info.name, info.type, info.size, info.mode) == ("x", FileType.FILE, 5, 0o640)
    assert (info.permissions, info.owner, info.group) == ("-rw-r-----", target.owner(), target.group())
    assert (info.modified_time.timestamp(), info.symlink_target) == (1_700_000_000.25, None)
    link = folder / "l"
    link.symlink_to(target)
    info = sandbox.files.get_info(str(link))
    assert (info.type, info.symlink_target) == (FileType.SYMLINK, str(target))
    entry = envd.rpc("filesystem.Filesystem/Stat", {"path": str(link)}).json()["entry"]
    assert (entry["type"], entry["isSymlink"]) == ("FILE_TYPE_FILE", True)
    assert sandbox.files.exists(str(target)) and not sandbox.files.exists(str(folder / "no"))


def test_make_move_and_remove(sandbox: Sandbox, folder: Path) -> None:
    made = folder / "p/q"
    assert sandbox.files.make_dir(str(made), user="nobody")
    assert made.owner() == "nobody" and made.parent.owner() == "nobody"
    assert not sandbox.files.make_dir(str(made))
    (made / "file").write_text("z")
    with pytest.raises(InvalidArgumentException):
        sandbox.files.make_dir(str(made / "file"))
    moved = sandbox.files.rename(str(made), str(folder / "new/place"))
    assert moved.path == str(folder / "new/place") and (folder / "new/place/file").read_text() == "z"
    with pytest.raises(FileNotFoundException):
        sandbox.files.rename(str(made), str(folder / "other"))
    sandbox.files.remove(str(folder / "new"))
    assert not (folder / "new").exists()
    sandbox.files.remove(str(folder / "new"))


def test_paths_of_the_user(sandbox: Sandbox) -> None:
    home = pwd.getpwnam("root").pw_dir
    for path in ("~", "", "."):
        assert sandbox.files.get_info(path, user="root").path == home
    assert sandbox.files.get_info("/etc/../etc/./passwd").path == "/etc/passwd"
    with pytest.raises(InvalidArgumentException):
        sandbox.files.get_info("~root/x")


def test_compose(envd: Envd, folder: Path) -> None:
    parts = [folder / name for name in ("1", "2", "3")]
    for part in parts:
        part.write_text(part.name * 3)
    sources = [str(part) for part in parts]
    body = json.dumps({"source_paths": sources, "destination": str(folder / "sub/all"), "username": "nobody"})
    reply = envd.request("POST", "/files/compose", body)
    assert reply.json() == {"name": "all", "type": "file", "path": str(folder / "sub/all")}
    assert (folder / "sub/all").read_text() == "111222333"
    assert not any(part.exists() for part in parts)


def test_watch(sandbox: Sandbox, folder: Path) -> None:
    handle = sandbox.files.watch_dir(str(folder), recursive=True, include_entry=True)
    seen: list[FilesystemEvent] = []

    def has(name: str, kind: FilesystemEventType) -> bool:
        seen.extend(handle.get_new_events())
        return any(e.name == name and e.type == kind for e in seen)

    (folder / "new/deep").mkdir(parents=True)
    wait_until(lambda: has("new/deep", FilesystemEventType.CREATE), "the directories")
    (folder / "new/deep/file").write_text("x")
    wait_until(lambda: has("new/deep/file", FilesystemEventType.WRITE), "the write")
    assert any(e.entry and e.entry.path == str(folder / "new/deep/file") for e in seen)
    (folder / "new/deep/file").chmod(0o600)
    wait_until(lambda: has("new/deep/file", FilesystemEventType.CHMOD), "the chmod")
    (folder / "new/deep/file").rename(folder / "new/other")
    wait_until(lambda: has("new/deep/file", FilesystemEventType.RENAME), "the move")
    (folder / "new/other").unlink()
    wait_until(lambda: has("new/other", FilesystemEventType.REMOVE), "the removal")
    handle.stop()
    with pytest.raises(InvalidArgumentException):
        sandbox.files.watch_dir("/etc/passwd")
    with pytest.raises(FileNotFoundException):
        sandbox.files.watch_dir(str(folder / "missing"))


def test_watch_stream(envd: Envd, folder: Path) -> None:
    request = {"path": str(folder), "includeEntry": True}
    with ThreadPoolExecutor(1) as pool:
        headers = {"Connect-Timeout-Ms": "1500"}
        watching = pool.submit(envd.stream, "filesystem.Filesystem/WatchDir", [request], headers)
        while wait([watching], timeout=0.01).not_done:
            (folder / "touched").write_text("x")
        answers, end = watching.result()
    assert end["error"]["code"] == "deadline_exceeded"
    assert answers[0] == {"start": {}}
    seen = [answer["filesystem"] for answer in answers[1:]]
    assert {"touched"} == {event["name"] for event in seen}
    assert any(event["type"] == "EVENT_TYPE_WRITE" and event["entry"].get("size") == "1" for event in seen)
