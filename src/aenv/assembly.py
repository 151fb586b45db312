"""Puts a node together from its settings: every object, in the order they start and stop."""

import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from aenv.client.guest import ENVD_PORT, GuestClient
from aenv.config import RepositorySettings, Settings
from aenv.errors import AenvError, ConflictError
from aenv.guest.artifacts import GuestArtifacts, ensure_base_rootfs, ensure_kernel_and_initramfs
from aenv.network.pool import SlotPool
from aenv.network.settings import NetworkSettings
from aenv.observability.logs import LogStore
from aenv.observability.recorder import Recorder
from aenv.observability.sampler import Sampler, Target
from aenv.orchestrator.capacity import Capacity, free_disk_mib
from aenv.orchestrator.checkpoint import Checkpoints
from aenv.orchestrator.cold import ColdStarts
from aenv.orchestrator.idle import IdleReclaim
from aenv.orchestrator.machines import Machine, Machines
from aenv.orchestrator.model import SandboxState
from aenv.orchestrator.node import Node
from aenv.orchestrator.ondemand import ImageVolumes
from aenv.orchestrator.pool import VmPool
from aenv.orchestrator.recovery import find_vms, recover
from aenv.orchestrator.sharing import Sharing, node_name
from aenv.orchestrator.store import Store
from aenv.snapshot.opening import open_store
from aenv.snapshot.shared import SharedRepository
from aenv.storage.layerd.client import LayerServer, repository_of
from aenv.storage.layerd.settings import config_of
from aenv.storage.layout import Layout
from aenv.template.archives import Archives
from aenv.template.builder import TemplateBuilder
from aenv.template.cache import LayerCache
from aenv.template.engine import Engine
from aenv.template.export import ImageExport
from aenv.template.journal import JournalStore
from aenv.template.machine import Workshop
from aenv.template.origin import Origins
from aenv.template.service import TemplateService
from aenv.vmm.choice import Hypervisors
from aenv.vmm.protocol import Accelerator, MachineShape, Vmm

log = structlog.get_logger()

ARCHIVES_KEPT = 4  # uploaded archives of the largest size that are kept for later builds
SHORT = 2  # times ``reserve_disk``: with less room, files that the repository has as well are given up
BASE = "base"  # alias of the default template, as in E2B

Progress = Callable[[str], None]


@dataclass(slots=True)
class Running:
    """A started node."""

    node: Node
    store: Store
    vmm: Vmm
    hypervisors: Hypervisors
    pool: VmPool
    machines: Machines
    sampler: Sampler
    logs: LogStore
    recorder: Recorder
    templates: TemplateService
    exports: ImageExport


def find_envd(settings: Settings) -> Path:
    """The guest daemon's binary: configured, beside the package in a checkout, or installed. AenvError if none."""
    checkout = Path(__file__).parents[2] / "envd/target/x86_64-unknown-linux-gnu/release/envd"
    candidates = [settings.envd] if settings.envd else [checkout, Path("/usr/lib/aenv/envd")]
    for path in candidates:
        if path.is_file():
            return path
    raise AenvError(
        f"The guest daemon was not found at {' or '.join(map(str, candidates))}.",
        "Build it with `make envd`, or point AENV_ENVD at the binary.",
    )


@contextlib.contextmanager
def exclusive(layout: Layout) -> Iterator[None]:
    """Hold the home: two servers on one home would undo each other's work. Raises ConflictError."""
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConflictError(
                f"Another aenv-server runs on {layout.home}.", "Stop it, or use another AENV_HOME."
            ) from None
        yield
    finally:
        os.close(descriptor)


def default_shape(settings: Settings, accelerator: Accelerator) -> MachineShape:
    """One vCPU under emulation, where a second one only adds translation work; two with KVM (as E2B)."""
    vcpus = settings.default_vcpus or (1 if accelerator is Accelerator.TCG else 2)
    return MachineShape(vcpus=vcpus, memory_mib=settings.default_memory)


@asynccontextmanager
async def running_node(settings: Settings, progress: Progress, *, pause_all: bool = False) -> AsyncIterator[Running]:
    """A node whose sandboxes of the previous life are recovered and whose ``base`` template exists.

    On exit running VMs are left running, or paused first with ``pause_all``.
    """
    layout = Layout(settings.home, settings.runtime)
    layout.create()
    async with AsyncExitStack() as stack:
        stack.enter_context(exclusive(layout))
        artifacts = await ensure_kernel_and_initramfs(
            settings.home, find_envd(settings), kernel=settings.kernel, progress=progress
        )
        hypervisors = Hypervisors(settings, artifacts.kernel, artifacts.initramfs, progress)
        stack.callback(hypervisors.close)
        vmm = await hypervisors.choose()
        store = Store(layout.database)
        stack.callback(store.close)
        vms = await find_vms(store, vmm)
        slots = SlotPool(network_settings(settings), settings.warm_slots)
        used = {s.slot for s in store.sandboxes.rows.values() if s.id in vms and s.slot is not None}
        await slots.start(used)
        stack.push_async_callback(slots.close)
        guests = GuestClient()
        stack.push_async_callback(guests.close)
        shape = default_shape(settings, vmm.fingerprint.accelerator)
        pool = VmPool(vmm, slots, shape, settings.warm_vms)
        stack.push_async_callback(pool.close)

        capacity = Capacity(settings)
        node: Node | None = None

        def on_death(machine: Machine, reason: str) -> None:
            if node is not None:
                node.machine_died(machine, reason)

        sharing, on_demand = open_sharing(settings, layout, store)
        on_demand.retain(store.committed.rows.keys())
        stack.push_async_callback(on_demand.close)
        stack.push_async_callback(sharing.close)
        machines = Machines(
            settings, layout, store, pool, slots, guests, sharing.volumes, vmm.fingerprint, on_death,
            artifacts.envd_version,
        )  # fmt: skip
        checkpoints = Checkpoints(layout, store, machines, vmm.fingerprint)
        cold = ColdStarts(settings, store, on_demand, shape, vmm.fingerprint, artifacts.envd_version)
        node = Node(settings, store, machines, checkpoints, capacity, sharing.imports, cold)
        logs = LogStore.open(layout.logs)
        stack.callback(logs.close)
        sampler = Sampler(
            settings.metrics_interval,
            lambda: metrics_targets(store, machines),
            lambda sandbox_id: metrics_target(store, machines, sandbox_id),
        )
        recorder = Recorder(logs, layout.console, sampler.forget)
        store.sandboxes.on_change = recorder.on_change
        for sandbox in await recover(store, layout, slots, machines, capacity, vms):
            node.expiry.watch(sandbox)
        await sharing.start(
            checkpoints.files,
            lambda: free_disk_mib(settings.home) < SHORT * settings.reserve_disk,
            shared=settings.repository != RepositorySettings(),
        )
        checkpoints.files.collect_garbage()
        await ensure_base(settings, layout, store, vmm, slots, guests, shape, artifacts, progress)
        templates = template_service(
            settings,
            layout,
            store,
            vmm,
            pool,
            slots,
            guests,
            sharing,
            on_demand,
            checkpoints,
            capacity,
            shape,
            artifacts,
        )
        templates.open()
        exports = ImageExport(templates.workshop, sharing.repository, on_demand, capacity)
        pool.start()
        recorder.start(store.sandboxes.rows.values())
        stack.push_async_callback(recorder.close)
        idle = IdleReclaim(machines.running, settings.idle_reclaim)
        idle.start()
        stack.push_async_callback(idle.close)
        sampler.start()
        stack.push_async_callback(sampler.close)
        stack.push_async_callback(_close, node, pause_all)
        stack.push_async_callback(templates.close)
        yield Running(node, store, vmm, hypervisors, pool, machines, sampler, logs, recorder, templates, exports)


def open_sharing(settings: Settings, layout: Layout, store: Store) -> tuple[Sharing, ImageVolumes]:
    """Nothing is read or started yet. Raises InvalidRequestError for a repository that cannot be."""
    place = open_store(settings.repository, settings.home)
    server = LayerServer(config_of(settings), repository_of(settings.repository, settings.home))
    images = ImageVolumes(server, settings.home, settings)
    name = node_name(layout.node_name)
    return Sharing(layout, store, SharedRepository(place), images, name, place.describe(), images.origin), images


async def _close(node: Node, pause_all: bool) -> None:
    await node.close(pause_all=pause_all)


def metrics_target(store: Store, machines: Machines, sandbox_id: str) -> Target | None:
    """Where the sandbox's guest gives its metrics; None unless it runs and has been introduced."""
    sandbox, machine = store.sandboxes.get(sandbox_id), machines.get(sandbox_id)
    if sandbox is None or machine is None or sandbox.state is not SandboxState.RUNNING:
        return None
    ready = machine.ready
    if not ready.done() or ready.cancelled() or ready.exception() is not None:
        return None
    return Target(sandbox_id, f"http://{machine.host}:{ENVD_PORT}/metrics", sandbox.envd_access_token)


def metrics_targets(store: Store, machines: Machines) -> Iterator[Target]:
    for sandbox_id in list(store.sandboxes.rows):
        if (target := metrics_target(store, machines, sandbox_id)) is not None:
            yield target


def network_settings(settings: Settings) -> NetworkSettings:
    return NetworkSettings(
        prefix=settings.slot_prefix,
        pool_cidr=settings.slot_cidr,
        always_allow=tuple(settings.always_allow),
        runtime_dir=settings.runtime,
    )


def template_service(
    settings: Settings,
    layout: Layout,
    store: Store,
    vmm: Vmm,
    pool: VmPool,
    slots: SlotPool,
    guests: GuestClient,
    sharing: Sharing,
    on_demand: ImageVolumes,
    checkpoints: Checkpoints,
    capacity: Capacity,
    shape: MachineShape,
    artifacts: GuestArtifacts,
) -> TemplateService:
    workshop = Workshop(
        settings=settings,
        layout=layout,
        store=store,
        vmm=vmm,
        pool=pool,
        slots=slots,
        guests=guests,
        volumes=sharing.volumes,
        checkpoints=checkpoints,
        default_shape=shape,
        initramfs_sha256=artifacts.initramfs_sha256,
        envd_version=artifacts.envd_version,
    )
    cache = LayerCache(store, settings.build_cache)
    cache.trim()
    archives = Archives(layout.home / "template-files", (settings.max_upload << 20) * ARCHIVES_KEPT)
    engine = Engine(workshop, Origins(workshop, cache, on_demand), cache, archives)
    journals = JournalStore(layout.home / "builds")
    return TemplateService(settings, workshop, engine, cache, capacity, journals, archives, sharing.imports)


async def ensure_base(
    settings: Settings,
    layout: Layout,
    store: Store,
    vmm: Vmm,
    slots: SlotPool,
    guests: GuestClient,
    shape: MachineShape,
    artifacts: GuestArtifacts,
    progress: Progress,
) -> None:
    """Build the ``base`` template unless this node has one that it can run.

    One that was captured by another VMM or kernel, or has another size than the settings say, is replaced; what
    was made from it stays.
    """
    for template in list(store.templates.rows.values()):
        if BASE not in template.aliases:
            continue
        snapshot = store.snapshots[template.snapshot_id]
        problems = snapshot.fingerprint.mismatches(vmm.fingerprint)
        if template.initramfs_sha256 != artifacts.initramfs_sha256:
            problems.append("envd or its modules changed")
        if (snapshot.shape, snapshot.disk_mib) != (shape, settings.default_disk):
            problems.append("the default vCPUs, memory or disk changed")
        if not problems:
            return
        progress(f"rebuilding the {BASE} template: {'; '.join(problems)}")
        with store.transaction():
            store.templates.delete(template.id)
    progress(f"building the {BASE} template")
    rootfs = await ensure_base_rootfs(settings.home, size_mib=settings.default_disk, progress=progress)
    builder = TemplateBuilder(settings, layout, store, vmm, slots, guests, progress)
    built = await builder.from_rootfs(rootfs, [BASE], shape, settings.default_disk, artifacts)
    progress(f"template {BASE} is ready ({built.id})")


def summary(running: Running) -> dict[str, int]:
    """Counts for the log line of a started server."""
    rows = running.store.sandboxes.rows.values()
    return {
        "templates": len(running.store.templates.rows),
        "running": sum(s.state is SandboxState.RUNNING for s in rows),
        "paused": sum(s.state is SandboxState.PAUSED for s in rows),
    }
