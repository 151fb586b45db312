"""Where a registry is reached: mirrors, origin, scheme, certificates. Decisions only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from aenv.config import RegistrySettings
from aenv.image.errors import RegistryForbiddenError
from aenv.image.reference import DOCKER_HUB, Reference

_DEFAULT = RegistrySettings()
# The Hub's name is not the host that serves its API.
_API_HOSTS = {DOCKER_HUB: "registry-1.docker.io"}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place that serves a repository. ``registry`` is the name it is configured under."""

    registry: str
    base: str
    repository: str
    ca_file: Path | None
    mirror: bool

    @property
    def scope(self) -> str:
        """The token scope that pulling needs."""
        return f"repository:{self.repository}:pull"

    def url(self, kind: str, version: str) -> str:
        return f"{self.base}/v2/{self.repository}/{kind}/{version}"


def endpoints(reference: Reference, registries: Mapping[str, RegistrySettings]) -> list[Endpoint]:
    """The mirrors in their order, then the registry itself."""
    assert reference.registry is not None
    found = []
    for mirror in registries.get(reference.registry, _DEFAULT).mirrors:
        host, _, prefix = mirror.strip("/").partition("/")
        repository = f"{prefix}/{reference.repository}" if prefix else reference.repository
        found.append(_endpoint(host, repository, registries, mirror=True))
    found.append(_endpoint(reference.registry, reference.repository, registries, mirror=False))
    return found


def check_allowed(registry: str, allow: Sequence[str]) -> None:
    """Raises RegistryForbiddenError. An empty list allows every registry."""
    if allow and not any(fnmatchcase(registry, pattern.lower()) for pattern in allow):
        raise RegistryForbiddenError(
            f"Images from {registry} are not allowed on this node.",
            f"Allowed are: {', '.join(allow)} (setting `registry_allow`).",
        )


def _endpoint(host: str, repository: str, registries: Mapping[str, RegistrySettings], *, mirror: bool) -> Endpoint:
    settings = registries.get(host, _DEFAULT)
    scheme = "http" if settings.plain_http else "https"
    return Endpoint(host, f"{scheme}://{_API_HOSTS.get(host, host)}", repository, settings.ca_file, mirror)
