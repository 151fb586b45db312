"""Words of Dockerfiles: the rules of Docker's reference, and a POSIX shell as the judge where both have the same."""

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.template.dockerfile_words import Scope, WordError, literal, protect, split, template
from aenv.template.expand import expand

KNOWN = Scope({"A": "one", "EMPTY": "", "PATHS": "/a:/b"})
CLOSED = Scope(KNOWN.known, closed=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b  c", ["a", "b", "c"]),
        ("\ta\tb ", ["a", "b"]),
        ("'a b' \"c d\"", ["'a b'", '"c d"']),
        (r"a\ b c", [r"a\ b", "c"]),
        ("NAME='x y'z w", ["NAME='x y'z", "w"]),
        (r'"a \" b" c', [r'"a \" b"', "c"]),
        ("", []),
    ],
)
def test_splitting_leaves_quotes_in_words(text: str, words: list[str]) -> None:
    assert split(text) == words


@pytest.mark.parametrize("text", ["'a", 'b "c', "a'b c"])
def test_a_quote_that_is_not_closed_is_an_error(text: str) -> None:
    with pytest.raises(WordError, match="not closed"):
        split(text)


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("$A", "one"),
        ("${A}two", "onetwo"),
        ("x$A-y", "xone-y"),
        ("'$A'", "$A"),
        ('"$A"', "one"),
        (r"\$A", "$A"),
        ("$EMPTY", ""),
        ("${EMPTY:-other}", "other"),
        ("${EMPTY-other}", ""),
        ("${A:-other}", "one"),
        ("${A:+other}", "other"),
        ("${EMPTY:+other}", ""),
        ("${EMPTY+other}", "other"),
        ("${A:-${PATHS}}", "one"),
        ("${EMPTY:-${PATHS}}", "/a:/b"),
        ("${A:?must be set}", "one"),
        ("$", "$"),
        ("a$.b", "a$.b"),
        (r"C:\dir", "C:dir"),
        (r'"\d"', r"\d"),
    ],
)
def test_values_of_words(word: str, value: str) -> None:
    assert literal(word, KNOWN) == value
    assert expand(template(word, KNOWN), {}) == value


def test_another_escape_character() -> None:
    assert literal(r"C:\dir`$A", KNOWN, "`") == r"C:\dir$A"
    assert split("a` b c", "`") == ["a` b", "c"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("${A", "not supported"),
        ("${A:-x", "not closed"),
        ("${}", "without the name"),
        ("${A%x}", "not supported"),
        ("${EMPTY:?say why}", "EMPTY is not set: say why"),
        ("'a", "not closed"),
        ('"a', "not closed"),
        ("$OTHER", "OTHER is not known here"),
    ],
)
def test_words_that_have_no_value_say_why(word: str, message: str) -> None:
    with pytest.raises(WordError, match=message):
        literal(word, KNOWN)


def test_a_variable_that_cannot_come_from_elsewhere_is_empty() -> None:
    assert literal("a${OTHER}b${OTHER:-c}", CLOSED) == "abc"


def test_variables_of_the_base_image_stay_references() -> None:
    assert template("$PATH:/app", KNOWN) == "${PATH}:/app"
    assert template("${PATH:-/bin}:$A", KNOWN) == "${PATH:-/bin}:one"
    assert expand(template("/x:$PATH:'$A'", KNOWN), {"PATH": "/bin"}) == "/x:/bin:$A"
    with pytest.raises(WordError, match="not supported for a variable of the base image"):
        template("${PATH-/bin}", KNOWN)


@given(st.text())
def test_protected_text_expands_to_itself(text: str) -> None:
    assert expand(protect(text), {"A": "wrong"}) == text


@given(st.lists(st.text(), max_size=5))
def test_quoted_words_keep_their_text(texts: list[str]) -> None:
    words = split(" ".join(map(shlex.quote, texts)))
    assert [literal(word, KNOWN) for word in words] == texts


VARIABLES = {"A": "one two", "B": "", "C": "$A'\\"}
PIECES = st.sampled_from(
    [*"abc/=.:-", *("$A", "${B}", "${C}", "$D", "${B:-x}", "${A:+y}", "${D-z}", "${B+w}", "${D:-${A}}", "$B:", r"\$")]
)
QUOTED = st.builds(lambda parts: '"' + "".join(parts) + '"', st.lists(st.one_of(PIECES, st.sampled_from([" ", "'"]))))
PLAIN = st.builds(shlex.quote, st.text(st.characters(codec="ascii", exclude_characters="\0\r\n")))
WORDS = st.builds("".join, st.lists(st.one_of(PIECES, QUOTED, PLAIN), min_size=1, max_size=6))


@settings(max_examples=60)
@given(st.lists(WORDS, min_size=1, max_size=20))
def test_a_shell_gives_words_the_same_values(words: list[str]) -> None:
    # Assignments, because a shell does not split them at spaces.
    script = "".join(f"v={word}\nprintf '%s\\0' \"$v\"\n" for word in words)
    done = subprocess.run(["/bin/sh", "-c", script], env=VARIABLES, capture_output=True, text=True, check=True)
    assert [literal(word, Scope(VARIABLES, closed=True)) for word in words] == done.stdout.split("\0")[:-1]


REFERENCES = st.sampled_from(
    ["$A", "${A}", "${A:-d}", "${A:+d}", "$B", "${B:-d}", "${D:-e}", "$D", r"\$A", "'$A'", "x"]
)


@given(st.lists(REFERENCES, max_size=8))
def test_what_is_left_for_the_build_comes_out_as_if_it_were_known(pieces: list[str]) -> None:
    word = "".join(pieces)
    assert expand(template(word, Scope({})), VARIABLES) == literal(word, Scope(VARIABLES, closed=True))
