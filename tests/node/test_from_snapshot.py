"""A saved snapshot is usable wherever a template id is: builds start from it, by any of its names."""

import time
from collections.abc import Callable, Iterator
from typing import Literal

import httpx
import pytest
from e2b import BuildException, Template

from tests.node.conftest import Create
from tests.node.process import NodeProcess

Forget = Callable[[str], None]


@pytest.fixture
def forget(api: httpx.Client) -> Iterator[Forget]:
    """For templates and snapshots that are to go after the test."""
    names: list[str] = []
    yield names.append
    for name in names:
        assert api.delete(f"/templates/{name}").status_code == 204, name


def build(source: str, command: str, name: str, **options: object) -> list[str]:
    logs: list[str] = []
    template = Template().from_template(source).run_cmd(command)
    Template.build(template, name, on_build_logs=lambda entry: logs.append(entry.message), **options)  # type: ignore[arg-type]
    return logs


@pytest.mark.compat("Python, sync", "templates from snapshots", "works")
def test_a_template_is_built_from_each_name_of_a_snapshot(create: Create, forget: Forget) -> None:
    mark = f"snap-{time.time_ns()}"
    sandbox = create(envs={"COLOUR": "green"})
    sandbox.files.write("f", "first")
    sandbox.commands.run("sleep 4321", background=True, timeout=0)
    first = sandbox.create_snapshot(name=mark)
    sandbox.files.write("f", "second")
    second = sandbox.create_snapshot(name=f"{mark}:v2")
    for name in (first.snapshot_id, second.snapshot_id):
        forget(name)
    built = f"{mark}-built"
    for number, (name, content) in enumerate(
        (
            (mark, "first"),
            (f"{mark}:v2", "second"),
            (first.snapshot_id, "first"),
            (f"{second.snapshot_id}:v2", "second"),
        )
    ):
        assert Template.exists(name) and Template.alias_exists(name)
        assert create(name).files.read("f") == content
        logs = build(name, f"cat f; echo; echo {number}$COLOUR; pgrep -ax sleep || echo quiet", built)
        # What only the guest's memory had is there, and what ran in it does not run beside the steps.
        assert {content, f"{number}green", "quiet"} <= set(logs), logs
    forget(built)
    assert create(built).commands.run("cat f; echo $COLOUR").stdout == "secondgreen\n"
    for name in (f"{mark}:v3", f"{first.snapshot_id}:v2", f"{mark}-nothing"):
        assert not Template.exists(name)
        with pytest.raises(BuildException, match="not found"):
            build(name, "true", built)


def test_from_a_snapshot_of_the_disk_alone_and_in_another_size(create: Create, forget: Forget) -> None:
    sandbox = create()
    sandbox.files.write("f", "kept")
    mark = f"snap-{time.time_ns()}"
    for memory in (False, True):
        name = f"{mark}-{memory}".lower()
        mode: Literal["full", "filesystem"] = "full" if memory else "filesystem"
        forget(sandbox.create_snapshot(name=name, mode=mode).snapshot_id)
        logs = build(name, "cat f; echo; free -m | awk '/Mem/ {print ($2 > 600)}'", f"{name}-built", memory_mb=768)
        forget(f"{name}-built")
        assert {"kept", "1"} <= set(logs), logs


def test_what_a_build_from_a_snapshot_leaves(create: Create, forget: Forget, node: NodeProcess) -> None:
    """The layer that its settled disk becomes has a record, and the build outlives the snapshot."""
    sandbox = create()
    sandbox.files.write("f", "kept")
    snapshot = sandbox.create_snapshot()
    name = f"snap-{time.time_ns()}"
    build(snapshot.snapshot_id, "true", name)
    forget(name)
    sandbox.kill()
    assert sandbox.delete_snapshot(snapshot.snapshot_id)
    assert create(name).files.read("f") == "kept"
    again = build(name, "cat f; echo", f"{name}-2")
    forget(f"{name}-2")
    assert "kept" in again
    layers = {path.name.split(".")[0] for path in (node.home / "layers").iterdir()}
    assert layers == set(node.records("layers"))
