"""Images whose layers are overlaybd layers already: recognised by their manifests, opened by range. No conversion.

Format: containerd's accelerated-container-image, ``pkg/label/label.go`` and ``docs/``: the layers of a manifest are
ordinary in their media type and carry the annotation ``BLOB_DIGEST``; a blob is an overlaybd layer, mostly within a
tar archive. The lowest one holds an ext4 file system, whose size is that of the top layer's virtual disk.
"""

from __future__ import annotations

from dataclasses import dataclass

from aenv.image.errors import UnsupportedImageError
from aenv.image.manifest import Descriptor, ImageConfig, Manifest
from aenv.image.reference import Reference

_PREFIX = "containerd.io/snapshot/overlaybd/"
BLOB_DIGEST = _PREFIX + "blob-digest"
BLOB_SIZE = _PREFIX + "blob-size"
VERSION = _PREFIX + "version"
FILE_SYSTEM = _PREFIX + "blob-fs-type"
FORMAT_VERSION = "0.1.0"
MAX_LAYERS = 255  # of a stack (aenv.storage.stack)


@dataclass(frozen=True, slots=True)
class NativeImage:
    """``reference`` has the manifest's digest. ``layers`` from the bottom up; all have sizes."""

    reference: Reference
    config: ImageConfig
    layers: tuple[Descriptor, ...]


def is_native(manifest: Manifest) -> bool:
    """Whether all layers are overlaybd layers. Raises UnsupportedImageError for what cannot be read."""
    marked = [BLOB_DIGEST in layer.annotations for layer in manifest.layers]
    if not any(marked):
        return False
    if not all(marked) or len(marked) > MAX_LAYERS:
        raise UnsupportedImageError(
            f"Of the image's {len(marked)} layers {sum(marked)} are overlaybd layers; "
            f"it takes all, and at most {MAX_LAYERS}.",
            "Convert the image again, or use the image that it was converted from.",
        )
    for layer in manifest.layers:
        kind = layer.annotations.get(FILE_SYSTEM, "ext4")
        if kind not in ("", "ext4"):
            raise UnsupportedImageError(f"The image's file system is {kind:.20}.", "Convert it with ext4.")
        if layer.annotations[BLOB_DIGEST] != layer.digest or not layer.digest.startswith("sha256:"):
            raise UnsupportedImageError(
                "A layer of the image is an index of another blob (turboOCI), which is not read here.",
                "Convert the image to overlaybd layers.",
            )
    return True
