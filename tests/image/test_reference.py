"""Image references: what parses, to what, and that nothing else does."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.image.errors import ImageError, InvalidReferenceError
from aenv.image.reference import Reference, candidates, parse

DIGEST = "sha256:" + "0123456789abcdef" * 4

components = st.from_regex(r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*", fullmatch=True).filter(lambda text: len(text) < 30)
hosts = st.sampled_from(["localhost", "localhost:5000", "registry.example.org", "10.0.0.1:5000", "[::1]:5000", "a:1"])
tags = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,20}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ubuntu:24.04", Reference(None, "ubuntu", "24.04")),
        ("ubuntu", Reference(None, "ubuntu", "latest")),
        ("team/app", Reference(None, "team/app", "latest")),
        ("docker.io/ubuntu", Reference("docker.io", "library/ubuntu", "latest")),
        ("docker.io/library/x", Reference("docker.io", "library/x", "latest")),
        ("index.docker.io/a/b:c", Reference("docker.io", "a/b", "c")),
        (f"host:5000/a/b@{DIGEST}", Reference("host:5000", "a/b", None, DIGEST)),
        (f"ghcr.io/a/b:v1@{DIGEST}", Reference("ghcr.io", "a/b", "v1", DIGEST)),
        ("localhost/x", Reference("localhost", "x", "latest")),
        ("Host/x", Reference("host", "x", "latest")),
        ("[::1]:5000/x:y", Reference("[::1]:5000", "x", "y")),
    ],
)
def test_examples(text: str, expected: Reference) -> None:
    assert parse(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "/", ":", "@", "a//b", "a/", "/a", "a:", "a:b:c", "A", "a/B", "-a", "a..b", "a b", "a\n", "a:t\n"),
        *("a@sha256:1", f"a@{DIGEST}0", f"a@md5:{DIGEST[7:]}", f"a@{DIGEST.upper()}", "a:" + "t" * 129),
        *("host:99999/a", "host:0/a", "ho st.x/a", ".x/a", "../etc/passwd", "http://x/y", "a" * 256),
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(InvalidReferenceError) as caught:
        parse(text)
    assert caught.value.hint


@given(st.none() | hosts, st.lists(components, min_size=1, max_size=3), st.none() | tags, st.booleans())
def test_what_is_composed_is_parsed_again(host: str | None, path: list[str], tag: str | None, pinned: bool) -> None:
    text = "/".join([host, *path] if host else path) + (f":{tag}" if tag else "") + (f"@{DIGEST}" if pinned else "")
    if host is None and ("." in path[0] or path[0] == "localhost") and len(path) > 1:
        return  # the first component is a registry then
    parsed = parse(text)
    assert (parsed.registry, parsed.repository) == (host, "/".join(path))
    assert parsed.tag == (tag or (None if pinned else "latest")) and parsed.digest == (DIGEST if pinned else None)
    assert parse(str(parsed)) == parsed


@given(st.text(max_size=60) | st.from_regex(r"[a-zA-Z0-9./:@_\[\]-]{1,60}"))
def test_anything_else_is_a_typed_error_or_harmless_in_a_url(text: str) -> None:
    try:
        parsed = parse(text)
    except ImageError:
        return
    assert re.fullmatch(r"[a-z0-9._/-]+", parsed.repository) and ".." not in parsed.repository
    assert re.fullmatch(r"[\w.-]+|(sha256|sha512):[0-9a-f]+", parsed.version, re.ASCII)
    assert parsed.registry is None or re.fullmatch(r"[a-z0-9.:\[\]-]+", parsed.registry)


def test_short_names_are_searched_in_order() -> None:
    found = candidates(parse("app:1"), ["docker.io", "Quay.io", "host:5000"])
    assert [str(name) for name in found] == ["docker.io/library/app:1", "quay.io/app:1", "host:5000/app:1"]
    assert candidates(parse("quay.io/app"), ["docker.io"]) == [parse("quay.io/app")]
    assert str(candidates(parse("a/b"), ["docker.io"])[0]) == "docker.io/a/b:latest"
    with pytest.raises(InvalidReferenceError, match="names no registry"):
        candidates(parse("app"), [])
    with pytest.raises(InvalidReferenceError):
        candidates(parse("app"), ["not a host"])
