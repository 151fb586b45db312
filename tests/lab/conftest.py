"""A real node on the lab's KVM, one for each hypervisor. Tests that use it are skipped outside the lab."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Sandbox

from aenv.vmm.qemu_command import process_name
from lab import homes
from tests.node.process import NodeProcess, commands, wait_for

PATIENCE = 900.0  # seconds for one call: everything here runs on an emulated processor
LIFE = 3600  # seconds that a sandbox may live
WARM = 1
PROGRAM = {"qemu": re.compile(rb"qemu-system-x86_64"), "firecracker": re.compile(rb"firecracker")}

Create = Callable[..., Sandbox]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("AENV_LAB"):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents and "node" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="runs in the lab: make lab"))


class LabNode(NodeProcess):
    """A node on the home that was prepared for its hypervisor; with what the lab's machine knows of its VMs."""

    def __init__(self, folder: Path, vmm: str) -> None:
        settings = {name.removeprefix("AENV_").lower(): value for name, value in homes.settings(vmm).items()}
        super().__init__(folder, prefix="aenvl", cidr="10.233.0.0/16", warm_vms=str(WARM), **settings)
        self.vmm = vmm
        self.home = homes.home(vmm)

    def start(self, *arguments: str) -> None:
        homes.link_artifacts(self.vmm)
        super().start(*arguments)

    def machines(self) -> set[int]:
        """Processes of virtual machines. This node is the only one on the machine that has any."""
        return {pid for pid, line in commands() if PROGRAM[self.vmm].search(line.split(b"\0")[0].rpartition(b"/")[2])}

    def machine_of(self, sandbox: Sandbox) -> int:
        """The process in which a running sandbox is; it bears the VM's name (``qemu_command.process_name``)."""
        vm_id = json.loads(self.records("sandboxes")[sandbox.sandbox_id])["vm_id"]
        machines, named = self.machines(), process_name(vm_id).encode()
        (pid,) = [pid for pid, line in commands() if pid in machines and named in line.split(b"\0")]
        return pid

    def end(self) -> None:
        """Stop the node and all its VMs."""
        if self._process is not None and self._process.poll() is None:
            self.terminate()
        for pid in self.machines():
            subprocess.run(["kill", "-9", str(pid)], check=False)
        wait_for(lambda: not self.machines(), "VMs to end")


@pytest.fixture(scope="session", params=homes.VMMS)
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabNode]:
    if reason := homes.missing(request.param):
        pytest.skip(reason)
    made = LabNode(tmp_path_factory.mktemp(f"node-{request.param}"), request.param)
    try:
        made.start("--stop-sandboxes")
        yield made
    finally:
        made.end()


@pytest.fixture
def e2b_environment(node: LabNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_URL", node.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", node.url)
    monkeypatch.setenv("E2B_API_KEY", node.api_key)


@pytest.fixture
def api(node: LabNode) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=node.url, headers={"X-API-Key": node.api_key}, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def create(node: LabNode, api: httpx.Client) -> Iterator[Create]:
    """``Sandbox.create`` whose sandboxes, and everything forked from them, are gone after the test."""

    def make(template: str = "base") -> Sandbox:
        return Sandbox.create(template, timeout=LIFE, request_timeout=PATIENCE)

    yield make
    for sandbox in api.get("/v2/sandboxes", params={"state": "running,paused"}).json():
        api.delete(f"/sandboxes/{sandbox['sandboxID']}")
    wait_for(lambda: not node.records("sandboxes"), "all sandboxes of the test to be gone", PATIENCE)
    wait_for(lambda: len(node.machines()) <= WARM, "the VMs of the test to be gone", PATIENCE)
