"""The drives of a cold start, as AgentENV's specification has them: checked, with their defaults."""

import posixpath
from collections.abc import Sequence

from pydantic import Field, StrictBool, StrictInt

from aenv.api import schemas
from aenv.errors import InvalidRequestError
from aenv.orchestrator.model import Drive

MOST = 16
_FORBIDDEN = " ,:\"'"  # quotes mean something on a kernel's command line
_LONGEST_NAME = 255  # of a folder
_LONGEST = 1024  # of all paths together, which are on it
_RESERVED = ("/proc", "/sys", "/dev", "/run", "/agentenv", "/opt/agentenv", "/.aenv-drive")


class DriveSource(schemas._Model):
    image: schemas.Text = Field(min_length=1, max_length=512, description="Reference of an OCI or Docker image")


class AttachedDrive(schemas._Model):
    """Files of an image, in a folder of the sandbox's own disk."""

    drive_id: schemas.Text = Field(alias="driveID", max_length=128, description="Unique in the sandbox, without /")
    source: DriveSource
    read_only: StrictBool = Field(True, description="Whether the folder cannot be written to")
    mount_path: schemas.Text | None = Field(None, max_length=512, description="Absolute; /mnt/{driveID} if left out")
    sub_path: schemas.Text | None = Field(None, max_length=512, description="A folder of the image to show there")
    disk_size_mb: StrictInt | None = Field(None, ge=0, le=1 << 20, description="MiB that the disk is larger for it")


def drives(attached: Sequence[AttachedDrive]) -> tuple[Drive, ...]:
    """Raises InvalidRequestError."""
    if len(attached) > MOST:
        raise InvalidRequestError(f"attachedDrives: {len(attached)} are too many.", f"{MOST} are allowed.")
    found: dict[str, Drive] = {}
    names = set[str]()
    for drive in attached:
        name = drive.drive_id
        if not name or "/" in name or name == "." or name in names:
            raise InvalidRequestError(f"driveID: {name[:80]!r} is no name, has a slash, or is there twice.")
        names.add(name)
        path = _mount_path(drive.mount_path if drive.mount_path is not None else f"/mnt/{name}")
        if any(path == other or path.startswith(f"{other}/") or other.startswith(f"{path}/") for other in found):
            raise InvalidRequestError(f"mountPath: {path} and another drive's are within each other.")
        folder = "" if drive.sub_path is None else _sub_path(drive.sub_path)
        found[path] = Drive(drive.source.image.strip(), path, folder, drive.read_only, drive.disk_size_mb or 0)
    if sum(map(len, found)) > _LONGEST:
        raise InvalidRequestError(f"mountPath: all together have more than {_LONGEST} characters.")
    return tuple(found.values())


def _mount_path(text: str) -> str:
    path = posixpath.normpath(text)
    if not _is_plain(text) or not text.startswith("/") or path in ("/", "//"):
        raise InvalidRequestError(
            f"mountPath: {text[:80]!r} is no absolute path below /, without '..', spaces, commas, colons and quotes."
        )
    path = "/" + path.lstrip("/")
    if any(len(part) > _LONGEST_NAME for part in path.split("/")):
        raise InvalidRequestError(f"mountPath: names in it have at most {_LONGEST_NAME} characters.")
    if any(path == reserved or path.startswith(f"{reserved}/") for reserved in _RESERVED):
        raise InvalidRequestError(f"mountPath: {path} is reserved.", f"Not below {', '.join(_RESERVED[:-1])}.")
    return path


def _sub_path(text: str) -> str:
    path = posixpath.normpath(text)
    if not text or not _is_plain(text) or text.startswith("/") or path == ".":
        raise InvalidRequestError(
            f"subPath: {text[:80]!r} is no relative path, without '..', spaces, commas, colons and quotes."
        )
    return path


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and ".." not in text and not set(text) & set(_FORBIDDEN)
