"""Typed errors of the image layer; each says what the user can do next."""

from __future__ import annotations

from aenv.errors import AenvError, InvalidRequestError, NotFoundError


class ImageError(AenvError):
    """An image cannot be turned into a root file system."""


class InvalidReferenceError(ImageError, InvalidRequestError):
    """The text does not name an image."""


class ImageNotFoundError(ImageError, NotFoundError):
    """The registry, or the local path, has no such image."""


class RegistryUnauthorizedError(ImageError, InvalidRequestError):
    """The registry refuses the credentials, or wants some."""


class RegistryForbiddenError(ImageError, InvalidRequestError):
    """This node's configuration does not allow the registry, or local sources."""


class RegistryUnreachableError(ImageError):
    """The registry does not answer, or answers with nonsense, also after retries."""


class DigestMismatchError(ImageError):
    """Content differs from what its digest promises. It was discarded."""


class UnsupportedImageError(ImageError, InvalidRequestError):
    """A well-formed image that cannot run here: another platform, another format, not a container image."""


class ArchiveError(ImageError, InvalidRequestError):
    """A layer is damaged or is not a tar archive."""


class UnsafeArchiveError(ArchiveError):
    """A layer tries to write outside the root, or nests directories without end."""


class ImageTooLargeError(ArchiveError):
    """The image does not fit its disk, or this node's."""
