"""Cold starts: the disk and the settings of a sandbox that boots a container image, without a template in between.

What it boots from is a snapshot without memory, as that of a sandbox that was paused without it; so everything that
is done to sandboxes is done to this one. The disk's lowest layer is the image's volume
(``aenv.orchestrator.ondemand``), one for all sandboxes of an image that live at a time: its pages are in memory once.
"""

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from aenv.config import Settings
from aenv.errors import InvalidRequestError
from aenv.image.defaults import default_user, default_workdir
from aenv.image.drives import DriveImage
from aenv.image.errors import UnsupportedImageError
from aenv.orchestrator import firstboot
from aenv.orchestrator.boot import read_only_folders
from aenv.orchestrator.model import ColdMachine, Sandbox
from aenv.orchestrator.ondemand import ImageDisk, ImageVolumes
from aenv.orchestrator.records import ImageOrigin
from aenv.orchestrator.store import Store
from aenv.snapshot.model import DiskLayer, Snapshot
from aenv.vmm.protocol import Fingerprint, MachineShape

log = structlog.get_logger()

MAX_VCPUS, MIN_MEMORY, MAX_MEMORY = 32, 128, 65536  # MiB, as of templates
MIN_DISK, MAX_DISK = 64, 1 << 20  # MiB
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ColdRoot:
    """An image's root disk and the machine that is to boot it."""

    disk: ImageDisk
    shape: MachineShape
    disk_mib: int
    boot_arguments: tuple[str, ...]


class ColdStarts:
    def __init__(
        self,
        settings: Settings,
        store: Store,
        images: ImageVolumes,
        shape: MachineShape,
        fingerprint: Fingerprint,
        envd_version: str,
    ) -> None:
        """``shape`` is that of a machine of which nothing else is asked."""
        self._settings = settings
        self._store = store
        self._images = images
        self._shape = shape
        self._fingerprint = fingerprint
        self._envd_version = envd_version

    async def root(self, image: str, wanted: ColdMachine) -> ColdRoot:
        """The image, pulled and converted unless it is cached or need not be.

        Its layers may be collected ten minutes later unless it is ``put``. Raises InvalidRequestError, ImageError,
        CapacityError, SourceError.
        """
        shape, disk_mib = self._machine(wanted)
        # One file system for all larger disks too: the guest lets it grow when it boots.
        usual = min(disk_mib, self._settings.default_disk)
        disk = await self._images.pull(
            image,
            size_mib=usual,
            larger_mib=disk_mib,
            drives=[DriveImage(drive.image, drive.mount_path.lstrip("/"), drive.folder) for drive in wanted.drives],
            progress=lambda message: log.debug("cold start", image=image, doing=message),
        )
        own = disk.mib
        if not disk.prepared and not MIN_DISK <= own <= MAX_DISK:
            raise UnsupportedImageError(
                f"The image's disk has {own} MiB; from {MIN_DISK} to {MAX_DISK} are supported.", "Convert it again."
            )
        if wanted.disk_mib and wanted.disk_mib < own:
            raise InvalidRequestError(
                f"diskSizeMB: {image} is an overlaybd image with a disk of {own} MiB, which cannot shrink.",
                f"Ask for {own} or more, or leave it out.",
            )
        asked = disk_mib if disk.prepared else wanted.disk_mib or 0
        return ColdRoot(disk, shape, max(own, asked), (*wanted.boot_arguments, *read_only_folders(wanted.drives)))

    def _machine(self, wanted: ColdMachine) -> tuple[MachineShape, int]:
        vcpus = self._shape.vcpus if wanted.vcpus is None else wanted.vcpus
        memory = self._shape.memory_mib if wanted.memory_mib is None else wanted.memory_mib
        disk = wanted.disk_mib or self._settings.default_disk  # of 0 MiB, which the API allows, is no disk
        disk += sum(drive.disk_mib for drive in wanted.drives)
        for name, value, least, most in (
            ("cpuCount", vcpus, 1, MAX_VCPUS),
            ("memoryMB", memory, MIN_MEMORY, MAX_MEMORY),
            ("diskSizeMB", disk, MIN_DISK, MAX_DISK),
        ):
            if not least <= value <= most:
                raise InvalidRequestError(f"{name}: must be from {least} to {most}, not {value}.")
        return MachineShape(vcpus, memory), disk

    def put(self, root: ColdRoot) -> DiskLayer:
        """Record the image as a disk layer. Inside a transaction. Raises OSError."""
        return self._images.put(self._store, root.disk)

    async def complete(self, root: ColdRoot, sandbox: Sandbox, host: str) -> None:
        """Add what the platform promises to a guest whose image was not prepared. Raises SandboxStartError."""
        if not root.disk.prepared:
            await firstboot.complete(host, sandbox.envd_access_token, root.disk.config)

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
        config = root.disk.config
        return ImageOrigin(
            id=image,
            vcpus=root.shape.vcpus,
            memory_mib=root.shape.memory_mib,
            disk_mib=root.disk_mib,
            envd_version=self._envd_version,
            env_vars=dict(config.env),
            default_user=default_user(root.disk.user),
            default_workdir=default_workdir(config.working_dir),
            boot_arguments=root.boot_arguments,
        )
