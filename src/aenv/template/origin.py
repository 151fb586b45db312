"""What a build starts from: a template's or user's snapshot, or an image's root filesystem; and the machine it gives.

A machine goes on from a snapshot of its own shape. Otherwise (another amount of memory, an image, a snapshot of
another VMM, or one in which a start command or a user's programs run) it is booted from the disk; that boot is cached
like a step.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from aenv.errors import InvalidRequestError
from aenv.image.defaults import DEFAULT_USER
from aenv.orchestrator import firstboot
from aenv.orchestrator.builds import CachedLayer
from aenv.orchestrator.catalog import find, written
from aenv.orchestrator.model import SavedSnapshot, Template
from aenv.orchestrator.ondemand import ImageDisk, ImageVolumes
from aenv.snapshot.model import DiskLayer, Snapshot
from aenv.template import context as contexts
from aenv.template import keys, scripts
from aenv.template.cache import LayerCache
from aenv.template.context import DEFAULT_PATH, Context
from aenv.template.guest import BuildGuest
from aenv.template.journal import Journal
from aenv.template.machine import MIB, BuildMachine, Pins, Workshop
from aenv.template.plan import Plan

BASE = "base"
# E2B's base image, which the SDK names when its user names none. The node's own base template stands for it.
BASE_IMAGES = frozenset({"e2bdev/base", "docker.io/e2bdev/base", "base"})
# Run once after a boot, so that sandboxes start with what most commands need in their page cache.
SETTLE = "true; command -v python3 >/dev/null && python3 -c 'import json, subprocess'; true"


@dataclass(frozen=True, slots=True)
class Origin:
    """``key`` names its contents. Either ``snapshot`` or ``disk`` is set."""

    key: str
    context: Context
    snapshot: Snapshot | None = None
    initramfs_sha256: str = ""  # of the snapshot's guest
    disk: ImageDisk | None = None
    image_user: str = ""  # of that image's configuration, by name
    settled: bool = True  # whether the snapshot's disk has all that its guest wrote
    start_cmd: str = ""  # of the template it comes from; it runs in the snapshot
    ready_cmd: str = ""


def is_base(image: str) -> bool:
    """Whether an image reference means the node's base template."""
    name, _, tag = image.partition(":")
    return name in BASE_IMAGES and tag in ("", "latest")


class Origins:
    def __init__(self, workshop: Workshop, cache: LayerCache, images: ImageVolumes) -> None:
        self._workshop = workshop
        self._cache = cache
        self._images = images

    async def find(self, plan: Plan, journal: Journal) -> Origin:
        """Resolve what ``plan`` starts from; an image is pulled. Raises ImageError and others of ``AenvError``."""
        template = plan.template
        if template is None and plan.image is not None and is_base(plan.image):
            template = find(self._workshop.store.templates.rows.values(), BASE)
        if template is not None:
            journal.write(f"FROM {_called(template)}", step=BASE)
            snapshot = self._workshop.store.snapshots.get(template.snapshot_id)
            if snapshot is None:
                raise InvalidRequestError("The template or snapshot to build from has been deleted.")
            context = Context(template.env_vars, template.default_user, template.default_workdir)
            if plan.dockerfile:
                user = "" if template.default_user == DEFAULT_USER else template.default_user
                context = contexts.of_dockerfile(template.env_vars, user, template.default_workdir or "")
            if isinstance(template, SavedSnapshot):
                return Origin(keys.of_snapshot(snapshot.id), context, snapshot, settled=not snapshot.has_memory)
            return Origin(
                keys.of_snapshot(snapshot.id), context, snapshot, template.initramfs_sha256,
                start_cmd=template.start_cmd, ready_cmd=template.ready_cmd,
            )  # fmt: skip
        assert plan.image is not None
        return await self._pull(plan.image, plan, journal)

    async def _pull(self, image: str, plan: Plan, journal: Journal) -> Origin:
        settings = self._workshop.settings
        journal.write(f"FROM image {image}", step=BASE)
        disk = await self._images.pull(
            image,
            size_mib=settings.default_disk,
            credentials=(plan.login.username, plan.login.password) if plan.login else None,
            progress=lambda message: journal.write(message, step=BASE),
        )
        config = disk.config
        begin = contexts.of_dockerfile if plan.dockerfile else contexts.of_image
        context = begin(config.env, disk.user, config.working_dir)
        key = keys.of_image(config.digest, disk.volume.virtual_size // MIB)
        return Origin(key, context, disk=disk, image_user=disk.user)

    async def start(self, origin: Origin, plan: Plan, journal: Journal, pins: Pins) -> BuildMachine:
        """A machine of the plan's shape that is as ``origin`` says."""
        workshop, snapshot = self._workshop, origin.snapshot
        if (
            snapshot is not None
            and origin.settled
            and not origin.start_cmd
            and workshop.runs_here(snapshot, origin.initramfs_sha256, plan.shape)
        ):
            return await workshop.restore(snapshot, pins)
        key = keys.of_boot(origin.key, plan.shape, workshop.vmm.fingerprint, workshop.initramfs_sha256)
        cached = None if plan.force else self._cache.get(key)
        if cached is None:
            cached = await self._boot(origin, plan, journal, pins, key)
        return await workshop.restore(workshop.store.snapshots[cached.snapshot_id], pins)

    async def _boot(self, origin: Origin, plan: Plan, journal: Journal, pins: Pins, key: str) -> CachedLayer:
        """Boot from the origin's disk, keep the settled machine, and end it.

        What follows starts from the snapshot instead: captures of a booted machine write all its memory each time.
        """
        workshop, store = self._workshop, self._workshop.store
        journal.write(f"booting with {plan.shape.vcpus} vCPU and {plan.shape.memory_mib} MiB", step=BASE)
        if origin.disk is not None:
            with store.transaction():
                parent = self._images.put(store, origin.disk)
            disk_mib = origin.disk.mib
        else:
            assert origin.snapshot is not None
            pins.add(origin.snapshot.id)
            parent = store.layers[origin.snapshot.disk]
            disk_mib = origin.snapshot.disk_mib
            if not origin.settled:
                parent = await workshop.settled(origin.snapshot, pins)
        try:
            with workshop.checkpoints.files.reading([parent]):
                captured = await self._settle(origin, parent, plan, disk_mib, journal, pins)
        finally:
            if parent.id not in store.layers.rows:
                workshop.layout.layer(parent).unlink(missing_ok=True)
            workshop.checkpoints.collect_garbage()
        layer = CachedLayer(
            id=key,
            snapshot_id=captured.id,
            initramfs_sha256=workshop.initramfs_sha256,
            used_at=datetime.now(UTC),
            env_vars=origin.context.env,
            user=origin.context.user,
            workdir=origin.context.workdir,
        )
        self._cache.put(layer)
        return layer

    async def _settle(
        self, origin: Origin, parent: DiskLayer, plan: Plan, disk_mib: int, journal: Journal, pins: Pins
    ) -> Snapshot:
        machine = await self._workshop.boot(parent, plan.shape, disk_mib, pins)
        try:
            guest = BuildGuest(machine, journal)
            if origin.disk is not None:
                if not origin.disk.prepared:
                    await firstboot.complete(machine.host, None, origin.disk.config)
                await guest.script(scripts.PROVISION)
            if origin.context.env.get("PATH", DEFAULT_PATH) != DEFAULT_PATH:
                await guest.set_path(origin.context.env["PATH"])
            await guest.check(SETTLE, replace(origin.context, workdir=None))
            await guest.sync()
            return await machine.finish()
        finally:
            await machine.close()


def _called(value: Template | SavedSnapshot) -> str:
    """For the build's log."""
    if isinstance(value, Template):
        return f"template {value.aliases[0] if value.aliases else value.id}"
    return f"snapshot {value.id if value.name is None else written(value.name, value.tag)}"
