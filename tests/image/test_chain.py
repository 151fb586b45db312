"""Names of what layers make of each other."""

from __future__ import annotations

import hashlib

from aenv.image.chain import MAX_STEPS, blank_key, chain_key, layer_id, prepared_key, steps
from tests.image.writer import digest_of

A, B, C = (digest_of(text) for text in (b"a", b"b", b"c"))


def test_chains_are_named_as_the_specification_says() -> None:
    both = f"sha256:{hashlib.sha256(f'{A} {B}'.encode()).hexdigest()}"
    assert steps([A, B]) == [(A, range(1)), (both, range(1, 2))]
    assert steps([]) == []
    assert steps([A, B, C])[:2] == steps([A, B]), "equal beginnings have equal names"
    assert steps([B, A])[-1] != steps([A, B])[-1]


def test_what_is_too_deep_goes_into_one_step() -> None:
    many = [digest_of(str(number).encode()) for number in range(MAX_STEPS + 50)]
    found = steps(many)
    assert len(found) == MAX_STEPS and found[:-1] == steps(many[:MAX_STEPS])[:-1]
    assert found[-1][1] == range(MAX_STEPS - 1, MAX_STEPS + 50)
    covered = [number for _, numbers in found for number in numbers]
    assert covered == list(range(len(many)))
    assert found[-1][0] != steps(many[:-1])[-1][0]


def test_only_what_is_verified_names_a_layer() -> None:
    assert layer_id(A, B) == A
    for unverified in (None, "sha512:" + "0" * 128):
        assert layer_id(unverified, B) == B
    assert len({layer_id(A, A), layer_id(A, A, whiteouts=False), layer_id(B, B, whiteouts=False)}) == 3


def test_what_makes_a_difference_is_in_the_name() -> None:
    keys = [
        blank_key(64),
        blank_key(65),
        chain_key(A, 64),
        chain_key(A, 65),
        chain_key(B, 64),
        *(prepared_key(A, 64, user, path) for user in ("", "u") for path in ("", "/bin")),
        prepared_key(A, 65, "", ""),
    ]
    assert len(set(keys)) == len(keys)
    assert all("/" not in key for key in keys)
