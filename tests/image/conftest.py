"""Fixtures: registries that live as long as the test session's image tests, and settings for a temporary node."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aenv.config import RegistrySettings, Settings
from tests.image.registries import PROGRAM, Registry, running

MakeSettings = Callable[..., Settings]


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    if PROGRAM is None:
        pytest.skip("docker-registry is not installed")
    with running(tmp_path_factory.mktemp("registry")) as started:
        yield started


@pytest.fixture
def make_settings(tmp_path: Path) -> MakeSettings:
    """Settings of a node in ``tmp_path`` that reaches the named registries without TLS."""

    def make(*plain: str, registries: dict[str, RegistrySettings] | None = None, **more: object) -> Settings:
        known = {host: RegistrySettings(plain_http=True) for host in plain}
        merged = {**known, **(registries or {})}
        values = {"docker_config": tmp_path / "no-docker-config.json", "reserve_disk": 0, **more}
        return Settings(home=tmp_path / "home", registries=merged, **values)  # type: ignore[arg-type]

    return make
