"""One real node with a registry beside it, the ``aenv`` program, and terminals of pexpect."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pexpect
import pytest

from tests.image import registries
from tests.image.writer import Image, archive, member, push
from tests.node import images
from tests.node.process import NodeProcess, wait_for

AENV = str(Path(sys.executable).parent / "aenv")
TIMEOUT = 120  # seconds for one command, on a busy machine

# Says as whom and where it was started, and with what, and stays.
SERVE = b"""#!/bin/sh
{ id -u; pwd; echo "$MODE:$*"; } > /dev/shm/serve.new
mv /dev/shm/serve.new /dev/shm/serve
exec sleep 9999
"""
COMMANDS: dict[str, dict[str, object]] = {
    "serving": {"Entrypoint": ["/bin/serve"], "Cmd": ["two words", "x"], "Env": ["PATH=/bin", "MODE=image"]},
    "failing": {"Cmd": ["/bin/sh", "-c", "echo sorry; exit 3"], "ExposedPorts": {"9/tcp": {}}},
    "shell": {"Cmd": ["/bin/sh"]},
}

Run = Callable[..., subprocess.CompletedProcess[str]]
Spawn = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture(scope="package")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host of a registry that has the image ``tiny:1``, and others of it with commands of their own."""
    if registries.PROGRAM is None:
        pytest.skip("docker-registry is not installed")
    with registries.running(tmp_path_factory.mktemp("registry")) as found:
        image = images.tiny(["PATH=/tools:/bin", "FROM_IMAGE=yes"], WorkingDir="/app")
        push(found.base, "tiny", "1", [image])
        serve = archive([member("bin/serve", SERVE, mode=0o755)])
        for name, config in COMMANDS.items():
            push(found.base, name, "1", [Image([*image.layers, serve], {**image.config, **config})])
        yield found.host


@pytest.fixture(scope="package")
def node(tmp_path_factory: pytest.TempPathFactory, registry: str) -> Iterator[NodeProcess]:
    allowed = json.dumps({registry: {"plain_http": True}})
    made = NodeProcess(tmp_path_factory.mktemp("node"), warm_vms="2", registries=allowed)
    try:
        made.start()
        yield made
    finally:
        made.destroy()


@pytest.fixture(scope="package")
def environment(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a user has set, with a home of its own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "E2B_", "XDG_"))}
    return {
        **kept,
        "HOME": str(tmp_path_factory.mktemp("home")),
        "PATH": f"{Path(AENV).parent}:{os.environ['PATH']}",
        "TERM": "xterm-256color",
        "AENV_API_URL": node.url,
        "AENV_API_KEY": node.api_key,
    }


@pytest.fixture(scope="package")
def aenv(environment: dict[str, str]) -> Run:
    """Run ``aenv`` without a terminal. ``check``: it must succeed."""

    def run(
        *arguments: str, text: str | None = None, check: bool = True, cwd: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [AENV, *arguments],
            env={**environment, **variables},
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            cwd=cwd,
            check=False,
        )
        assert not check or done.returncode == 0, f"{arguments}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    return run


@pytest.fixture
def terminal(environment: dict[str, str]) -> Iterator[Spawn]:
    """Run ``aenv`` on a terminal; ``columns`` wide."""
    started: list[pexpect.spawn[str]] = []

    def spawn(*arguments: str, columns: int = 80, **variables: str) -> "pexpect.spawn[str]":
        child = pexpect.spawn(
            AENV,
            list(arguments),
            env={**environment, **variables},
            encoding="utf-8",
            timeout=TIMEOUT,
            dimensions=(30, columns),
        )
        started.append(child)
        return child

    yield spawn
    for child in started:
        child.close(force=True)


def finished(child: "pexpect.spawn[str]") -> tuple[int | None, str]:
    """Exit code, and what was printed, of a command on a terminal when it has ended."""
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus, str(child.before).replace("\r\n", "\n")


@pytest.fixture(scope="package")
def api(node: NodeProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=node.url, headers={"X-API-Key": node.api_key}, timeout=60) as client:
        yield client


def _remove_all(api: httpx.Client, keep: set[str]) -> None:
    for sandbox in api.get("/v2/sandboxes", params={"state": "running,paused"}).json():
        if sandbox["sandboxID"] not in keep:
            api.delete(f"/sandboxes/{sandbox['sandboxID']}")


@pytest.fixture(scope="package")
def sandbox(aenv: Run) -> str:
    """The id of a sandbox that tests share: they change nothing of it but files under names of their own."""
    return aenv("start", "base", "-q", "--timeout", "1h", "-m", "shared=yes").stdout.strip()


@pytest.fixture
def clean(api: httpx.Client, sandbox: str) -> Iterator[None]:
    """Nothing but the shared sandbox is left after the test."""
    yield
    _remove_all(api, {sandbox})
    listed = {"state": "running,paused"}
    wait_for(lambda: len(api.get("/v2/sandboxes", params=listed).json()) == 1, "other sandboxes to be gone")
