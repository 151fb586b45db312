"""The official JavaScript SDK, unchanged, against the node: runs tests/js with node's own test runner."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.image import registries
from tests.node import images
from tests.node.javascript import NODE, SOURCES, environment
from tests.node.process import NodeProcess

_NAME = re.compile(r"^test\('([^']+)'", re.MULTILINE)
_RESULT = re.compile(r"^\s*(not ok|ok) \d+ - (.+?)( # SKIP.*)?$", re.MULTILINE)
_VERDICT = re.compile(r"(?P<feature>.+?)(?: \((?P<verdict>differs|refused)\))?: .+")

RUN_TIMEOUT = 540  # seconds for all of them; they take about 60 on two quiet cores


def _cases() -> list[ParameterSet]:
    cases = []
    for file in sorted(SOURCES.glob("*.test.mjs")):
        for name in _NAME.findall(file.read_text()):
            found = _VERDICT.fullmatch(name)
            assert found is not None, f"{file.name}: {name!r} is not 'feature: what'"
            mark = pytest.mark.compat("JavaScript", found["feature"], found["verdict"] or "works")
            cases.append(pytest.param(name, id=name, marks=mark))
    return cases


@pytest.fixture(scope="module")
def registry(node: NodeProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the tests are told of an image in a private registry: nothing where none is installed."""
    with images.private_registry(node, tmp_path_factory.mktemp("registry")) as host:
        yield (
            {}
            if host is None
            else {
                "AENV_TEST_IMAGE": f"{host}/{images.NAME}",
                "AENV_TEST_IMAGE_USER": registries.USER,
                "AENV_TEST_IMAGE_PASSWORD": registries.PASSWORD,
            }
        )


@pytest.fixture(scope="module")
def results(node: NodeProcess, javascript: Path, registry: dict[str, str]) -> dict[str, tuple[bool | None, str]]:
    """Each test's outcome, None for one that was skipped, with the report on it."""
    files = [file.name for file in sorted(SOURCES.glob("*.test.mjs"))]
    done = subprocess.run(
        [NODE, "--test", "--test-concurrency=1", "--test-reporter=tap", *files],
        cwd=javascript,
        env=environment(node, **registry),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
        check=False,
    )
    outcomes: dict[str, tuple[bool | None, str]] = {}
    marks = list(_RESULT.finditer(done.stdout))
    for mark, after in zip(marks, [*marks[1:], None], strict=True):
        report = done.stdout[mark.start() : after.start() if after else mark.start() + 4000]
        outcomes[mark[2]] = (None if mark[3] else mark[1] == "ok", report)
    assert outcomes, f"node {os.fspath(javascript)}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return outcomes


@pytest.mark.parametrize("name", _cases())
def test_javascript(name: str, results: dict[str, tuple[bool | None, str]]) -> None:
    passed, report = results.get(name, (False, "it did not run"))
    if passed is None:
        pytest.skip("docker-registry is not installed")
    assert passed, report
