"""The official JavaScript SDK, unchanged, against the node: runs tests/js with node's own test runner."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.node.javascript import NODE, SOURCES, environment
from tests.node.process import NodeProcess

_NAME = re.compile(r"^test\('([^']+)'", re.MULTILINE)
_RESULT = re.compile(r"^\s*(not ok|ok) \d+ - (.+?)(?: # .*)?$", re.MULTILINE)
_VERDICT = re.compile(r"(?P<feature>.+?)(?: \((?P<verdict>differs|refused)\))?: .+")

RUN_TIMEOUT = 280  # seconds for all of them; they take about 30 on two quiet cores


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
def results(node: NodeProcess, javascript: Path) -> dict[str, tuple[bool, str]]:
    """Each test's outcome, with the report on it."""
    files = [file.name for file in sorted(SOURCES.glob("*.test.mjs"))]
    done = subprocess.run(
        [NODE, "--test", "--test-concurrency=1", "--test-reporter=tap", *files],
        cwd=javascript,
        env=environment(node),
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT,
        check=False,
    )
    outcomes: dict[str, tuple[bool, str]] = {}
    marks = list(_RESULT.finditer(done.stdout))
    for mark, after in zip(marks, [*marks[1:], None], strict=True):
        report = done.stdout[mark.start() : after.start() if after else mark.start() + 4000]
        outcomes[mark[2]] = (mark[1] == "ok", report)
    assert outcomes, f"node {os.fspath(javascript)}: {done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return outcomes


@pytest.mark.parametrize("name", _cases())
def test_javascript(name: str, results: dict[str, tuple[bool, str]]) -> None:
    passed, report = results.get(name, (False, "it did not run"))
    assert passed, report
