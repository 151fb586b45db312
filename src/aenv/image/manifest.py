"""OCI and Docker manifests, image indexes and image configurations, as values. No I/O.

Formats: OCI image-spec 1.1 (``manifest.md``, ``image-index.md``, ``config.md``) and Docker's image manifest
version 2, schema 2. Everything here comes from a stranger: each field that is used is checked.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aenv.image.errors import ImageError, UnsupportedImageError
from aenv.image.reference import is_digest

OCI_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
OCI_INDEX = "application/vnd.oci.image.index.v1+json"
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
DOCKER_LIST = "application/vnd.docker.distribution.manifest.list.v2+json"
OCI_CONFIG = "application/vnd.oci.image.config.v1+json"
DOCKER_CONFIG = "application/vnd.docker.container.image.v1+json"

ACCEPT = ", ".join((OCI_INDEX, DOCKER_LIST, OCI_MANIFEST, DOCKER_MANIFEST))
MAX_DOCUMENT = 4 << 20
"""Largest manifest or configuration that is read, bytes: what the OCI distribution spec asks registries to accept."""

OS, ARCHITECTURE = "linux", "amd64"
_MAX_LAYERS = 512
_LAYER_PREFIXES = (
    "application/vnd.oci.image.layer.v1.tar",
    "application/vnd.oci.image.layer.nondistributable.v1.tar",
    "application/vnd.docker.image.rootfs.diff.tar",
    "application/vnd.docker.image.rootfs.foreign.diff.tar",
)


class MalformedImageError(ImageError):
    """A manifest or configuration breaks its format."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A reference to content: its digest, and its size in bytes (None where the source does not say)."""

    digest: str
    size: int | None
    media_type: str = ""
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One image for one platform; ``layers`` from the bottom up."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image says about running it. ``digest`` is that of the manifest, the image's identity."""

    digest: str
    env: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = "/"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    exposed_ports: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    stop_signal: str = ""


def document(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object. Raises MalformedImageError."""
    try:
        value = json.loads(data)
        json.dumps(value, ensure_ascii=False).encode()  # halves of characters are no text that could be stored
    except (ValueError, RecursionError) as error:
        raise MalformedImageError(f"The {what} is not JSON.", "The registry or the archive is damaged.") from error
    if not isinstance(value, dict):
        raise MalformedImageError(f"The {what} is not a JSON object.", "The registry or the archive is damaged.")
    return value


def is_index(value: Mapping[str, Any], media_type: str) -> bool:
    """Whether a document lists manifests. ``media_type`` is the registry's word for it, often useless."""
    kind = value.get("mediaType") or media_type
    return kind in (OCI_INDEX, DOCKER_LIST) or ("manifests" in value and "layers" not in value)


def select(index: Mapping[str, Any]) -> Descriptor:
    """The manifest for linux/amd64 in an index: the plainest variant. Raises UnsupportedImageError."""
    entries = [entry for entry in _list(index, "manifests") if isinstance(entry, dict)]
    found: list[tuple[int, Descriptor]] = []
    offered: list[str] = []
    for entry in entries:
        platform = entry.get("platform")
        if not isinstance(platform, dict):
            if len(entries) == 1:  # an OCI layout of one image says no platform; its configuration does
                return descriptor(entry)
            continue
        offered.append(f"{platform.get('os')}/{platform.get('architecture')}")
        if platform.get("os") == OS and platform.get("architecture") == ARCHITECTURE:
            found.append((len(str(platform.get("variant") or "")), descriptor(entry)))
    if not found:
        raise UnsupportedImageError(
            f"The image has no {OS}/{ARCHITECTURE} variant (it has: {', '.join(sorted(set(offered))) or 'nothing'}).",
            "Sandboxes are x86-64 Linux machines: choose another image or tag.",
        )
    return min(found, key=lambda item: item[0])[1]


def descriptor(value: object) -> Descriptor:
    if not isinstance(value, dict):
        raise MalformedImageError("A descriptor in the manifest is not an object.", "The registry is damaged.")
    digest, size, media_type = value.get("digest"), value.get("size"), value.get("mediaType")
    if not isinstance(digest, str) or not is_digest(digest) or not isinstance(size, int) or size < 0:
        raise MalformedImageError(
            f"Invalid descriptor in the manifest: digest {digest!r:.100}, size {size!r:.40}.",
            "Only sha256 and sha512 digests are supported.",
        )
    notes = {key: text for key, text in _object(value, "annotations").items() if isinstance(text, str)}
    return Descriptor(digest, size, media_type if isinstance(media_type, str) else "", notes)


def manifest(value: Mapping[str, Any]) -> Manifest:
    """Raises UnsupportedImageError for schema 1 and for artefacts that are not container images."""
    if value.get("schemaVersion") == 1 or "fsLayers" in value:
        raise UnsupportedImageError(
            "The image has only a Docker schema 1 manifest, a format withdrawn in 2017.",
            "Push it again with a current docker, podman or skopeo.",
        )
    config = descriptor(value.get("config"))
    layers = tuple(descriptor(layer) for layer in _list(value, "layers"))
    known = config.media_type in (OCI_CONFIG, DOCKER_CONFIG, "")
    if not known or any(layer.media_type and not layer.media_type.startswith(_LAYER_PREFIXES) for layer in layers):
        kind = value.get("artifactType") or config.media_type
        raise UnsupportedImageError(f"This is not a container image but {kind!r:.100}.", "Choose another reference.")
    if len(layers) > _MAX_LAYERS:
        raise UnsupportedImageError(f"The image has {len(layers)} layers; at most {_MAX_LAYERS} are supported.")
    return Manifest(config, layers)


def diff_ids(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Digests of the uncompressed layers, from the bottom up."""
    rootfs = config.get("rootfs")
    values = rootfs.get("diff_ids") if isinstance(rootfs, dict) else None
    if not isinstance(values, list) or not all(isinstance(value, str) and is_digest(value) for value in values):
        raise MalformedImageError("The image's configuration lists no layers (`rootfs.diff_ids`).")
    return tuple(values)


def image_config(value: Mapping[str, Any], digest: str) -> ImageConfig:
    """Raises UnsupportedImageError for another platform."""
    platform = (value.get("os") or OS, value.get("architecture") or ARCHITECTURE)
    if platform != (OS, ARCHITECTURE):
        raise UnsupportedImageError(
            f"The image is for {platform[0]}/{platform[1]}.", "Sandboxes are x86-64 Linux machines: choose another."
        )
    config = value.get("config")
    if not isinstance(config, dict):
        config = {}
    pairs = (item.partition("=") for item in _strings(config, "Env"))
    return ImageConfig(
        digest=digest,
        env={name: text for name, equals, text in pairs if name and equals},
        working_dir=_text(config, "WorkingDir") or "/",
        user=_text(config, "User"),
        entrypoint=_strings(config, "Entrypoint"),
        cmd=_strings(config, "Cmd"),
        shell=_strings(config, "Shell") or ("/bin/sh", "-c"),
        exposed_ports=tuple(sorted(_keys(config, "ExposedPorts"))),
        volumes=tuple(sorted(_keys(config, "Volumes"))),
        labels={key: text for key, text in _object(config, "Labels").items() if isinstance(text, str)},
        stop_signal=_text(config, "StopSignal"),
    )


def _list(value: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = value.get(key)
    if not isinstance(found, list):
        raise MalformedImageError(f"The manifest has no {key!r}.", "The registry or the archive is damaged.")
    return found


def _object(value: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = value.get(key)
    return found if isinstance(found, dict) else {}


def _keys(value: Mapping[str, Any], key: str) -> list[str]:
    return list(_object(value, key))


def _strings(value: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = value.get(key)
    if isinstance(found, str):  # seen in old images' Cmd
        return (found,)
    return tuple(item for item in found if isinstance(item, str)) if isinstance(found, list) else ()


def _text(value: Mapping[str, Any], key: str) -> str:
    found = value.get(key)
    return found if isinstance(found, str) else ""
