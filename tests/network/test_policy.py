"""Pure parts: settings, addresses, policies and the text they become."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv4Network
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import InvalidRequestError
from aenv.network import addressing
from aenv.network.errors import InvalidPolicy, NetworkUnavailable
from aenv.network.policy import PROTECTED_RANGES, EgressPolicy, permits, protected_networks, render_update
from aenv.network.ruleset import root_ruleset, slot_ruleset
from aenv.network.settings import NetworkSettings

POOL = IPv4Network("10.231.0.0/16")
addresses = st.integers(0, 2**32 - 1).map(IPv4Address)
networks = st.builds(
    lambda address, length: IPv4Network((address, length), strict=False), addresses, st.integers(0, 32)
)
network_lists = st.lists(networks, max_size=6)


def texts(entries: list[IPv4Network]) -> tuple[str, ...]:
    return tuple(str(entry) for entry in entries)


@given(network_lists)
def test_protection_is_exactly_the_ranges_less_the_exceptions(exceptions: list[IPv4Network]) -> None:
    remaining = protected_networks(POOL, exceptions)
    full = protected_networks(POOL, [])
    probes = {n[0] for n in (*full, *exceptions, *remaining)} | {n[-1] for n in (*full, *exceptions, *remaining)}
    for probe in probes:
        expected = any(probe in n for n in full) and not any(probe in n for n in exceptions)
        assert any(probe in n for n in remaining) is expected
    assert all(not a.overlaps(b) for a, b in pairwise(remaining))  # what nft demands


@given(st.booleans(), network_lists, network_lists, addresses)
def test_allow_precedes_deny_and_protection_precedes_both(
    internet: bool, allow: list[IPv4Network], deny: list[IPv4Network], destination: IPv4Address
) -> None:
    policy = EgressPolicy(internet, texts(allow), texts(deny))
    protected = protected_networks(POOL, [])
    for probe in (destination, *(n[0] for n in (*allow, *deny))):
        got = permits(policy, protected, probe)
        if any(probe in n for n in PROTECTED_RANGES):
            assert not got
        elif any(probe in n for n in allow):
            assert got
        else:
            assert got is (internet and not any(probe in n for n in deny))


@given(st.booleans(), network_lists, network_lists)
def test_rendered_update_carries_the_policys_networks(
    internet: bool, allow: list[IPv4Network], deny: list[IPv4Network]
) -> None:
    policy = EgressPolicy(internet, texts(allow), texts(deny))
    rendered = render_update("aenv", policy)
    assert rendered.index("flush set ip aenv allow") < rendered.index("flush set ip aenv deny")
    for name, expected in (("allow", policy.allowed_networks()), ("deny", policy.denied_networks())):
        match = re.search(rf"add element ip aenv {name} \{{ (.*) \}}", rendered)
        found = [IPv4Network(text) for text in match.group(1).split(", ")] if match else []
        assert found == expected
        assert all(not a.overlaps(b) for a, b in pairwise(found))


@given(st.text(max_size=40))
def test_no_text_gets_into_the_rules_unparsed(entry: str) -> None:
    try:
        policy = EgressPolicy(deny_out=(entry,))
    except InvalidPolicy:
        return
    assert re.fullmatch(r"[\w ./{},\n]*", render_update("aenv", policy))


@pytest.mark.parametrize("entry", ["example.com", "", "1.2.3", "10.0.0.0/33", "1.1.1.1 } ; flush ruleset"])
def test_entries_that_are_no_networks_are_refused_with_a_hint(entry: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"203\.0\.113"):
        EgressPolicy(allow_out=(entry,))


def test_ipv6_can_be_denied_and_not_allowed() -> None:
    assert EgressPolicy(deny_out=("::/0",)).denied_networks() == []
    with pytest.raises(InvalidPolicy, match="IPv6"):
        EgressPolicy(allow_out=("2001:db8::1",))


def test_single_addresses_and_host_bits_are_accepted() -> None:
    policy = EgressPolicy(allow_out=("8.8.8.8", "8.8.4.4/24"))
    assert policy.allowed_networks() == [IPv4Network("8.8.4.0/24"), IPv4Network("8.8.8.8/32")]


@given(st.integers(0, 32767))
def test_slots_have_addresses_of_their_own(index: int) -> None:
    settings = NetworkSettings()
    slot = addressing.slot_at(settings, index)
    peer = addressing.peer_address(settings, index)
    assert IPv4Address(slot.host_address) == peer + 1
    assert IPv4Network((peer, 31)).subnet_of(settings.pool)
    assert addressing.slot_index(settings, slot.netns) == index
    assert len(slot.netns) <= 15


@pytest.mark.parametrize("name", ["aenv", "aenv-", "aenv-01", "aenv-x", "aenv2-1", "aenv--1", "eth0", "aenv-²"])
def test_names_of_others_are_nobodys_slots(name: str) -> None:
    assert addressing.slot_index(NetworkSettings(), name) is None


def test_the_pool_ends() -> None:
    assert addressing.capacity(NetworkSettings()) == 32768
    with pytest.raises(ValueError, match="outside the pool"):
        addressing.slot_at(NetworkSettings(pool_cidr="10.9.0.0/30"), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefix": "Aenv"},
        {"prefix": "a-b"},
        {"prefix": "abcdefghij", "pool_cidr": "10.0.0.0/14"},
        {"pool_cidr": "10.231.0.0/31"},
        {"pool_cidr": "fd00::/64"},
        {"always_allow": ("10.231.5.0/24",)},
        {"always_allow": ("example.com",)},
        {"mtu": 100},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(NetworkUnavailable):
        NetworkSettings(**wrong)  # type: ignore[arg-type]


def test_rulesets_have_no_empty_lists() -> None:
    settings = NetworkSettings()
    slot = slot_ruleset(IPv4Address("10.231.0.1"), IPv4Address("10.231.0.0"), settings.pool, ())
    root = root_ruleset("aenv", settings.pool, (), ())
    assert not re.search(r"\{\s*\}", slot)
    assert "elements" not in root
