"""``.dockerignore``: Docker's documented rules."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import InvalidRequestError
from aenv.template.dockerignore import Ignore


@pytest.mark.parametrize(
    ("lines", "excluded", "kept"),
    [
        (["node_modules"], ["node_modules", "node_modules/a/b"], ["src/node_modules", "node_modules2"]),
        (["*/temp*"], ["a/temp", "a/temporary.txt", "a/temp/x"], ["temp", "a/b/temp"]),
        (["*/*/temp*"], ["a/b/temporary"], ["a/temp"]),
        (["temp?"], ["tempa", "tempb/x"], ["temp", "tempab"]),
        (["**/*.go"], ["x.go", "a/b/x.go"], ["x.go.txt"]),
        (["**/cache"], ["cache", "a/cache", "a/b/cache/c"], ["cached"]),
        (["docs/**"], ["docs/a", "docs/a/b"], ["docs", "docs2"]),
        (["a/**/z"], ["a/z", "a/b/z", "a/b/c/z"], ["a", "z"]),
        (["*.md", "!README.md"], ["x.md"], ["README.md"]),
        (["*.md", "!README*.md", "README-secret.md"], ["x.md", "README-secret.md"], ["README.md", "README-1.md"]),
        (["!README.md", "*.md"], ["README.md"], ["a.txt"]),
        (["build", "!build/keep"], ["build", "build/x"], ["build/keep", "build/keep/y"]),
        (["*"], ["a", "a/b"], []),
        (["*", "!src"], ["a"], ["src", "src/a"]),
        (["/rooted", "./dotted", "folder/"], ["rooted", "dotted", "folder/x"], ["a/rooted"]),
        (["[a-c]x", "[^d]y"], ["ax", "ey"], ["dx", "dy"]),
        ([r"a\*b"], ["a*b"], ["axb"]),
        (["# a comment", "", "  spaced  "], ["spaced"], ["# a comment", "a"]),
        ([".", "./", "!."], [], ["a"]),
        (["a.b"], ["a.b"], ["axb"]),
    ],
)
def test_what_is_excluded(lines: list[str], excluded: list[str], kept: list[str]) -> None:
    ignore = Ignore(lines)
    assert [path for path in excluded if not ignore.excludes(path)] == []
    assert [path for path in kept if ignore.excludes(path)] == []


def test_exceptions_are_known_so_that_excluded_folders_are_searched_for_them() -> None:
    assert Ignore(["a", "!a/b"]).has_exceptions
    assert not Ignore(["a"]).has_exceptions


@pytest.mark.parametrize("pattern", ["[a", "[z-a]"])
def test_a_pattern_that_is_none_is_an_error(pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"\.dockerignore.*is not a pattern"):
        Ignore([pattern])


NAMES = st.text("abc.", min_size=1, max_size=3).filter(lambda name: set(name) != {"."})
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


@given(st.lists(PATHS, min_size=1), PATHS)
def test_plain_names_exclude_themselves_and_what_is_below(lines: list[str], path: str) -> None:
    expected = any(path == line or path.startswith(f"{line}/") for line in lines)
    assert Ignore(lines).excludes(path) == expected


@given(st.lists(st.text("ab*?/!", min_size=1, max_size=6)), PATHS)
def test_what_is_below_an_excluded_folder_is_excluded(lines: list[str], path: str) -> None:
    ignore = Ignore(line for line in lines if not line.startswith("!"))
    if ignore.excludes(path):
        assert ignore.excludes(f"{path}/below")


@given(st.lists(st.text()), st.text(min_size=1))
def test_any_text_is_read_or_refused(lines: list[str], path: str) -> None:
    try:
        ignore = Ignore(lines)
    except InvalidRequestError as error:
        assert re.search("is not a pattern", error.message)
    else:
        assert ignore.excludes(path) in (True, False)
