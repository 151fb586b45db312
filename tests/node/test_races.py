"""Calls that cross each other: what was asked for happens once, or is refused in words that say why."""

import json
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
from e2b import BuildException, Sandbox, Template

from tests.node.conftest import Create
from tests.node.process import NodeProcess, wait_for
from tests.node.test_freeze import control

pytestmark = pytest.mark.slow


def repeat(work: Callable[[], object], until: Callable[[], bool]) -> int:
    count = 0
    while not until():
        work()
        count += 1
    return count


def test_freezes_among_snapshots_forks_and_pauses(create: Create, node: NodeProcess, api: httpx.Client) -> None:
    sandbox = create()
    command = sandbox.commands.run("while :; do date +%s%N > ticks; done", background=True, timeout=0)
    wait_for(lambda: sandbox.files.exists("ticks"), "the command to run")
    path = f"/sandboxes/{sandbox.sandbox_id}"
    done = False
    answers: Counter[int] = Counter()

    def freeze_and_thaw() -> None:
        with suppress(httpx.TransportError), control(node, sandbox) as post:  # its machine goes with a pause
            for what in ("/freeze?maxWaitMs=50", "/unfreeze"):
                answers[post(what).status_code] += 1

    with ThreadPoolExecutor(2) as executor:
        freezing = executor.submit(repeat, freeze_and_thaw, lambda: done)
        try:
            children = []
            for _ in range(3):
                assert api.post(f"{path}/snapshots", json={}).status_code == 201
                children += sandbox.fork(count=1)
                sandbox.pause()
                sandbox.connect()
        finally:
            done = True
        assert freezing.result() > 0
    assert set(answers) <= {200, 204, 503} and answers[200] and answers[204], answers
    with control(node, sandbox) as post:
        wait_for(lambda: post("/unfreeze").status_code == 204, "the last freeze to end")
    # Nobody stays frozen: neither the sandbox nor what was made of it in the middle of a freeze.
    for each in (sandbox, *children):
        assert isinstance(each, Sandbox)
        before = each.files.read("ticks")
        wait_for(lambda each=each, before=before: each.files.read("ticks") not in ("", before), "ticks")  # type: ignore[misc]
        assert each.commands.run("echo alive").stdout == "alive\n"
    assert command.pid in {process.pid for process in sandbox.commands.list()}


def test_one_key_and_two_requests_at_once(create: Create, node: NodeProcess, api: httpx.Client) -> None:
    headers = {"Idempotency-Key": f"key-{time.time_ns()}"}

    def ask(number: int) -> httpx.Response:
        body = {"templateID": "base", "metadata": {"number": str(number % 2)}}
        return api.post("/v2/sandboxes", json=body, headers=headers)

    with ThreadPoolExecutor(8) as executor:
        answers = list(executor.map(ask, range(8)))
    assert Counter(answer.status_code for answer in answers) == {201: 4, 422: 4}
    (sandbox_id,) = {answer.json()["sandboxID"] for answer in answers if answer.status_code == 201}
    assert list(node.records("sandboxes")) == [sandbox_id]

    # While it is killed: each answer names a sandbox that was there, and one at most is left.
    def kill(_: int) -> int:
        return api.delete(f"/sandboxes/{sandbox_id}").status_code

    (first, *_) = (answer for answer in answers if answer.status_code == 201)
    same = json.loads(first.request.content)
    with ThreadPoolExecutor(8) as executor:
        killed = executor.map(kill, range(2))
        made = [executor.submit(lambda: api.post("/v2/sandboxes", json=same, headers=headers)) for _ in range(4)]
        assert set(killed) == {204, 404}
    assert {future.result().status_code for future in made} <= {201, 409, 422}
    wait_for(lambda: sandbox_id not in node.records("sandboxes"), "the sandbox to go")
    assert len(node.records("sandboxes")) <= 1


def test_snapshots_that_are_deleted_while_they_are_used(create: Create, node: NodeProcess, api: httpx.Client) -> None:
    sandbox = create()
    sandbox.files.write("f", "kept")
    for turn in range(3):
        snapshot = sandbox.create_snapshot().snapshot_id
        name = f"race-{time.time_ns()}"

        def build(snapshot: str = snapshot, name: str = name) -> str:
            try:
                Template.build(Template().from_template(snapshot).run_cmd("cat f"), name)
            except BuildException as error:
                return str(error)
            return ""

        def start(_: int, snapshot: str = snapshot) -> httpx.Response:
            return api.post("/v2/sandboxes", json={"templateID": snapshot})

        with ThreadPoolExecutor(5) as executor:
            building = executor.submit(build)
            starting = [executor.submit(start, number) for number in range(3)]
            # At the beginning of all, in the middle, when some are done.
            wait_for(lambda turn=turn, starting=starting: sum(f.done() for f in starting) >= turn, "turns")  # type: ignore[misc]
            assert api.delete(f"/templates/{snapshot}").status_code == 204
            refused = building.result()
        assert not refused or "not found" in refused, refused
        for future in starting:
            answer = future.result()
            assert answer.status_code in (201, 404), answer.text
            if answer.status_code == 201:
                assert Sandbox.connect(answer.json()["sandboxID"]).files.read("f") == "kept"
        if not refused:
            assert create(name).files.read("f") == "kept"
            assert api.delete(f"/templates/{name}").status_code == 204
        assert api.post("/v2/sandboxes", json={"templateID": snapshot}).status_code == 404
