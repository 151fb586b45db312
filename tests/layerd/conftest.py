import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.layerd.support import Server

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path: Path, make_server: Callable[..., Server]) -> Server:
    """Not started yet."""
    return make_server(tmp_path)


@pytest.fixture
def make_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    """Makes servers, and ends them with the test."""
    if os.getuid() or not Path("/dev/fuse").exists():
        pytest.skip("mounting needs root and /dev/fuse")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    made: list[Server] = []

    def make(root: Path, **sizes: int) -> Server:
        made.append(Server(root, **sizes))
        return made[-1]

    yield make
    for server in made:
        server.destroy()
