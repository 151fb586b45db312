"""Which members of an archive a COPY source names, compared with what the SDK packs for it."""

import string
from pathlib import Path

import pytest
from e2b.template.utils import get_all_files_in_path
from hypothesis import given
from hypothesis import strategies as st

from aenv.errors import InvalidRequestError
from aenv.template.globs import compile_pattern, has_magic, matches

TREE = ("a.py", "b.txt", ".hidden.py", "app/main.py", "app/sub/deep.py", "app/sub/x.txt", "lib/c1.so", "lib/c2.so")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", [".hidden.py", "a.py"]),
        ("app/*", ["app/main.py", "app/sub"]),
        ("**/*.py", [".hidden.py", "a.py", "app/main.py", "app/sub/deep.py"]),
        ("lib/c?.so", ["lib/c1.so", "lib/c2.so"]),
        ("lib/c[!1].so", ["lib/c2.so"]),
        ("lib/c[1-2].so", ["lib/c1.so", "lib/c2.so"]),
        ("./app/m*", ["app/main.py"]),
        ("*/sub", ["app/sub"]),
        ("*.none", []),
    ],
)
def test_patterns_name_what_the_sdk_packs(pattern: str, expected: list[str], tmp_path: Path) -> None:
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    packed = [str(Path(path).relative_to(tmp_path)) for path in get_all_files_in_path(pattern, str(tmp_path), [])]
    assert sorted(matches(pattern, packed)) == expected
    # Everything that was packed is one of these, or below one.
    assert all(any(name == top or name.startswith(top + "/") for top in expected) for name in packed)


def test_whole_trees_are_taken_once() -> None:
    assert matches("**", ["app", "app/main.py", "app-2", "b"]) == ["app", "app-2", "b"]


@given(
    st.text(string.ascii_letters + "._-/ []*?!^\\", max_size=12), st.text(string.ascii_letters + "/.", max_size=12)
)
def test_patterns_never_break(pattern: str, name: str) -> None:
    try:
        matches(pattern, [name])
    except InvalidRequestError:
        assert has_magic(pattern)


@given(st.text(string.ascii_letters + string.digits + "._- ()+{}|$^", min_size=1, max_size=12))
def test_a_plain_name_matches_itself_only(name: str) -> None:
    if name in (".", ".."):
        return
    assert compile_pattern(name).match(name)
    assert not compile_pattern(name).match(name + "x")
