"""Cold starts: the disk and the settings of a sandbox that boots a container image, without a template in between.

What it boots from is a snapshot without memory, as that of a sandbox that was paused without it; so everything that
is done to sandboxes is done to this one. The disk's lowest layer is another name of the image's file in the cache
(``aenv.image.rootfs``), one layer for all sandboxes of an image that live at a time: its pages are in memory once,
and it is committed once.
"""

import os
import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import structlog

from aenv.config import Settings
from aenv.errors import InvalidRequestError
from aenv.image.defaults import default_user, default_workdir
from aenv.image.manifest import ImageConfig
from aenv.image.rootfs import pull_rootfs
from aenv.orchestrator.model import ColdMachine
from aenv.orchestrator.records import ImageOrigin
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer, Snapshot
from aenv.storage.layout import Layout
from aenv.vmm.protocol import Fingerprint, MachineShape

log = structlog.get_logger()

MAX_VCPUS, MIN_MEMORY, MAX_MEMORY = 32, 128, 65536  # MiB, as of templates
MIN_DISK, MAX_DISK = 64, 1 << 20  # MiB


@dataclass(frozen=True, slots=True)
class ColdRoot:
    """An image's root file system, in the cache, and the machine that is to boot it."""

    rootfs: Path
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
        shape: MachineShape,
        fingerprint: Fingerprint,
        envd_version: str,
    ) -> None:
        """``shape`` is that of a machine of which nothing else is asked."""
        self._settings = settings
        self._layout = layout
        self._store = store
        self._shape = shape
        self._fingerprint = fingerprint
        self._envd_version = envd_version
        self._layers: dict[Path, str] = {}  # of images' files, while their records live

    async def root(self, image: str, wanted: ColdMachine) -> ColdRoot:
        """The image, pulled and converted unless it is cached. Raises InvalidRequestError, ImageError, CapacityError.

        The file may be collected ten minutes later unless ``layer`` is called.
        """
        shape, disk_mib = self._machine(wanted)
        settings = self._settings
        rootfs, config = await pull_rootfs(
            image,
            settings.home,
            size_mib=disk_mib,
            settings=settings,
            progress=lambda message: log.debug("cold start", image=image, doing=message),
        )
        return ColdRoot(rootfs, config, shape, disk_mib, wanted.boot_arguments)

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

    def layer(self, root: ColdRoot) -> DiskLayer:
        """The image as a disk layer, with a file and perhaps without a record yet: the caller puts it.

        Nothing else may run between this and that. Raises OSError.
        """
        known = self._store.layers.get(self._layers.get(root.rootfs, ""))
        if known is not None:
            return known
        made = DiskLayer(secrets.token_hex(10), None, "raw")
        os.link(root.rootfs, self._layout.layer(made))
        self._layers[root.rootfs] = made.id
        return made

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
        return ImageOrigin(
            id=image,
            vcpus=root.shape.vcpus,
            memory_mib=root.shape.memory_mib,
            disk_mib=root.disk_mib,
            envd_version=self._envd_version,
            env_vars=dict(root.config.env),
            default_user=default_user(root.config.user),
            default_workdir=default_workdir(root.config.working_dir),
            boot_arguments=root.boot_arguments,
        )
