"""Opens the repository that the configuration names."""

from pathlib import Path

from aenv.config import RepositorySettings
from aenv.snapshot.objects import ObjectStore
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.s3 import S3Store
from aenv.snapshot.shared import SharedRepository


def open_store(settings: RepositorySettings, home: Path) -> ObjectStore:
    """``home`` is ``$AENV_HOME``. Nothing is read or made yet. Raises InvalidRequestError for wrong settings."""
    if settings.backend == "s3":
        return S3Store(settings)
    return PosixStore(settings.path or home / "repository")


def open_repository(settings: RepositorySettings, home: Path) -> SharedRepository:
    """As ``open_store``."""
    return SharedRepository(open_store(settings, home))
