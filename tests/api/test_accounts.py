"""Keys, tokens, secrets, volumes through the API, without machines."""

import sqlite3
from pathlib import Path

import pytest

from aenv.accounts.credentials import Credentials, Kind, mask
from aenv.accounts.database import open_accounts
from aenv.errors import ConflictError, CorruptFileError
from tests.api.fakes import KEY, FakeOrchestrator, api


def test_credentials_survive_as_hashes(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    database = open_accounts(path)
    first = Credentials(database, KEY)
    made, value = first.create(Kind.API_KEY, "a")
    token, token_value = first.create(Kind.ACCESS_TOKEN, "b")
    assert first.valid(value) and first.valid(token_value) and first.valid(KEY)
    assert not any(map(first.valid, ("", "e2b_", value[:-1], value + "x", "é", "\udcff")))
    database.close()
    assert path.stat().st_mode & 0o777 == 0o600
    assert value.encode() not in path.read_bytes()

    database = open_accounts(path)
    again = Credentials(database, KEY)
    assert again.team_id == first.team_id
    assert again.valid(value) and again.valid(token_value)
    assert [key.name for key in again.list(Kind.API_KEY)][1:] == ["a"]
    again.delete(Kind.ACCESS_TOKEN, token.id)
    assert not again.valid(token_value)
    with pytest.raises(ConflictError, match="own key"):
        again.delete(Kind.API_KEY, again.list(Kind.API_KEY)[0].id)
    again.delete(Kind.API_KEY, made.id)
    assert not again.valid(value)
    database.close()


def test_a_foreign_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "accounts.db"
    path.write_bytes(b"x" * 8192)
    with pytest.raises(CorruptFileError):
        open_accounts(path)
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(CorruptFileError, match="99"):
        open_accounts(path)


def test_masks_show_little() -> None:
    assert mask(KEY).length == 40
    short = mask("letmein")
    assert (short.prefix, short.head, short.tail) == ("", "", "")


async def test_names_are_checked() -> None:
    async with api(FakeOrchestrator()) as client:
        for body in ({}, {"name": ""}, {"name": 1}, {"name": "x" * 257}):
            for path in ("/api-keys", "/access-tokens"):
                assert (await client.post(path, json=body)).status_code == 400
        assert (await client.patch("/api-keys/nosuch", json={"name": "x"})).status_code == 404


@pytest.mark.parametrize(
    "body",
    [
        {"name": "sec_x", "value": "v"},
        {"name": "a b", "value": "v"},
        {"name": "", "value": "v"},
        {"name": "x" * 129, "value": "v"},
        {"name": "x"},
        {"name": "x", "value": "v", "metadata": {str(n): "" for n in range(33)}},
        {"name": "x", "value": "v", "metadata": {"k" * 129: ""}},
        {"name": "x", "value": "v", "metadata": {"k": "ü" * 513}},
        {"name": "x", "value": "v", "metadata": {str(n): "v" * 1000 for n in range(9)}},
        {"name": "x", "value": "v", "metadata": {"k": 1}},
    ],
)
async def test_secrets_that_cannot_be(body: dict[str, object]) -> None:
    async with api(FakeOrchestrator()) as client:
        assert (await client.post("/secrets", json=body)).status_code == 400
        assert (await client.get("/secrets")).json() == []


async def test_secrets_have_pages() -> None:
    async with api(FakeOrchestrator()) as client:
        for name in ("c", "a", "b"):
            assert (await client.post("/secrets", json={"name": name, "value": "hidden"})).status_code == 201
        first = await client.get("/secrets", params={"limit": 2})
        rest = await client.get("/secrets", params={"nextToken": first.headers["x-next-token"]})
        assert [secret["name"] for secret in first.json() + rest.json()] == ["a", "b", "c"]
        assert (await client.get("/secrets", params={"nextToken": "foreign"})).status_code == 400
        kept = (await client.post("/secrets/a", json={"value": "v", "metadata": {"x": "y"}})).json()
        assert kept["metadata"] == {"x": "y"}
        assert (await client.post("/secrets/a", json={"value": "w"})).json()["metadata"] == {"x": "y"}
        assert (await client.delete("/secrets/a")).status_code == 204
        assert (await client.delete("/secrets/a")).status_code == 404


async def test_what_is_missing_says_so() -> None:
    async with api(FakeOrchestrator()) as client:
        for method, path in (("GET", "/teams/x/metrics"), ("GET", "/teams/x/metrics/max"), ("POST", "/admin/x/y")):
            assert (await client.request(method, path)).status_code == 501


async def test_metrics_of_many_are_bounded() -> None:
    async with api(FakeOrchestrator()) as client:
        few = await client.get("/sandboxes/metrics", params={"sandbox_ids": "a,b,,a, %00"})
        assert few.json() == {"sandboxes": {}}
        many = ",".join(f"s{n}" for n in range(101))
        assert (await client.get("/sandboxes/metrics", params={"sandbox_ids": many})).status_code == 400
        assert (await client.get("/sandboxes/metrics")).status_code == 400
