"""For how long an address that a registry named may be used."""

from __future__ import annotations

import pytest

from aenv.image.redirects import LONGEST, MARGIN, MOST, UNKNOWN, Redirects, lifetime

NOW = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC
HOST = "https://store.example.org/x"


@pytest.mark.parametrize(
    ("query", "headers", "seconds"),
    [
        ("", {}, UNKNOWN),
        ("?X-Amz-Date=20270115T075000Z&X-Amz-Expires=1200", {}, 600 - MARGIN),
        ("?X-Goog-Date=20270115T080000Z&X-Goog-Expires=100", {}, 100 - MARGIN),
        (f"?Expires={NOW + 50:.0f}&Signature=a%2Fb", {}, 50 - MARGIN),
        ("?se=2027-01-15T09%3A00%3A00Z&sig=x", {}, 3600 - MARGIN),
        ("?X-Amz-Date=20270115T070000Z&X-Amz-Expires=1200", {}, 0),
        ("?X-Amz-Date=nonsense&X-Amz-Expires=1200", {}, UNKNOWN),
        ("?X-Amz-Date=20270115T080000Z&X-Amz-Expires=999999999", {}, LONGEST),
        ("", {"Cache-Control": "private, max-age=300"}, 300 - MARGIN),
        ("", {"Cache-Control": "max-age=5"}, 0),
        ("", {"Cache-Control": "no-store"}, 0),
        ("?X-Amz-Date=20270115T080000Z&X-Amz-Expires=60", {"Cache-Control": "no-cache"}, 60 - MARGIN),
    ],
)
def test_lifetimes(query: str, headers: dict[str, str], seconds: float) -> None:
    assert lifetime(HOST + query, headers, NOW) == seconds


def test_addresses_are_remembered_for_that_long_and_not_without_end() -> None:
    known, asked = Redirects(), "https://registry.example.org/v2/a/blobs/b"
    key = ("registry.example.org", "a", "b")
    known.note(key, asked, HOST, {}, NOW)
    assert known.find(key, NOW + UNKNOWN - 1) == HOST
    assert known.find(key, NOW + UNKNOWN) is None
    known.note(key, asked, HOST, {}, NOW)
    known.forget(key)
    assert known.find(key, NOW) is None
    known.note(key, asked, "https://registry.example.org/elsewhere", {}, NOW)
    assert known.find(key, NOW) is None, "the registry itself may want a password"
    for number in range(MOST + 1):
        known.note(("r", "a", str(number)), asked, HOST, {}, NOW)
    assert known.find(("r", "a", "0"), NOW) is None and known.find(("r", "a", "1"), NOW) == HOST
