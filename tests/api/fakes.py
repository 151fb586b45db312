"""An in-memory orchestrator and ways to serve the API over it."""

import asyncio
import secrets
import sqlite3
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import httpx
import uvicorn

from aenv.accounts.credentials import Credentials
from aenv.accounts.database import prepare
from aenv.accounts.secrets import Secrets
from aenv.accounts.volume_files import VolumeFiles
from aenv.accounts.volumes import Volumes
from aenv.api.app import Application, create_app
from aenv.api.context import Services
from aenv.api.server import uvicorn_config
from aenv.config import Settings
from aenv.errors import (
    CapacityError,
    ConflictError,
    GuestUnresponsiveError,
    SandboxNotFoundError,
    SnapshotNotFoundError,
    TemplateNotFoundError,
)
from aenv.observability.host import Host
from aenv.observability.logs import LogStore
from aenv.observability.recorder import Recorder
from aenv.observability.sampler import Sampler
from aenv.orchestrator import catalog
from aenv.orchestrator.interface import Orchestrator
from aenv.orchestrator.listing import cut, page
from aenv.orchestrator.model import (
    ColdMachine,
    Egress,
    ForkOutcome,
    Sandbox,
    SandboxFilter,
    SandboxPage,
    SandboxSpec,
    SandboxState,
    SavedSnapshot,
    SavedSnapshotPage,
    Template,
    Upstream,
)
from aenv.vmm.protocol import Accelerator
from aenv.vmm.verdict import Candidate, Verdict

KEY = "e2b_" + "0" * 40
_NOW = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def template(number: int) -> Template:
    return Template(
        id=f"template{number:012}",
        build_id=f"build{number}",
        aliases=("base",) if number == 0 else (f"team/t{number}",),
        snapshot_id=f"snap{number}",
        vcpus=2,
        memory_mib=512,
        disk_mib=4096,
        envd_version="0.5.0",
        initramfs_sha256="0" * 64,
        created_at=_NOW + timedelta(seconds=number),
        updated_at=_NOW,
    )


class FakeOrchestrator:
    """Keeps the contract of ``Orchestrator`` without any machine; ``specs`` records what was asked for."""

    def __init__(self) -> None:
        self.sandboxes: dict[str, Sandbox] = {}
        self.specs: list[SandboxSpec] = []
        self.cold: list[ColdMachine] = []
        self.known = [template(number) for number in range(3)]
        self.capacity = 1000
        self.broken: Exception | None = None
        self.unresponsive = False
        self.reboots: list[str] = []
        self.saved: dict[str, SavedSnapshot] = {}

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.specs.append(spec)
        found = next((t for t in self.known if spec.template in (t.id, *t.aliases)), None)
        if found is None:
            raise TemplateNotFoundError(spec.template)
        if len(self.sandboxes) >= self.capacity:
            raise CapacityError("No room for another sandbox.", "Kill one.")
        return self._made(spec, found.id, found.aliases[0])

    async def create_cold(self, spec: SandboxSpec, machine: ColdMachine) -> Sandbox:
        self.specs.append(spec)
        self.cold.append(machine)
        return self._made(spec, spec.template, None)

    def _made(self, spec: SandboxSpec, template_id: str, alias: str | None) -> Sandbox:
        now = datetime.now(UTC)
        made = Sandbox(
            id=secrets.token_hex(10),
            template_id=template_id,
            template_alias=alias,
            state=SandboxState.RUNNING,
            started_at=now,
            end_at=now + timedelta(seconds=spec.timeout),
            timeout=spec.timeout,
            auto_pause=spec.auto_pause,
            auto_resume=spec.auto_resume,
            metadata=spec.metadata,
            env_vars=spec.env_vars,
            envd_access_token=secrets.token_hex(8) if spec.secure else None,
            traffic_access_token=None if spec.allow_public_traffic else secrets.token_hex(8),
            egress=spec.egress,
            auto_pause_memory=spec.auto_pause_memory,
            vcpus=2,
            memory_mib=512,
            disk_mib=4096,
            envd_version="0.5.0",
        )
        self.sandboxes[made.id] = made
        return made

    async def get(self, sandbox_id: str) -> Sandbox:
        if self.broken is not None:
            raise self.broken
        if sandbox_id not in self.sandboxes:
            raise SandboxNotFoundError(sandbox_id)
        return self.sandboxes[sandbox_id]

    async def kill(self, sandbox_id: str) -> None:
        await self.get(sandbox_id)
        del self.sandboxes[sandbox_id]

    async def pause(self, sandbox_id: str, *, memory: bool = True, strict: bool = False) -> Sandbox:
        if strict and self.unresponsive:
            raise GuestUnresponsiveError("The guest agent does not answer.")
        return await self._change(sandbox_id, SandboxState.RUNNING, state=SandboxState.PAUSED, memory_kept=memory)

    async def resume(
        self, sandbox_id: str, timeout: int, auto_pause: bool | None, *, reboot: bool = False
    ) -> Sandbox:
        if reboot:
            self.reboots.append(sandbox_id)
        await self._change(sandbox_id, SandboxState.PAUSED, state=SandboxState.RUNNING)
        return await self.set_timeout(sandbox_id, timeout)

    async def connect(self, sandbox_id: str, timeout: int, *, reboot: bool = False) -> tuple[Sandbox, bool]:
        if (await self.get(sandbox_id)).state is SandboxState.PAUSED:
            return await self.resume(sandbox_id, timeout, None, reboot=reboot), True
        return await self.refresh(sandbox_id, timeout), False

    async def set_timeout(self, sandbox_id: str, timeout: int) -> Sandbox:
        end = datetime.now(UTC) + timedelta(seconds=timeout)
        return await self._change(sandbox_id, SandboxState.RUNNING, end_at=end)

    async def refresh(self, sandbox_id: str, duration: int) -> Sandbox:
        end = max((await self.get(sandbox_id)).end_at, datetime.now(UTC) + timedelta(seconds=duration))
        return await self._change(sandbox_id, SandboxState.RUNNING, end_at=end)

    async def fork(self, sandbox_id: str, count: int, timeout: int | None) -> Sequence[ForkOutcome]:
        parent = await self.get(sandbox_id)
        outcomes = []
        for _ in range(count):
            if len(self.sandboxes) >= self.capacity:
                outcomes.append(ForkOutcome(error=CapacityError("No room for another sandbox.")))
                continue
            child = replace(parent, id=secrets.token_hex(10), parent_id=parent.id, state=SandboxState.RUNNING)
            self.sandboxes[child.id] = child
            outcomes.append(ForkOutcome(sandbox=child))
        return outcomes

    async def update_network(self, sandbox_id: str, egress: Egress) -> Sandbox:
        return await self._change(sandbox_id, SandboxState.RUNNING, egress=egress)

    async def create_snapshot(self, sandbox_id: str, name: str | None, memory: bool | None) -> SavedSnapshot:
        sandbox = await self.get(sandbox_id)
        reference = catalog.parse(name) if name else catalog.Reference("", None)
        now = datetime.now(UTC)
        made = SavedSnapshot(
            id=secrets.token_hex(10),
            name=reference.name or None,
            tag=reference.tag or catalog.DEFAULT_TAG,
            snapshot_id="disk" if memory is False else "full",
            sandbox_id=sandbox.id,
            vcpus=sandbox.vcpus,
            memory_mib=sandbox.memory_mib,
            disk_mib=sandbox.disk_mib,
            envd_version=sandbox.envd_version,
            created_at=now,
            updated_at=now,
        )
        self.saved[made.id] = made
        return made

    async def snapshots(
        self, sandbox_id: str | None, name: str | None, limit: int, token: str | None
    ) -> SavedSnapshotPage:
        found = [
            saved
            for saved in reversed(self.saved.values())
            if sandbox_id in (None, saved.sandbox_id) and name in (None, saved.name, saved.id)
        ]
        return SavedSnapshotPage(*cut(found, lambda saved: (saved.created_at, saved.id), limit, token))

    async def snapshot(self, name: str) -> SavedSnapshot:
        for saved in self.saved.values():
            if name in (saved.id, saved.name):
                return saved
        raise SnapshotNotFoundError(name)

    async def delete_snapshot(self, name: str) -> None:
        del self.saved[(await self.snapshot(name)).id]

    async def templates(self) -> Sequence[Template]:
        return self.known

    async def upstream(self, sandbox_id: str) -> Upstream:
        sandbox = await self.get(sandbox_id)
        if sandbox.state is not SandboxState.RUNNING:
            raise ConflictError("paused")
        return Upstream(sandbox, "127.0.0.1", 1)

    async def list(self, where: SandboxFilter, limit: int, token: str | None) -> SandboxPage:
        return page(self.sandboxes.values(), where, limit, token)

    async def _change(self, sandbox_id: str, wanted: SandboxState, **changes: object) -> Sandbox:
        sandbox = await self.get(sandbox_id)
        if sandbox.state is not wanted:
            raise ConflictError(f"Sandbox {sandbox_id} is {sandbox.state}, not {wanted}.")
        changed = replace(sandbox, **changes)  # type: ignore[arg-type]
        self.sandboxes[sandbox_id] = changed
        return changed


class FakeHypervisors:
    """KVM is broken here, emulation works."""

    used: Candidate | None = Candidate("qemu", Accelerator.TCG)
    gaps: ClassVar = ["no limits of memory"]

    async def verdicts(self) -> list[Verdict]:
        return [
            Verdict("qemu", Accelerator.KVM, False, "It did not start.", "Buy another.", 0.1),
            Verdict("qemu", Accelerator.TCG, True, "It started.", "", 3.0),
        ]


def application(fake: FakeOrchestrator, **settings: object) -> Application:
    orchestrator: Orchestrator = fake
    configured = Settings.model_validate({"domain": "sandbox.test", **settings})
    return create_app(configured, orchestrator, lambda key: secrets.compare_digest(key, KEY), services(KEY))


def services(key: str) -> Services:
    """The real ones, over databases in memory, with nothing to observe."""
    accounts = prepare(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
    logs = LogStore.prepare(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
    return Services(
        credentials=Credentials(accounts, key),
        secrets=Secrets(accounts),
        volumes=Volumes(accounts, VolumeFiles(Path(tempfile.mkdtemp(prefix="volumes-")), 0)),
        sampler=Sampler(0, lambda: (), lambda _: None),
        logs=logs,
        recorder=Recorder(logs, Path),
        host=Host(Path("/")),
        hypervisors=FakeHypervisors(),
    )


@asynccontextmanager
async def api(fake: FakeOrchestrator, key: str | None = KEY, **settings: object) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the app, without sockets."""
    transport = httpx.ASGITransport(application(fake, **settings))
    headers = {} if key is None else {"X-API-Key": key}
    async with httpx.AsyncClient(transport=transport, base_url="http://api.test", headers=headers) as client:
        yield client


@contextmanager
def served(fake: FakeOrchestrator) -> Iterator[str]:
    """The app on a real port, in a thread with its own loop, for blocking clients; yields its URL."""
    settings = Settings.model_validate({"host": "127.0.0.1", "port": 0})
    server = uvicorn.Server(uvicorn_config(application(fake), settings, grace=1))
    thread = threading.Thread(target=asyncio.run, args=(server.serve(),), daemon=True)
    thread.start()
    waited = threading.Event()
    for _ in range(2000):
        if server.started:
            break
        waited.wait(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)
