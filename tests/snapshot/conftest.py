"""A real S3 server, and repositories in a folder and in it."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from aenv.snapshot.objects import ObjectStore
from aenv.snapshot.posix import PosixStore
from aenv.snapshot.s3 import S3Store
from aenv.snapshot.shared import SharedRepository
from tests.snapshot.s3_server import S3Server, s3_server


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(params=["posix", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "posix":
        return PosixStore(tmp_path / "repository")
    server: S3Server = request.getfixturevalue("s3")
    return S3Store(server.settings(uuid.uuid4().hex), deadline=20)


@pytest.fixture
def repository(store: ObjectStore) -> Iterator[SharedRepository]:
    made = SharedRepository(store)
    yield made
    made.close()
