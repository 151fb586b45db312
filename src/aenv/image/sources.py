"""Images in local files: OCI layouts (directory or archive), archives of ``docker save`` and of root file systems.

Written ``oci:PATH[:NAME]``, ``docker-archive:PATH[:NAME]`` and ``tar:PATH``. An archive is first unpacked, confined,
beside the image's own tree; what it links to inside itself is followed, never outside.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aenv.image.confined import Root, clean
from aenv.image.errors import DigestMismatchError, ImageNotFoundError, InvalidReferenceError
from aenv.image.manifest import (
    MAX_DOCUMENT,
    Descriptor,
    ImageConfig,
    MalformedImageError,
    diff_ids,
    document,
    image_config,
    is_index,
    manifest,
    select,
)
from aenv.image.unpacker import Unpacker

OCI, DOCKER_ARCHIVE, TAR = "oci", "docker-archive", "tar"
_REF_NAME = "org.opencontainers.image.ref.name"


@dataclass(frozen=True, slots=True)
class LocalSource:
    """Where a local image is; ``name`` chooses one of several in it."""

    kind: str
    path: Path
    name: str

    @property
    def described(self) -> str:
        return f"{self.kind}:{self.path}{':' if self.name else ''}{self.name}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer as a local file; ``diff_id`` is the digest of its uncompressed bytes, where it is known."""

    path: Path
    diff_id: str | None
    whiteouts: bool = True


def parse_local(text: str) -> LocalSource | None:
    """None where the text names no local source. Raises InvalidReferenceError, ImageNotFoundError."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in (OCI, DOCKER_ARCHIVE, TAR) or (kind == OCI and rest.isdecimal()):
        return None
    # ``tar:1.35`` is a tag of an image called tar: a path has a slash in it, or exists.
    if "/" not in rest and not Path(rest).exists():
        return None
    path, name = Path(rest), ""
    if not path.exists() and kind != TAR and ":" in rest:
        before, _, name = rest.rpartition(":")
        path = Path(before)
    if not path.exists():
        raise ImageNotFoundError(
            f"{rest} does not exist.", "A local image is oci:PATH, docker-archive:PATH or tar:PATH."
        )
    if kind != OCI and not path.is_file():
        raise InvalidReferenceError(f"{path} is not a file.", "A directory can only be an OCI layout (oci:PATH).")
    return LocalSource(kind, path, name)


async def identity(source: LocalSource) -> str:
    """A digest that changes with the image: of its file, or of an OCI layout's manifest."""
    if source.path.is_dir():
        return await asyncio.to_thread(lambda: _Layout(source.path, source.name).resolve()[0])
    return await asyncio.to_thread(file_digest, source.path, source.name)


async def open_local(
    source: LocalSource, digest: str, work: Path, unpacker: Unpacker
) -> tuple[ImageConfig, list[Layer]]:
    """The configuration and layers of a local image; an archive's are put under ``work``.

    Raises ImageNotFoundError, MalformedImageError, ArchiveError, UnsupportedImageError.
    """
    if source.kind == TAR:
        return ImageConfig(digest=digest), [Layer(source.path.resolve(), None, whiteouts=False)]
    path = source.path
    if path.is_file():
        path = work / "archive"
        path.mkdir(mode=0o700)
        await unpacker.extract(path, source.path.resolve())
    read: Callable[[Path, str, str], tuple[ImageConfig, list[Layer]]]
    read = _read_layout if source.kind == OCI else _read_docker
    return await asyncio.to_thread(read, path, source.name, digest)


def _read_layout(path: Path, name: str, digest: str) -> tuple[ImageConfig, list[Layer]]:
    layout = _Layout(path, name)
    _, value = layout.resolve()
    parsed = manifest(value)
    config = document(layout.blob(parsed.config.digest), "image's configuration")
    ids = diff_ids(config)
    if len(ids) != len(parsed.layers):
        raise MalformedImageError("The manifest and the configuration differ in the number of layers.")
    files = [layout.files.path(_blob_name(layer.digest)) for layer in parsed.layers]
    return image_config(config, digest), [Layer(file, known) for file, known in zip(files, ids, strict=True)]


def _read_docker(path: Path, name: str, digest: str) -> tuple[ImageConfig, list[Layer]]:
    """``docker save``: manifest.json lists images, each with its configuration and its layers' uncompressed files."""
    files = _Files(path)
    try:
        images = json.loads(files.read("manifest.json"))
    except ValueError as error:
        raise MalformedImageError("manifest.json in the archive is not JSON.") from error
    images = [image for image in images if isinstance(image, dict)] if isinstance(images, list) else []
    found = [image for image in images if not name or name in (image.get("RepoTags") or [])]
    if len(found) != 1:
        names = sorted({str(tag) for image in images for tag in image.get("RepoTags") or []})
        raise ImageNotFoundError(
            f"The archive has {len(found)} images called {name!r}."
            if name
            else f"The archive has {len(found)} images.",
            f"Choose one with docker-archive:PATH:NAME; it has: {', '.join(names)[:300] or 'no names'}.",
        )
    config_name, layers = found[0].get("Config"), found[0].get("Layers")
    if not isinstance(config_name, str) or not isinstance(layers, list):
        raise MalformedImageError("manifest.json in the archive has an image without Config and Layers.")
    config = document(files.read(config_name), "image's configuration")
    ids = diff_ids(config)
    if len(ids) != len(layers):
        raise MalformedImageError("The archive and the configuration differ in the number of layers.")
    return image_config(config, digest), [
        Layer(files.path(str(layer)), known) for layer, known in zip(layers, ids, strict=True)
    ]


class _Files:
    """Files of a directory that holds an image; nothing outside it is ever read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, name: str) -> Path:
        """The real path of a regular file. Raises ImageNotFoundError."""
        root = Root(self._directory)
        try:
            fd = root.open_file(clean(os.fsencode(name)), os.O_RDONLY)
        except OSError as error:
            raise ImageNotFoundError(f"{name!r} is missing in the image.", "The image is incomplete.") from error
        finally:
            root.close()
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise MalformedImageError(f"{name!r} in the image is not a file.")
            return Path(f"/proc/self/fd/{fd}").readlink()
        finally:
            os.close(fd)

    def read(self, name: str) -> bytes:
        with self.path(name).open("rb") as file:
            data = file.read(MAX_DOCUMENT + 1)
        if len(data) > MAX_DOCUMENT:
            raise MalformedImageError(f"{name!r} in the image is larger than {MAX_DOCUMENT} bytes.")
        return data


class _Layout:
    """An OCI image layout (image-spec ``image-layout.md``)."""

    def __init__(self, directory: Path, name: str) -> None:
        self.files = _Files(directory)
        self._name = name

    def resolve(self) -> tuple[str, dict[str, Any]]:
        """Digest and content of the manifest for this platform."""
        value = document(self.files.read("index.json"), "index")
        if self._name:
            listed = value.get("manifests")
            entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
            named = [entry for entry in entries if (entry.get("annotations") or {}).get(_REF_NAME) == self._name]
            if not named:
                raise ImageNotFoundError(f"The layout has no image called {self._name!r}.", "See its index.json.")
            value = {**value, "manifests": named}
        for _ in range(4):  # an index may list indexes
            chosen: Descriptor = select(value)
            value = document(self.blob(chosen.digest), "manifest")
            if not is_index(value, chosen.media_type):
                return chosen.digest, value
        raise MalformedImageError("Indexes in the layout are nested too deep.")

    def blob(self, digest: str) -> bytes:
        data = self.files.read(_blob_name(digest))
        algorithm, _, name = digest.partition(":")
        if hashlib.new(algorithm, data).hexdigest() != name:
            raise DigestMismatchError(f"The content of {digest} in the layout differs.", "The layout is damaged.")
        return data


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def file_digest(path: Path, name: str = "") -> str:
    """Of the file's bytes, and of ``name``."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    if name:
        digest.update(b"\0" + name.encode())
    return f"sha256:{digest.hexdigest()}"
