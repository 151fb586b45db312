"""A daemon per test module: tests leave nothing behind in it, and the ones about tokens have their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2b import Sandbox

from tests.envd.daemon import Envd


@pytest.fixture(scope="module")
def envd() -> Iterator[Envd]:
    daemon = Envd()
    yield daemon
    daemon.stop()


@pytest.fixture
def fresh() -> Iterator[Envd]:
    daemon = Envd()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def sandbox(envd: Envd) -> Sandbox:
    return envd.sandbox()
