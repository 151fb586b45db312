"""Blobs of a registry as sources that are read by range: what the layer server has under images on demand.

The registry's client is asynchronous and its readers are threads, so it has an event loop in a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from aenv.config import Settings
from aenv.errors import AenvError, InvalidRequestError, SourceError
from aenv.image.reference import Reference, parse
from aenv.image.registry import RegistryClient
from aenv.storage.source import Source, check_range

BACKEND = "registry"  # of a layer server's ``repository``
LONGEST = 90.0  # seconds until a read is given up; the client's own time limits are shorter

T = TypeVar("T")


def described(reference: Reference, settings: Settings) -> dict[str, Any]:
    """The ``repository`` of an export whose layers are blobs of ``reference``'s repository. It has credentials."""
    assert reference.registry is not None
    hosts = {reference.registry}
    if (own := settings.registries.get(reference.registry)) is not None:
        hosts |= {mirror.partition("/")[0] for mirror in own.mirrors}
    dumped = settings.model_dump(mode="json", include={"registries", "docker_config", "registry_allow"})
    dumped["registries"] = {host: value for host, value in dumped["registries"].items() if host in hosts}
    return {"backend": BACKEND, "reference": str(reference), "settings": dumped}


class RegistryBlobs:
    """Blobs of one repository. Thread-safe; the loop and its connections live as long as the process."""

    def __init__(self, repository: Mapping[str, Any]) -> None:
        """``repository`` is what ``described`` made. Raises InvalidRequestError."""
        try:
            self._reference = parse(repository["reference"])
            settings = Settings(**repository["settings"])
        except (KeyError, TypeError, ValidationError) as error:
            raise InvalidRequestError(f"This is no registry's repository: {error}.") from None
        self._loop = asyncio.new_event_loop()
        self._client = RegistryClient(settings)
        threading.Thread(target=self._loop.run_forever, name="registry", daemon=True).start()

    def open(self, digest: str, size: int) -> Source:
        """Nothing is asked before the first read."""
        return _Blob(self, digest, size)

    def read(self, digest: str, offset: int, length: int) -> bytes:
        """Raises SourceError."""
        try:
            return self._wait(self._client.part(self._reference, digest, offset, length))
        except AenvError as error:
            raise SourceError(error.message, error.hint) from error
        except TimeoutError as error:
            raise SourceError(f"{self._reference.registry} did not answer within {LONGEST:.0f} seconds.") from error

    def close(self) -> None:
        """For those who do not keep it for the process's life."""
        self._wait(self._client.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LONGEST)


class _Blob:
    def __init__(self, blobs: RegistryBlobs, digest: str, size: int) -> None:
        self._blobs = blobs
        self._digest = digest
        self._size = size

    @property
    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        check_range(self, offset, length, self._digest)
        return self._blobs.read(self._digest, offset, length) if length else b""
