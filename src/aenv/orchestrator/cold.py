"""Cold starts: the disk and the settings of a sandbox that boots a container image, without a template in between.

What it boots from is a snapshot without memory, as that of a sandbox that was paused without it; so everything that
is done to sandboxes is done to this one. The disk's lowest layer is another name of the image's file in the cache
(``aenv.image.rootfs``), one layer for all sandboxes of an image that live at a time: its pages are in memory once,
and it is committed once. Of an overlaybd-native image it is a volume that the layer server reads from the registry
(``aenv.orchestrator.ondemand``).
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from aenv.config import Settings
from aenv.errors import InvalidRequestError
from aenv.image.defaults import default_user, default_workdir
from aenv.image.errors import UnsupportedImageError
from aenv.image.manifest import ImageConfig
from aenv.image.native import NativeImage
from aenv.image.reference import Reference
from aenv.image.rootfs import pull_image
from aenv.orchestrator import firstboot
from aenv.orchestrator.model import ColdMachine, Sandbox
from aenv.orchestrator.ondemand import ImageVolumes, volume_of
from aenv.orchestrator.records import ImageOrigin
from aenv.orchestrator.store import Store
from aenv.orchestrator.volumes import Volumes
from aenv.snapshot.manifest import Volume
from aenv.snapshot.model import Committed, DiskLayer, Snapshot, volume_id
from aenv.storage.layout import Layout
from aenv.vmm.protocol import Fingerprint, MachineShape

log = structlog.get_logger()

MAX_VCPUS, MIN_MEMORY, MAX_MEMORY = 32, 128, 65536  # MiB, as of templates
MIN_DISK, MAX_DISK = 64, 1 << 20  # MiB
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ColdRoot:
    """An image's root file system and the machine that is to boot it."""

    source: Path | tuple[Reference, Volume]  # a file in the cache, or what is read from the registry
    config: ImageConfig
    shape: MachineShape
    disk_mib: int
    boot_arguments: tuple[str, ...]


class ColdStarts:
    def __init__(
        self,
        settings: Settings,
        layout: Layout,
        store: Store,
        volumes: Volumes,
        on_demand: ImageVolumes,
        shape: MachineShape,
        fingerprint: Fingerprint,
        envd_version: str,
    ) -> None:
        """``shape`` is that of a machine of which nothing else is asked."""
        self._settings = settings
        self._layout = layout
        self._store = store
        self._volumes = volumes
        self._on_demand = on_demand
        self._shape = shape
        self._fingerprint = fingerprint
        self._envd_version = envd_version
        self._layers: dict[Path, str] = {}  # of images' files, while their records live

    async def root(self, image: str, wanted: ColdMachine) -> ColdRoot:
        """The image, pulled and converted unless it is cached or need not be.

        Its file may be collected ten minutes later unless ``recording`` is entered. Raises InvalidRequestError,
        ImageError, CapacityError, SourceError.
        """
        shape, disk_mib = self._machine(wanted)
        settings = self._settings
        found = await pull_image(
            image,
            settings.home,
            size_mib=disk_mib,
            settings=settings,
            progress=lambda message: log.debug("cold start", image=image, doing=message),
        )
        if not isinstance(found, NativeImage):
            return ColdRoot(*found, shape, disk_mib, wanted.boot_arguments)
        volume = await asyncio.to_thread(volume_of, found, settings)
        own = -(-volume.virtual_size // MIB)
        if not MIN_DISK <= own <= MAX_DISK:
            raise UnsupportedImageError(
                f"The image's disk has {own} MiB; from {MIN_DISK} to {MAX_DISK} are supported.", "Convert it again."
            )
        if wanted.disk_mib not in (None, 0, own):
            raise InvalidRequestError(
                f"diskSizeMB: {image} is an overlaybd image, which brings a disk of {own} MiB.", "Leave it out."
            )
        return ColdRoot((found.reference, volume), found.config, shape, own, wanted.boot_arguments)

    def _machine(self, wanted: ColdMachine) -> tuple[MachineShape, int]:
        vcpus = self._shape.vcpus if wanted.vcpus is None else wanted.vcpus
        memory = self._shape.memory_mib if wanted.memory_mib is None else wanted.memory_mib
        disk = wanted.disk_mib or self._settings.default_disk  # of 0 MiB, which the API allows, is no disk
        for name, value, least, most in (
            ("cpuCount", vcpus, 1, MAX_VCPUS),
            ("memoryMB", memory, MIN_MEMORY, MAX_MEMORY),
            ("diskSizeMB", disk, MIN_DISK, MAX_DISK),
        ):
            if not least <= value <= most:
                raise InvalidRequestError(f"{name}: must be from {least} to {most}, not {value}.")
        return MachineShape(vcpus, memory), disk

    @asynccontextmanager
    async def recording(self, root: ColdRoot) -> AsyncIterator[None]:
        """Around ``put``, without anything that waits inside."""
        if isinstance(root.source, Path):
            yield
            return
        _, volume = root.source
        async with self._volumes.keeping(layer.digest for layer in volume.layers):
            yield

    def put(self, root: ColdRoot) -> DiskLayer:
        """Record the image as a disk layer, with its file. Inside a transaction. Raises OSError."""
        if not isinstance(root.source, Path):
            reference, volume = root.source
            name = volume_id(volume)
            if name not in self._store.committed.rows:
                self._on_demand.note(name, reference)
                self._store.committed.put(Committed(name, volume))
            made = DiskLayer(name, None, "raw")
            self._store.layers.put(made)
            return made
        known = self._store.layers.get(self._layers.get(root.source, ""))
        if known is not None:
            return known
        made = DiskLayer(secrets.token_hex(10), None, "raw")
        os.link(root.source, self._layout.layer(made))
        self._layers[root.source] = made.id
        self._store.layers.put(made)
        return made

    async def complete(self, root: ColdRoot, sandbox: Sandbox, host: str) -> None:
        """Add what the platform promises to a guest whose image was not prepared. Raises SandboxStartError."""
        if not isinstance(root.source, Path):
            path = root.config.env.get("PATH", "")
            await firstboot.complete(host, sandbox.envd_access_token, root.config.user, path)

    def snapshot(self, root: ColdRoot, disk: DiskLayer) -> Snapshot:
        return Snapshot(
            id=secrets.token_hex(10),
            owner=None,
            memory_base=None,
            delta_bytes=0,
            disk=disk.id,
            shape=root.shape,
            disk_mib=root.disk_mib,
            fingerprint=self._fingerprint,
            guest_token=None,
            created_at=datetime.now(UTC),
        )

    def origin(self, image: str, root: ColdRoot) -> ImageOrigin:
        """The image's Env, User and WorkingDir reach every process of the sandbox through these."""
        user = root.config.user if isinstance(root.source, Path) else firstboot.split_user(root.config.user)[0]
        return ImageOrigin(
            id=image,
            vcpus=root.shape.vcpus,
            memory_mib=root.shape.memory_mib,
            disk_mib=root.disk_mib,
            envd_version=self._envd_version,
            env_vars=dict(root.config.env),
            default_user=default_user(user),
            default_workdir=default_workdir(root.config.working_dir),
            boot_arguments=root.boot_arguments,
        )
