"""Image references: ``ubuntu:24.04``, ``docker.io/library/x``, ``host:5000/a/b@sha256:…``.

The grammar is that of the distribution project (github.com/distribution/reference, ``regexp.go``). What has no
registry in it is a short name, and is looked for in the configured registries in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from aenv.image.errors import InvalidReferenceError

DOCKER_HUB = "docker.io"
DEFAULT_TAG = "latest"
MAX_NAME = 255

_HUB_ALIASES = frozenset({"index.docker.io", "registry-1.docker.io"})
_HEX_DIGITS = {"sha256": 64, "sha512": 128}

_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9a-fA-F:.]+\])(?::[0-9]{{1,5}})?")
_COMPONENT = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_DIGEST = re.compile(r"(sha256|sha512):([0-9a-f]+)")

_HINT = "An image is named like `ubuntu:24.04`, `registry.example.org:5000/team/app:tag` or `name@sha256:…`."


@dataclass(frozen=True, slots=True)
class Reference:
    """A parsed reference. ``registry`` is None for a short name; ``tag`` is None only where there is a digest."""

    registry: str | None
    repository: str
    tag: str | None
    digest: str | None = None

    def __str__(self) -> str:
        name = f"{self.registry}/{self.repository}" if self.registry else self.repository
        name += f":{self.tag}" if self.tag else ""
        return name + (f"@{self.digest}" if self.digest else "")

    @property
    def version(self) -> str:
        """What a manifest is asked for by: the digest where there is one (then the tag is only a comment)."""
        return self.digest or self.tag or DEFAULT_TAG


def parse(text: str) -> Reference:
    """Parse a reference as a user writes it. Raises InvalidReferenceError."""
    rest, at, digest = text.partition("@")
    if at and not is_digest(digest):
        raise InvalidReferenceError(
            f"Invalid digest in image reference {text!r}.",
            "A digest is `sha256:` and 64 hexadecimal digits in lower case, or `sha512:` and 128.",
        )
    host, slash, path = rest.partition("/")
    registry: str | None = None
    if slash and _is_registry(host):
        registry = _registry(host, text)
        rest = path
    repository, colon, tag = rest.partition(":")
    if colon and not _TAG.fullmatch(tag):
        raise InvalidReferenceError(f"Invalid tag {tag!r} in image reference {text!r}.", _HINT)
    if not all(_COMPONENT.fullmatch(part) for part in repository.split("/")):
        if repository != repository.lower():
            raise InvalidReferenceError(
                f"Invalid image reference {text!r}: the name must be in lower case.", f"Try {repository.lower()!r}."
            )
        raise InvalidReferenceError(f"Invalid image reference {text!r}.", _HINT)
    if registry == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    if len(f"{registry}/{repository}") > MAX_NAME:
        raise InvalidReferenceError(f"Image reference {text[:40]!r}… is longer than {MAX_NAME} characters.", _HINT)
    return Reference(registry, repository, tag or (None if digest else DEFAULT_TAG), digest or None)


def candidates(reference: Reference, search: Sequence[str]) -> list[Reference]:
    """The full references to try in order. Raises InvalidReferenceError for a short name and an empty search list."""
    if reference.registry is not None:
        return [reference]
    if not search:
        raise InvalidReferenceError(
            f"Image reference {reference} names no registry.",
            "Write the registry in front of it, or list registries in `registry_search`.",
        )
    return [_within(registry, reference) for registry in search]


def is_digest(text: str) -> bool:
    """Whether this is a digest of an algorithm that is verified here."""
    match = _DIGEST.fullmatch(text)
    return match is not None and len(match[2]) == _HEX_DIGITS[match[1]]


def _within(registry: str, reference: Reference) -> Reference:
    host = _registry(registry, registry)
    official = host == DOCKER_HUB and "/" not in reference.repository
    return replace(
        reference,
        registry=host,
        repository=f"library/{reference.repository}" if official else reference.repository,
    )


def _is_registry(first: str) -> bool:
    """The first component is a registry if no repository could be called so, or by the convention for localhost."""
    return first == "localhost" or "." in first or ":" in first or first != first.lower()


def _registry(host: str, text: str) -> str:
    """The registry's canonical name, in lower case."""
    port = int(host.rpartition(":")[2]) if re.search(r":[0-9]{1,5}$", host) and not host.endswith("]") else 1
    if not _HOST.fullmatch(host) or not 1 <= port <= 65535:
        raise InvalidReferenceError(f"Invalid registry {host!r} in image reference {text!r}.", _HINT)
    name = host.lower()
    return DOCKER_HUB if name in _HUB_ALIASES else name
