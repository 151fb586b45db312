"""From an export's ``repository`` to the stored bytes of its layers. The one place where the layer server looks
upward: it is a program of its own, and the repository's code is imported only by those who have a bucket.
"""

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aenv.errors import InvalidRequestError
from aenv.storage.layerd.exports import Layer
from aenv.storage.source import FileSource, Source

Opener = Callable[[Mapping[str, Any], Layer], Source]


class StoredLayers:
    """The default ``Opener``. Thread-safe.

    A ``repository`` is the JSON of ``aenv.config.RepositorySettings``; of a folder, ``path`` is given. Or it is a
    container registry's: see ``aenv.image.ranged``.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, Opener] = {}

    def __call__(self, repository: Mapping[str, Any], layer: Layer) -> Source:
        """Raises SourceError, InvalidRequestError."""
        if repository.get("backend") == "posix_fs" and repository.get("path"):
            # Its layout (docs/internals/repository.md) without its code, which takes long to import.
            name = layer.digest.removeprefix("sha256:")
            return FileSource(Path(repository["path"]) / "layers" / name[:2] / name)
        key = json.dumps(repository, sort_keys=True)
        with self._lock:
            if (store := self._stores.get(key)) is None:
                store = self._stores[key] = _open(repository)
        return store(repository, layer)


def _open(repository: Mapping[str, Any]) -> Opener:
    if repository.get("backend") == "registry":
        from aenv.image.ranged import RegistryBlobs

        blobs = RegistryBlobs(repository)
        return lambda _, layer: blobs.open(layer.digest, layer.size)
    from pydantic import ValidationError

    from aenv.config import RepositorySettings
    from aenv.snapshot.manifest import LayerRef
    from aenv.snapshot.opening import open_repository

    try:
        settings = RepositorySettings(**repository)
    except ValidationError as error:
        raise InvalidRequestError(f"The settings of the repository are wrong: {error}.") from None
    if settings.backend == "posix_fs":
        raise InvalidRequestError("A repository in a folder needs its path.")
    opened = open_repository(settings, Path())
    return lambda _, layer: opened.open_layer(LayerRef(layer.digest, layer.size))
