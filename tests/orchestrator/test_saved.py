from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aenv.errors import ConflictError, InvalidRequestError, SnapshotNotFoundError
from aenv.orchestrator import records
from aenv.orchestrator.model import SandboxSpec, SandboxState, SavedSnapshot
from aenv.orchestrator.saved import SavedSnapshots
from aenv.orchestrator.store import Store
from tests.orchestrator.samples import NOW, sandbox, snapshot, template


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "db")
    with made.transaction():
        made.templates.put(template(aliases=("base", "team/x")))
    yield made
    made.close()


def save(store: Store, name: str | None, snapshot_id: str = "s1", sandbox_id: str = "i1") -> SavedSnapshot:
    catalogue = SavedSnapshots(store)
    catalogue.check(name)
    made = catalogue.record(name, sandbox(sandbox_id), snapshot(snapshot_id))
    with store.transaction():
        store.saved.put(made)
    return made


def test_found_by_id_and_name_with_and_without_tag(store: Store) -> None:
    plain, tagged, unnamed = save(store, "Mine"), save(store, "mine:v2"), save(store, None)
    found = SavedSnapshots(store)
    for text in (plain.id, f"{plain.id}:default", "mine", "MINE", "mine:default"):
        assert found.get(text) == plain, text
    for text in (tagged.id, "mine:v2", f"{tagged.id}:v2"):
        assert found.get(text) == tagged, text
    assert found.get(unnamed.id) == unnamed
    for text in ("", "None", "mine:v3", f"{plain.id}:v2", "mine:", "other"):
        if text != "mine:":  # an empty tag is no tag
            with pytest.raises(SnapshotNotFoundError):
                found.get(text)


def test_saving_again_keeps_id_and_birth(store: Store) -> None:
    first = save(store, "mine", "s1")
    again = save(store, "mine:default", "s2")
    assert (again.id, again.created_at) == (first.id, first.created_at)
    assert again.snapshot_id == "s2"
    assert again.updated_at >= first.updated_at
    assert save(store, None).id != save(store, None).id


@pytest.mark.parametrize("name", ["base", "team/x", "BASE:v1", "t1"])
def test_a_templates_name_is_taken(store: Store, name: str) -> None:
    with pytest.raises(ConflictError, match="template"):
        SavedSnapshots(store).check(name)


@pytest.mark.parametrize("name", ["", " ", "a b", ":v1", "a:", "a:b:c", "-a", "/a", "a/", "ä", "a" * 129])
def test_wrong_names_are_refused(store: Store, name: str) -> None:
    with pytest.raises(InvalidRequestError):
        SavedSnapshots(store).check(name)


def test_an_id_cannot_be_a_name(store: Store) -> None:
    with pytest.raises(ConflictError, match="id of a snapshot"):
        SavedSnapshots(store).check(save(store, None).id)


def test_pages_are_of_a_sandbox_or_a_name(store: Store) -> None:
    made = [save(store, name, sandbox_id=owner) for name, owner in (("a", "i1"), ("a:v2", "i2"), (None, "i1"))]
    newest = sorted(made, key=lambda saved: (saved.created_at, saved.id), reverse=True)
    found = SavedSnapshots(store)
    first = found.page(None, None, 2, None)
    rest = found.page(None, None, 2, first.next_token)
    assert [*first.items, *rest.items] == newest
    assert rest.next_token is None
    assert {s.id for s in found.page("i1", None, 9, None).items} == {made[0].id, made[2].id}
    assert {s.id for s in found.page(None, "a", 9, None).items} == {made[0].id, made[1].id}
    assert [s.id for s in found.page(None, "a:v2", 9, None).items] == [made[1].id]
    assert [s.id for s in found.page(None, made[2].id, 9, None).items] == [made[2].id]
    assert not found.page("i2", "a:default", 9, None).items
    with pytest.raises(InvalidRequestError):
        found.page(None, None, 2, "foreign")


def test_a_sandbox_of_a_snapshot_has_its_environment_and_defaults(store: Store) -> None:
    source = sandbox(env_vars={"A": "1", "B": "1"}, default_user="dev", default_workdir="/srv")
    made = SavedSnapshots(store).record("mine:v1", source, snapshot("s9", disk="l9"))
    child = records.created(SandboxSpec("mine:v1", 60, env_vars={"B": "2"}), made, snapshot("s9", disk="l9"), NOW)
    created = child.sandbox
    assert created.env_vars == {"A": "1", "B": "2"}
    assert (created.default_user, created.default_workdir) == ("dev", "/srv")
    assert (created.template_id, created.template_alias) == (made.id, "mine:v1")
    assert (created.snapshot_id, created.disk, child.layer.parent) == ("s9", child.layer.id, "l9")
    assert created.state is SandboxState.STARTING


def test_a_fork_has_tokens_and_a_life_of_its_own() -> None:
    parent = sandbox(
        state=SandboxState.PAUSED, envd_access_token="e", traffic_access_token="t", memory_kept=False, vm_id="v"
    )
    child = records.forked(parent, snapshot(), 7, NOW).sandbox
    assert child.parent_id == parent.id
    assert child.id != parent.id
    assert child.envd_access_token not in (None, "e")
    assert child.traffic_access_token not in (None, "t")
    assert (child.vm_id, child.slot, child.memory_base, child.memory_kept) == (None, None, None, True)
    assert (child.end_at - NOW).total_seconds() == 7
    assert records.forked(replace(parent, envd_access_token=None), snapshot(), None, NOW).sandbox.timeout == 60
